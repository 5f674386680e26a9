"""A Gated DeltaNet layer as a module, which loads the parameters of one of flash-linear-attention's.

One projection has q, k, v, the gate of the norm and both rates side by side, wyvern.layers goes from its output to
the input of the last projection, and its gradient comes back as one tensor. The layer is trained for a few steps;
then a prompt and single tokens give what the whole sequence gives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wyvern

TAPS = 4


class GatedDeltaNet(nn.Module):
    def __init__(self, width: int, heads: tuple[int, int], dims: tuple[int, int], eps: float = 1e-5) -> None:
        super().__init__()
        self.heads, self.dims, self.eps = heads, dims, eps
        (H, HV), (K, V) = heads, dims
        channels = 2 * H * K + HV * V  # of q, k and v, which are convolved
        self.in_proj = nn.Linear(width, channels + HV * V + 2 * HV, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(channels, TAPS) / TAPS)
        self.A_log = nn.Parameter(torch.empty(HV).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(HV).uniform_(-7, -2))
        self.norm_weight = nn.Parameter(torch.ones(V))
        self.out_proj = nn.Linear(HV * V, width, bias=False)

    def forward(
        self, x: Tensor, past: wyvern.layers.LayerOutput | None = None
    ) -> tuple[Tensor, wyvern.layers.LayerOutput]:
        """The outputs of tokens x [B, T, width], and what later tokens go on from."""
        made = wyvern.layers.gated_delta_net(
            self.in_proj(x), heads=self.heads, dims=self.dims, conv_weight=self.conv_weight, A_log=self.A_log,
            dt_bias=self.dt_bias, norm_weight=self.norm_weight, norm_eps=self.eps, output_final_state=True,
            initial_state=None if past is None else past.final_state,
            initial_conv_state=None if past is None else past.final_conv_state,
        )  # fmt: skip
        return self.out_proj(made.o.flatten(2)), made

    @classmethod
    def of_fla(cls, layer: nn.Module) -> GatedDeltaNet:
        """With the parameters of a GatedDeltaNet of fla.layers that has short convolutions and an output gate."""
        heads, dims = (layer.num_heads, layer.num_v_heads), (layer.head_k_dim, layer.head_v_dim)
        own = cls(layer.hidden_size, heads, dims, layer.o_norm.eps)
        theirs = layer.state_dict()
        projections = [theirs[f"{name}_proj.weight"] for name in ("q", "k", "v", "g", "b", "a")]
        convolutions = [theirs[f"{name}_conv1d.weight"].flatten(1) for name in ("q", "k", "v")]
        own.load_state_dict({
            "in_proj.weight": torch.cat(projections), "conv_weight": torch.cat(convolutions),
            "A_log": theirs["A_log"], "dt_bias": theirs["dt_bias"], "norm_weight": theirs["o_norm.weight"],
            "out_proj.weight": theirs["o_proj.weight"],
        })  # fmt: skip
        return own


def difference(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = GatedDeltaNet(64, heads=(2, 4), dims=(32, 32)).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x = torch.randn(2, 200, 64, device=device)
    target = x.roll(3, dims=1)  # the third token before
    losses = []
    for _ in range(10):
        loss = F.mse_loss(layer(x)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < losses[0]

    with torch.no_grad():
        whole, _ = layer(x)
        o, past = layer(x[:, :180])
        parts = [o]
        for t in range(180, 200):
            o, past = layer(x[:, t : t + 1], past)
            parts.append(o)
        apart = difference(torch.cat(parts, 1), whole)
    print(f"a prompt and 20 single tokens are {apart:.1e} from the whole")
    assert apart < 1e-3

    try:
        import wyvern.fla
        from fla.layers import GatedDeltaNet as Theirs
    except ImportError:
        print("pip install flash-linear-attention to load one of its layers")
        return
    theirs = Theirs(64, expand_v=1.0, head_dim=32, num_heads=2, num_v_heads=4).to(device)
    own = GatedDeltaNet.of_fla(theirs).to(device)
    with torch.no_grad(), wyvern.fla.enable(layers=False):
        apart = difference(own(x)[0], theirs(x)[0])
    print(f"with the parameters of a layer of fla {apart:.1e} from its outputs")
    assert apart < 1e-3


if __name__ == "__main__":
    main()
