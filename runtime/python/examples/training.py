"""A language model of one Gated DeltaNet layer learns a text by heart: forward, backward, a step of Adam."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wyvern

TEXT = b"the quick brown fox jumps over the lazy dog. " * 4


class GatedDeltaNet(nn.Module):
    """Projections to q, k, v and the gates around the operator."""

    def __init__(self, width: int, heads: int, dim: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * heads * dim, bias=False)
        self.gates = nn.Linear(width, 2 * heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.full((heads,), -2.0))
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # [B, T, H, D] each
        g, beta = self.gates(x).chunk(2, -1)  # [B, T, H]
        o, _ = wyvern.ops.chunk_gated_delta_rule(
            F.silu(q),
            F.silu(k),
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
        )
        return x + self.out(o.flatten(2))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = torch.tensor(list(TEXT), device=device)[None]
    model = nn.Sequential(
        nn.Embedding(256, 64), GatedDeltaNet(64, 2, 16), nn.LayerNorm(64), nn.Linear(64, 256)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(60):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == 59:
            print(f"step {step}: loss {loss.item():.3f}")
    assert loss.item() < 0.5, "it does not learn"


if __name__ == "__main__":
    main()
