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
    y = F.conv1d(
        tokens[..., 1:].to(wide), weight.to(wide).unsqueeze(1),
        None if bias is None else bias.to(wide), groups=x.shape[2],
    )  # fmt: skip
    return y.transpose(1, 2), tokens[..., -W:].contiguous() if keep else None


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
        ends = cu_seqlens.tolist()
        N = len(ends) - 1
        states = [None] * N if initial_state is None else initial_state.split(1)
        parts = [_convolve(x[:, ends[n] : ends[n + 1]], weight, bias, states[n], keep) for n in range(N)]
        y = torch.cat([part for part, _ in parts], dim=1)
        state = torch.cat([last for _, last in parts]) if keep else None
    y = _ACTIVATIONS[activation](y)
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
