"""What the layers of flash-linear-attention call beside the operators: the short convolution and the norms of
the output, with gradients.

:func:`served_conv` and :func:`served_norm` are by Wyvern's stages. On the CPU, where the library's own kernels do
not run, PyTorch computes what they decline, and the convolution of one token, in float32 or more; on a GPU the
library does. Each function has the parameters and the results of the one it stands in for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from ._torch import torch  # before what imports it by its own name
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import stages
from ._serving import Counts, on_cpu
from .distributed._context import around

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


class _Convolution(torch.autograd.Function):
    """y of a short convolution; the gradients are of x, weight, bias and window."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        window: Tensor | None,
        activation: str | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, window, cu_seqlens)
        ctx.activation = activation
        return stages.short_conv(x, weight, bias, activation, window, cu_seqlens=cu_seqlens)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, window, cu_seqlens = ctx.saved_tensors
        dx, dweight, dbias, dwindow = stages.short_conv_bwd(
            x, dy, weight, bias, ctx.activation, window, cu_seqlens
        )
        return (
            dx, dweight.to(weight.dtype), None if dbias is None else dbias.to(bias.dtype), dwindow, None, None,
        )  # fmt: skip


class _Norm(torch.autograd.Function):
    """y of a gated norm; the gradients are of x, gate and weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.options = eps, activation
        return stages.output_norm(x, gate, weight, eps, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        dx, dgate, dweight = stages.output_norm_bwd(dy, x, gate, weight, *ctx.options)
        return dx, dgate, None if weight is None else dweight.to(weight.dtype), None, None


def _last_rows(x: Tensor, state: Tensor | None, W: int, cu_seqlens: Tensor | None) -> Tensor:
    """The last W rows of each sequence of x [B, T, D], [N, D, W], behind those of a state of that shape."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    before = x.new_zeros(N, D, W) if state is None else state.to(x.dtype)
    if T == 0:
        return before.clone()
    if cu_seqlens is None:
        return torch.cat([before[..., min(T, W) :], x[:, -W:].transpose(1, 2)], -1)
    ends = cu_seqlens[1:].long().to(x.device)
    row = ends[:, None] + torch.arange(-W, 0, device=x.device)  # [N, W]
    past = row - cu_seqlens[:-1].long().to(x.device)[:, None]  # the column of `before`, less W, where below 0
    own = x[0][row.clamp(min=0)].transpose(1, 2)
    old = before.gather(2, (past + W).clamp(max=W - 1)[:, None].expand(N, D, W))
    return torch.where(past[:, None] < 0, old, own)


def served_conv(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Raises ValueError or TypeError where Wyvern has no such convolution."""
    for name, given in {"residual": residual, "cp_context": cp_context}.items():
        if given is not None:
            raise ValueError(f"{name} is given; this convolution has none")
    if weight is None:
        raise TypeError("weight is None; it must be a torch.Tensor")
    if initial_state is not None and initial_state.shape[1:] != weight.shape:
        raise ValueError(f"initial_state has shape {list(initial_state.shape)}; it must be [N, D, W]")
    window = None if initial_state is None else initial_state[..., 1:].to(x.dtype)
    wide = weight.dtype if weight.dtype == x.dtype else torch.float32
    taps, shift = weight.to(wide), None if bias is None else bias.to(wide)
    rows = x if cu_seqlens is None else x.flatten(0, 1)[None]
    y = _Convolution.apply(rows, taps, shift, window, activation, cu_seqlens).view(x.shape)
    return y, _last_rows(rows, initial_state, weight.shape[1], cu_seqlens) if output_final_state else None


def served_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Raises ValueError or TypeError where Wyvern has no such norm."""
    for name, given in {"bias": bias is not None, "residual": residual is not None, "prenorm": prenorm}.items():
        if given:
            raise ValueError(f"{name} is given; this norm has none")
    return _Norm.apply(x, g, None if weight is None else weight.float(), eps, activation)


_MODULES = {
    "causal_conv1d": "fla.modules.causal_conv1d.ops",
    "causal_conv1d_update": "fla.modules.causal_conv1d.ops",
    "rms_norm": "fla.modules.norm.layernorm",
    "rms_norm_gated": "fla.modules.norm.fused_norm_gate",
}


# By what is counted. A step of one token is the library's own: it is one launch, where the stage and the window's
# columns are three.
_SERVED = {"causal_conv1d": served_conv, "rms_norm_gated": served_norm}


def pairs(
    is_on: Callable[[], bool], counts: Counts
) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The library's functions, each with what stands in its place while is_on() says so.

    Raises AttributeError or ImportError where the library has them elsewhere.
    """
    found = []
    for name, module in _MODULES.items():
        original = getattr(importlib.import_module(module), name)
        other = _on_cpu(original, globals()[name], is_on)
        if name in _SERVED:
            other = _tried(other, _SERVED[name], is_on, counts)
        found.append((original, other))
    return found


def _tried(
    original: Callable[..., Any], function: Callable[..., Any], is_on: Callable[[], bool], counts: Counts
) -> Callable[..., Any]:
    """function, and original where it declines, where torch.compile traces the call, and among ranks, of whose tokens
    function knows nothing. On the CPU, where original is no kernel of the library, what it computes is not counted.
    """
    serve = functools.wraps(original)(functools.partial(function))  # the name by which calls are counted

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        if is_on() and not torch.compiler.is_compiling() and around() is None:
            of = Counts() if on_cpu(*args, **kwargs) else counts
            result, declined = of.attempt(serve, *args, **kwargs)
            if declined is None:
                if of is not counts:
                    counts.served(serve.__name__)
                return result
        return original(*args, **kwargs)

    return choose


def _on_cpu(
    original: Callable[..., Any], function: Callable[..., Any], is_on: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def choose(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (function if x.is_cpu and is_on() else original)(x, *args, **kwargs)

    return choose
