"""What the layers of flash-linear-attention call beside the operators, on the CPU, where its own kernels do
not run: the short convolution and the norms of the output. By PyTorch, in float32 or more, with gradients.

Each function has the name, the parameters and the results of the one it stands in for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ._torch import torch  # before what imports it by its own name
import torch.nn.functional as F
from torch import Tensor

_ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Of sequences x [N, T, D]; a state [N, D, W] holds the last W tokens, zeros before the first."""
    W = weight.shape[1]
    before = x.new_zeros(x.shape[0], x.shape[2], W) if state is None else state.to(x.dtype)
    tokens = torch.cat([before, x.transpose(1, 2)], dim=-1)
    wide = _wide(x)
    # With a zero for the token that no output reads, so that a row is left to drop where T is 0: conv1d
    # takes no input shorter than W.
    y = F.conv1d(
        F.pad(tokens[..., 1:], (1, 0)).to(wide), weight.to(wide).unsqueeze(1),
        None if bias is None else bias.to(wide), groups=x.shape[2],
    )  # fmt: skip
    return y[..., 1:].transpose(1, 2), tokens[..., -W:].contiguous() if keep else None


def _boundaries(cu_seqlens: Tensor, T: int) -> list[int]:
    """cu_seqlens of a pack of T tokens, checked as the operators check it."""
    at = cu_seqlens.tolist()
    if not at:
        raise ValueError("cu_seqlens is empty; it must have N + 1 entries, of N sequences")
    if at[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {at[0]}; it must be 0")
    for n in range(1, len(at)):
        if at[n] < at[n - 1]:
            raise ValueError(
                f"cu_seqlens[{n}] is {at[n]}; it must be at least the entry before it, {at[n - 1]}"
            )
    if at[-1] != T:
        raise ValueError(f"cu_seqlens[{len(at) - 1}] is {at[-1]}; it must be T = {T}, the packed tokens")
    return at


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    keep = bool(output_final_state)
    if cu_seqlens is None:
        y, state = _convolve(x, weight, bias, initial_state, keep)
    else:
        rows = x.flatten(0, 1).unsqueeze(0)
        at = _boundaries(cu_seqlens, rows.shape[1])
        N = len(at) - 1
        if initial_state is not None and initial_state.shape[0] != N:
            raise ValueError(f"initial_state has {initial_state.shape[0]} states; it must have N = {N}")
        states = [None] * N if initial_state is None else initial_state.split(1)
        parts = [_convolve(rows[:, at[n] : at[n + 1]], weight, bias, states[n], keep) for n in range(N)]
        y = torch.cat([rows[:, :0], *(part for part, _ in parts)], dim=1)
        state = torch.cat([rows.new_zeros(0, *weight.shape), *(last for _, last in parts)]) if keep else None
    y = _ACTIVATIONS[activation](y).view(x.shape)
    return (y if residual is None else y + residual).to(x.dtype), state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Of one token for each sequence; the cache is updated where it is."""
    tokens = x.reshape(-1, 1, cache.shape[1])
    y, state = causal_conv1d(tokens, weight, bias, None, cache, True, activation)
    cache.copy_(state)
    y = y.view(x.shape)
    return y if residual is None else y + residual, cache


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    return _norm(x, None, weight, bias, None, residual, prenorm, residual_in_fp32, eps)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor | tuple[Tensor, Tensor]:
    return _norm(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps)


def _norm(
    x: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
) -> Tensor | tuple[Tensor, Tensor]:
    total = x.to(_wide(x)) if residual is None else x.to(_wide(x)) + residual
    y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    if g is not None:
        y = y * _ACTIVATIONS[activation](g.to(y.dtype))
    y = y.to(x.dtype)
    if not prenorm:
        return y
    kept = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return y, total.to(kept)


_MODULES = {
    "causal_conv1d": "fla.modules.causal_conv1d.ops",
    "causal_conv1d_update": "fla.modules.causal_conv1d.ops",
    "rms_norm": "fla.modules.norm.layernorm",
    "rms_norm_gated": "fla.modules.norm.fused_norm_gate",
}


def pairs(is_on: Callable[[], bool]) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The library's functions, each with one that calls it but for tensors on the CPU, while is_on() says so.

    Raises AttributeError or ImportError where the library has them elsewhere.
    """
    return [
        (original, _on_cpu(original, globals()[name], is_on))
        for name, module in _MODULES.items()
        for original in (getattr(importlib.import_module(module), name),)
    ]


def _on_cpu(
    original: Callable[..., Any], function: Callable[..., Any], is_on: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (function if x.is_cpu and is_on() else original)(x, *args, **kwargs)

    return choose
