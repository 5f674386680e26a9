"""The recurrence in float64, token by token, differentiable by PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    steps: int = 1,
    l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """o and the final state of inputs in float64, shapes as wyvern.ops has them."""
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if neg_eigval else 1)
    if gate:
        g = _gate(g, A_log, dt_bias, lower_bound)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = slice(n, n + 1) if cu_seqlens is not None else slice(None)
        S = q.new_zeros(B, HV, K, V)
        if initial_state is not None:
            S = initial_state[rows].transpose(-1, -2) if v_first else initial_state[rows]
        for t in range(first, last):
            if g is not None:
                decay = g[:, t].exp()
                S = S * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
            for row in range(t * steps, (t + 1) * steps):
                key, value = k[:, row], v[:, row]
                if erase is None:
                    read = torch.einsum("bhkv,bhk->bhv", S, key)
                    u = beta[:, row, :, None] * (value - read)
                else:
                    read = torch.einsum("bhkv,bhk->bhv", S, erase[:, row] * key)
                    u = write[:, row] * value - read
                S = S + key[..., None] * u[..., None, :]
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        states.append(S)
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, HV, V)
    state = torch.cat(states)
    return o, state.transpose(-1, -2) if v_first else state


def _gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    if dt_bias is not None:
        g = g + dt_bias
    rate = 1.0 if A_log is None else A_log.exp()
    if A_log is not None and g.dim() == 4:
        rate = rate[:, None]
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def error(value: Tensor, wanted: Tensor) -> float:
    """rms(value - wanted) / rms(wanted), the measure of runtime/SPECIFICATION.md."""
    wanted = wanted.detach().double().cpu()
    difference = value.detach().double().cpu() - wanted
    return float(difference.norm() / wanted.norm().clamp_min(1e-30))
