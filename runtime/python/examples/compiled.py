"""A function with the operator in it, compiled as one graph, with packed sequences and its backward pass."""

import torch

import wyvern


@torch.compile(fullgraph=True)
def mixed(q, k, v, g, beta, cu_seqlens):
    o, state = wyvern.ops.chunk_gated_delta_rule(
        q, k, torch.tanh(v), g, beta, output_final_state=True, cu_seqlens=cu_seqlens
    )
    return o.square().mean() + state.mean()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = torch.tensor([17, 0, 40])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device)
    T, H, D = int(lengths.sum()), 2, 16
    q, k, v = (torch.randn(1, T, H, D, device=device, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, T, H, device=device)
    beta = torch.rand(1, T, H, device=device)
    loss = mixed(q, torch.nn.functional.normalize(k, dim=-1), v, g, beta, cu_seqlens)
    loss.backward()
    print(f"loss {loss.item():.4f}, gradient of q {q.grad.norm().item():.4f}")
    assert torch.isfinite(q.grad).all()


if __name__ == "__main__":
    main()
