"""Layers around the operators: from the outputs of a layer's projections to the input of its last one.

A layer convolves q, k and v, normalizes q and k, computes decays and rates, runs the operator and normalizes and
gates o: one call of :mod:`wyvern.ops` with the tensors that the projections give, as they are. The order of
computation and what is rounded: section 12 of the specification. Symbols are those of wyvern.ops: B, T, N, H and
HV heads, K and V dimensions; C = 2 H K + HV V channels are convolved, by W weights each.

``projected`` is one tensor ``[B, T, P]``, the parts that ``order`` names side by side, or a tuple of tensors, one for
each letter of ``order``. Its gradient is one tensor for each given one: three slices of one projection would have
three, each as large as the projection and mostly zeros. What ``order`` leaves out is given by name. Parts have the
shape ``[B, T, heads * dim]`` or ``[B, T, heads, dim]`` and begin at multiples of 16 bytes, or are copied.

| letter | width | what |
| --- | --- | --- |
| q, k | H K | before the convolution |
| v | HV V | before the convolution |
| z | HV V | what gates the norm of o |
| b | HV | logits of the rate beta |
| a | HV | the decay before ``A_log`` and ``dt_bias`` |

A step of decoding is a call with few tokens and both states: ``initial_state`` and ``initial_conv_state``, or the
pools ``state`` and ``conv_state``. It goes token by token, as the ``fused_recurrent_*`` functions do; ``recurrent``
says which calls do. Drafts are verified with ``num_accepted`` or ``intermediate_states``. Checkpoints are not among
the arguments: the operators have none with a convolution.
Derivatives, dtypes, ``torch.compile`` and errors are those of the operator with ``conv_weight``; errors that come from
there name its arguments: ``norm_gate`` is z, ``beta`` b, and ``g`` a.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._torch import torch  # before what imports it by its own name
import torch.nn.functional as F
from torch import Tensor

from . import ops
from ._arguments import integer, tensor
from ._call import is_transformed
from .distributed._context import around

__all__ = ["LayerOutput", "delta_net", "gated_delta_net", "gated_delta_product", "gdn2", "kimi_delta"]


class LayerOutput(NamedTuple):
    """What a layer gives.

    o: ``[B, T, HV, V]`` in the dtype of q, normalized and gated; with ``output_dtype`` a pair, o in that dtype and
        its scales, ``[B * T, HV * V // 128]`` or with ``output_scale_tokens_last`` ``[HV * V // 128,
        4 * ceil(B * T / 4)]``, float32.
    final_state: ``[N, HV, K, V]``, float32 (``[N, HV, V, K]`` with ``state_v_first``), or None.
    final_conv_state: ``[N, C, W - 1]`` in the dtype of q, the last W - 1 rows before the convolution, or None.
    """

    o: Any
    final_state: Tensor | None
    final_conv_state: Tensor | None


def gated_delta_net(
    projected: Tensor | Sequence[Tensor],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    order: str = "qkvzba",
    z: Tensor | None = None,
    b: Tensor | None = None,
    a: Tensor | None = None,
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None = None,
    conv_activation: str | None = "silu",
    A_log: Tensor,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    seqlens_hint: int | None = None,
    initial_state: Tensor | None = None,
    initial_conv_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    conv_state: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    recurrent: bool | None = None,
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
    batch_invariant: bool = False,
    cp_context: Any = None,
) -> LayerOutput:
    """Gated DeltaNet (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5: the gated delta rule of convolved q, k, v.

    Example:
        >>> import torch, wyvern
        >>> H, HV, K, V, T = 2, 4, 32, 32, 256
        >>> C = 2 * H * K + HV * V
        >>> o, state, window = wyvern.layers.gated_delta_net(
        ...     torch.randn(1, T, C + HV * V + 2 * HV), heads=(H, HV), dims=(K, V), conv_weight=torch.randn(C, 4),
        ...     A_log=torch.zeros(HV), dt_bias=torch.zeros(HV), norm_weight=torch.ones(V), output_final_state=True)
        >>> o.shape, state.shape, window.shape
        (torch.Size([1, 256, 4, 32]), torch.Size([1, 4, 32, 32]), torch.Size([1, 256, 3]))

    Args:
        projected: ``[B, T, P]``, or one tensor for each letter of ``order``.
        heads: H, HV.
        dims: K, V.
        order: "qkv" and then any of z, b and a, as they lie in ``projected``.
        z, b, a: what ``order`` leaves out; z stays None where ``norm_weight`` is.
        conv_weight: ``[C, W]`` or ``[C, 1, W]``, W from 2 to 4, the newest token's weight last; or three of them, of
            q, k and v, which are joined at every call.
        conv_bias: ``[C]``, or three.
        conv_activation: "silu" (or "swish"), or None.
        A_log: ``[HV]``; the decay is ``exp(-exp(A_log) * softplus(a + dt_bias))``.
        dt_bias: ``[HV]``, or None.
        norm_weight: ``[V]``: o becomes ``o * rsqrt(mean(o ** 2) + norm_eps) * norm_weight * act(z)``; or None: o
            stays as it is.
        norm_eps: above 0.
        norm_activation: "silu" (or "swish") or "sigmoid", of z.
        allow_neg_eigval: beta is ``2 * sigmoid(b)``, else ``sigmoid(b)``.
        scale: factor on o; ``K ** -0.5`` by default.
        cu_seqlens, cu_seqlens_cpu, seqlens_hint: of a packed batch, as in wyvern.ops.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``; zeros by default.
        initial_conv_state: ``[N, C, W - 1]`` in the dtype of q, the rows before each sequence's first, the newest
            last; zeros by default.
        output_final_state: return both states, from which later tokens go on.
        state, state_scale, state_index, output_state_index, has_initial_state, null_slots: a pool of states in the
            place of ``initial_state`` and ``output_final_state``, as in wyvern.ops.
        conv_state: ``[slots, C, L]`` in the dtype of q, with ``state`` and in the same slots: the pool of rows before
            sequences, as in wyvern.ops.
        num_accepted, intermediate_states, intermediate_conv_states, intermediate_index, disable_state_update, parent:
            drafts are verified, as in wyvern.ops.fused_recurrent_gated_delta_rule.
        recurrent: go token by token, as in decoding; without gradients where o is normalized. By default where no
            gradient is asked, without ``batch_invariant``, and where no sequence has more than 16 tokens: of a
            packed batch by ``cu_seqlens_cpu``, without it the batch. Always where
            drafts are verified.
        out: ``[B, T, HV, V]``, where o goes, without gradients.
        output_dtype: torch.float8_e4m3fn, where o is normalized and V is a multiple of 128, without gradients: o is
            quantized, with a scale for each 128 columns, for a block-scaled matrix product behind it.
        output_scale_tokens_last: these scales have tokens last, as in wyvern.ops.
        batch_invariant: as in wyvern.ops.
        cp_context: as in wyvern.ops: sequences go on in other ranks, which the convolution reads rows of. Without
            ``cu_seqlens`` and ``out``.

    Raises:
        TypeError, ValueError: an argument is wrong, which the error names.
        RuntimeError: as the operators.
    """
    x = _split(projected, order, heads, dims, z=z, b=b, a=a)
    return _run(
        ops.chunk_gated_delta_rule, x, conv_weight, conv_bias, norm_weight, output_final_state,
        g=_given(x, "a"), beta=_given(x, "b"), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval, conv_activation=conv_activation,
        norm_eps=norm_eps, norm_activation=norm_activation, scale=scale, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, seqlens_hint=seqlens_hint, initial_state=initial_state,
        initial_conv_state=initial_conv_state, state_v_first=state_v_first, out=out,
        output_dtype=output_dtype, output_scale_tokens_last=output_scale_tokens_last,
        batch_invariant=batch_invariant,
        state=state, state_scale=state_scale, conv_state=conv_state, state_index=state_index,
        output_state_index=output_state_index, has_initial_state=has_initial_state, null_slots=null_slots,
        num_accepted=num_accepted, intermediate_states=intermediate_states,
        intermediate_conv_states=intermediate_conv_states, intermediate_index=intermediate_index,
        disable_state_update=disable_state_update, parent=parent,
        recurrent=recurrent, cp_context=cp_context,
    )  # fmt: skip


def kimi_delta(
    projected: Tensor | Sequence[Tensor],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    order: str = "qkvzb",
    z: Tensor | None = None,
    b: Tensor | None = None,
    g: Tensor,
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None = None,
    conv_activation: str | None = "silu",
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    norm_weight: Tensor | None,
    norm_eps: float = 1e-6,
    norm_activation: str = "sigmoid",
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    seqlens_hint: int | None = None,
    initial_state: Tensor | None = None,
    initial_conv_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    conv_state: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    recurrent: bool | None = None,
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
    batch_invariant: bool = False,
    cp_context: Any = None,
) -> LayerOutput:
    """Kimi Delta Attention (arXiv 2510.26692): a decay for every key channel.

    Arguments as those of :func:`gated_delta_net`, but for:

    Args:
        order: "qkv" and then any of z and b.
        g: ``[B, T, HV, K]`` or ``[B, T, HV K]``, the decay before ``A_log`` and ``dt_bias``.
        A_log: ``[HV]``; None stands for zeros where ``lower_bound`` is given.
        dt_bias: ``[HV, K]`` or ``[HV K]``, or None.
        lower_bound: in [-5, 0): the decay is ``exp(lower_bound * sigmoid(exp(A_log) * (g + dt_bias)))``.
    """
    x = _split(projected, order, heads, dims, z=z, b=b)
    return _run(
        ops.chunk_kda, x, conv_weight, conv_bias, norm_weight, output_final_state,
        g=_channels("g", g, x), beta=_given(x, "b"), use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=allow_neg_eigval,
        conv_activation=conv_activation, norm_eps=norm_eps, norm_activation=norm_activation, scale=scale,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, seqlens_hint=seqlens_hint,
        initial_state=initial_state, initial_conv_state=initial_conv_state, state_v_first=state_v_first, out=out,
        output_dtype=output_dtype, output_scale_tokens_last=output_scale_tokens_last,
        batch_invariant=batch_invariant,
        state=state, state_scale=state_scale, conv_state=conv_state, state_index=state_index,
        output_state_index=output_state_index, has_initial_state=has_initial_state, null_slots=null_slots,
        num_accepted=num_accepted, intermediate_states=intermediate_states,
        intermediate_conv_states=intermediate_conv_states, intermediate_index=intermediate_index,
        disable_state_update=disable_state_update, parent=parent,
        recurrent=recurrent, cp_context=cp_context,
    )  # fmt: skip


def delta_net(
    projected: Tensor | Sequence[Tensor],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    order: str = "qkvzb",
    z: Tensor | None = None,
    b: Tensor | None = None,
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None = None,
    conv_activation: str | None = "silu",
    norm_weight: Tensor | None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    seqlens_hint: int | None = None,
    initial_state: Tensor | None = None,
    initial_conv_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    conv_state: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    recurrent: bool | None = None,
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
    batch_invariant: bool = False,
    cp_context: Any = None,
) -> LayerOutput:
    """DeltaNet (arXiv 2406.06484): no decay.

    Arguments as those of :func:`gated_delta_net`, but for:

    Args:
        order: "qkv" and then any of z and b.
    """
    x = _split(projected, order, heads, dims, z=z, b=b)
    return _run(
        ops.chunk_delta_rule, x, conv_weight, conv_bias, norm_weight, output_final_state,
        beta=_rates(_given(x, "b"), allow_neg_eigval), conv_activation=conv_activation, norm_eps=norm_eps,
        norm_activation=norm_activation, scale=scale, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu,
        seqlens_hint=seqlens_hint, initial_state=initial_state, initial_conv_state=initial_conv_state,
        state_v_first=state_v_first, out=out,
        output_dtype=output_dtype, output_scale_tokens_last=output_scale_tokens_last, batch_invariant=batch_invariant,
        state=state, state_scale=state_scale, conv_state=conv_state, state_index=state_index,
        output_state_index=output_state_index, has_initial_state=has_initial_state, null_slots=null_slots,
        num_accepted=num_accepted, intermediate_states=intermediate_states,
        intermediate_conv_states=intermediate_conv_states, intermediate_index=intermediate_index,
        disable_state_update=disable_state_update, parent=parent,
        recurrent=recurrent, cp_context=cp_context,
    )  # fmt: skip


def gated_delta_product(
    projected: Tensor | Sequence[Tensor],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    num_householder: int,
    order: str = "qkvzba",
    z: Tensor | None = None,
    b: Tensor | None = None,
    a: Tensor | None = None,
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None = None,
    conv_activation: str | None = "silu",
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    seqlens_hint: int | None = None,
    initial_state: Tensor | None = None,
    initial_conv_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
    batch_invariant: bool = False,
    cp_context: Any = None,
) -> LayerOutput:
    """Gated DeltaProduct (arXiv 2502.10297): n = num_householder steps a token.

    Arguments as those of :func:`gated_delta_net`, but for:

    Args:
        projected: k, v and b have the n steps of a token side by side, each as wide as there:
            ``[B, T, n H K]``, ``[B, T, n HV V]``, ``[B, T, n HV]``. Where n is above 1, k and v are copied if they
            are slices.
        a, A_log: None, both, where there is no decay.
        conv_weight: of C = H K + n (H K + HV V) channels.
    """
    steps = integer("num_householder", num_householder)
    x = _split(projected, order, heads, dims, steps, z=z, b=b, a=a)
    if ("a" in x) != (A_log is not None):
        name, other = ("A_log", "a") if "a" in x else ("a", "A_log")
        raise ValueError(f"{name} is missing; it must be given with {other}")
    g = None
    if A_log is not None:
        a = _wide(x["a"])
        for name, rate in (("A_log", A_log), ("dt_bias", dt_bias)):
            if rate is not None and tensor(name, rate).shape != a.shape[2:]:
                raise ValueError(f"{name} has shape {list(rate.shape)}; it must be {list(a.shape[2:])}")
        g = -A_log.to(a.dtype).exp() * F.softplus(a if dt_bias is None else a + dt_bias)
    return _run(
        ops.chunk_gated_delta_product, x, conv_weight, conv_bias, norm_weight, output_final_state,
        g=g, beta=_rates(_given(x, "b"), allow_neg_eigval), num_householder=steps,
        conv_activation=conv_activation, norm_eps=norm_eps, norm_activation=norm_activation, scale=scale,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, seqlens_hint=seqlens_hint,
        initial_state=initial_state, initial_conv_state=initial_conv_state, state_v_first=state_v_first, out=out,
        output_dtype=output_dtype, output_scale_tokens_last=output_scale_tokens_last,
        batch_invariant=batch_invariant, cp_context=cp_context,
    )  # fmt: skip


def gdn2(
    projected: Tensor | Sequence[Tensor],
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    order: str = "qkvz",
    z: Tensor | None = None,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None = None,
    conv_activation: str | None = "silu",
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None = None,
    norm_weight: Tensor | None,
    norm_eps: float = 1e-6,
    norm_activation: str = "sigmoid",
    allow_neg_eigval: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    seqlens_hint: int | None = None,
    initial_state: Tensor | None = None,
    initial_conv_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    recurrent: bool | None = None,
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
    batch_invariant: bool = False,
    cp_context: Any = None,
) -> LayerOutput:
    """The second gated delta rule, with a decay, an erase gate and a write gate for every channel.

    Arguments as those of :func:`kimi_delta`, but for:

    Args:
        order: "qkv", or "qkvz".
        b: ``[B, T, HV, K]`` or ``[B, T, HV K]``, logits of the erase gate, which is ``sigmoid(b)``, or
            ``2 * sigmoid(b)`` with ``allow_neg_eigval``.
        w: ``[B, T, HV, V]`` or ``[B, T, HV V]``, logits of the write gate.
    """
    x = _split(projected, order, heads, dims, z=z)
    erase = _channels("b", b, x).sigmoid()
    return _run(
        ops.chunk_gdn2, x, conv_weight, conv_bias, norm_weight, output_final_state,
        g=_channels("g", g, x), b=2 * erase if allow_neg_eigval else erase, w=_channels("w", w, x).sigmoid(),
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        conv_activation=conv_activation, norm_eps=norm_eps, norm_activation=norm_activation, scale=scale,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, seqlens_hint=seqlens_hint,
        initial_state=initial_state, initial_conv_state=initial_conv_state, state_v_first=state_v_first, out=out,
        output_dtype=output_dtype, output_scale_tokens_last=output_scale_tokens_last,
        batch_invariant=batch_invariant, recurrent=recurrent, cp_context=cp_context,
    )  # fmt: skip


def _split(
    projected: Tensor | Sequence[Tensor],
    order: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    steps: int = 1,
    **named: Tensor | None,
) -> dict[str, Tensor]:
    """What is given, by its letter: q, k, v and z as ``[B, steps T, heads, dim]``, b and a as ``[B, steps T, HV]``.

    named: the letters that ``order`` may have beside q, k and v, with what the caller gave under these names.
    """
    (H, HV), (K, V) = _pair("heads", heads), _pair("dims", dims)
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "z": (HV, V), "b": (HV,), "a": (HV,)}
    rows = dict.fromkeys("kvb", steps)  # of a token, where they are more than one
    rest = order[3:] if isinstance(order, str) else ""
    if not isinstance(order, str) or order[:3] != "qkv" or len({*rest}) < len(rest) or not {*rest} <= {*named}:
        raise ValueError(
            f"order is {order!r}; it must be 'qkv' and then letters of {''.join(named)!r}, each once at most"
        )
    widths = [rows.get(letter, 1) * math.prod(shapes[letter]) for letter in order]
    if isinstance(projected, Tensor):
        if projected.dim() != 3 or projected.shape[2] != sum(widths):
            raise ValueError(
                f"projected has shape {list(projected.shape)}; it must be [B, T, {sum(widths)}], the widths "
                f"{widths} of {order!r} side by side"
            )
        parts: Sequence[Tensor] = projected.split(widths, -1)  # whose gradient is one cat
    else:
        parts = tuple(projected)
        if len(parts) != len(order):
            raise ValueError(f"projected has {len(parts)} tensors; it must have {len(order)}, those of {order!r}")
    x = dict(zip(order, parts, strict=True))
    for name, value in named.items():
        if value is None:
            continue
        if name in x:
            raise ValueError(f"{name} is given; it must be None where order is {order!r}, which has it")
        x[name] = value
    tokens = tensor("q", x["q"]).shape[:2]
    if len(tokens) != 2:
        raise ValueError(f"q has {len(tokens)} dimensions; it must have 3 or 4")
    return {name: _shaped(name, part, tokens, shapes[name], rows.get(name, 1)) for name, part in x.items()}


def _pair(name: str, value: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; it must be two numbers")
    first, second = (integer(name, x) for x in value)
    if first < 1 or second < 1:
        raise ValueError(f"{name} is {value!r}; both must be at least 1")
    return first, second


def _shaped(name: str, x: Tensor, tokens: Sequence[int], heads: tuple[int, ...], steps: int = 1) -> Tensor:
    """x as an operator takes it, ``[B, steps T, *heads]``."""
    (B, T), shape = tokens, tuple(tensor(name, x).shape)
    joined, apart = (B, T, steps * math.prod(heads)), (B, T, *heads)
    if steps == 1 and shape == apart:
        return x
    if shape == joined:
        return x.reshape(B, steps * T, *heads)
    others = f" or {list(apart)}" if steps == 1 and len(heads) == 2 else ""
    raise ValueError(f"{name} has shape {list(shape)}; it must be {list(joined)}{others}")


def _given(x: dict[str, Tensor], name: str) -> Tensor:
    if name not in x:
        raise ValueError(f"{name} is missing; it must be a letter of order, or given")
    return x[name]


def _channels(name: str, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """A gate of every channel: w of those of v, others of as many heads of those of k."""
    B, T, _, K = parts["q"].shape
    HV, V = parts["v"].shape[2:]
    return _shaped(name, x, (B, T), (HV, V if name == "w" else K))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _rates(b: Tensor, allow_neg_eigval: bool) -> Tensor:
    """beta, in float32 or more, for operators that take no logits."""
    beta = _wide(b).sigmoid()
    return 2 * beta if allow_neg_eigval else beta


def _joined(name: str, x: Tensor | Sequence[Tensor], dims: int) -> Tensor:
    """Weights or biases of all channels, of dims dimensions, without the one in between that nn.Conv1d has."""
    parts = list(x) if isinstance(x, Sequence) else [x]
    if len(parts) not in (1, 3):
        raise ValueError(f"{name} has {len(parts)} tensors; it must be one, or three: those of q, k and v")
    parts = [tensor(name, part) for part in parts]
    parts = [part.squeeze(1) if part.dim() == dims + 1 and part.shape[1] == 1 else part for part in parts]
    if len(parts) == 1:
        return parts[0]
    if any(part.dim() != dims or part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"{name} has shapes {shapes}; they must be alike but for their first dimensions")
    return torch.cat(parts)


_RECURRENT: dict[Callable[..., Any], Callable[..., Any]] = {
    ops.chunk_delta_rule: ops.fused_recurrent_delta_rule,
    ops.chunk_gated_delta_rule: ops.fused_recurrent_gated_delta_rule,
    ops.chunk_gdn2: ops.fused_recurrent_gdn2,
    ops.chunk_kda: ops.fused_recurrent_kda,
}
_MOST_DECODED = 16  # tokens of a sequence
_DRAFTS = (
    "num_accepted", "intermediate_states", "intermediate_conv_states", "intermediate_index", "disable_state_update",
    "parent",
)  # fmt: skip


def _decodes(options: dict[str, Any], tensors: Sequence[Tensor | None]) -> bool:
    """Whether a call that does not say so goes token by token."""
    if options["batch_invariant"] or options["cp_context"] is not None or around() is not None:
        return False
    if is_transformed():
        return False
    given = [*tensors, *options.values()]
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
        return False
    longest, ends = tensors[0].shape[1], options["cu_seqlens_cpu"]
    if longest > _MOST_DECODED and type(ends) is Tensor and not torch.compiler.is_compiling():
        longest = int(ends.diff().max()) if ends.is_cpu and ends.numel() > 1 else longest
    return longest <= _MOST_DECODED


def _run(
    function: Callable[..., Any],
    x: dict[str, Tensor],
    conv_weight: Tensor | Sequence[Tensor],
    conv_bias: Tensor | Sequence[Tensor] | None,
    norm_weight: Tensor | None,
    output_final_state: bool,
    recurrent: bool | None = False,
    **options: Any,
) -> LayerOutput:
    """function of wyvern.ops, or its recurrent one, of all that the layers have in common."""
    z = x.get("z")
    if (z is None) != (norm_weight is None):
        name, other = ("z", "norm_weight") if z is None else ("norm_weight", "z")
        raise ValueError(f"{name} is missing; it must be given with {other}")
    weight = _joined("conv_weight", conv_weight, 2)
    bias = None if conv_bias is None else _joined("conv_bias", conv_bias, 1)
    named = [name for name in _DRAFTS if name in options]
    drafts = next((name for name in named if options[name] is not None and options[name] is not False), None)
    if drafts is not None and recurrent is False:
        raise ValueError(f"{drafts} is given with recurrent=False; drafts are verified token by token")
    if recurrent is None:
        recurrent = drafts is not None or _decodes(options, [*x.values(), weight, bias, norm_weight])
    if drafts is None:
        for name in named:  # no arguments of the chunk functions, nor of all recurrent ones
            del options[name]
    if recurrent:
        if options["cp_context"] is not None:
            raise ValueError("cp_context is given with recurrent=True, which goes through one rank's tokens alone")
        function = _RECURRENT[function]
        for chunked in ("cu_seqlens_cpu", "seqlens_hint", "cp_context"):  # of the chunk functions alone
            del options[chunked]
    outputs = function(
        x["q"], x["k"], x["v"], conv_weight=weight, conv_bias=bias, norm_weight=norm_weight, norm_gate=z,
        use_qk_l2norm_in_kernel=True, output_final_state=output_final_state, output_conv_state=output_final_state,
        **options,
    )  # fmt: skip
    return LayerOutput(*outputs) if output_final_state else LayerOutput(outputs[0], None, None)
