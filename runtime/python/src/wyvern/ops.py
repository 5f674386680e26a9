"""The operators, under the names, arguments and defaults of flash-linear-attention 0.6.

Symbols in shapes: B batch, T tokens, H query and key heads, HV value heads (a multiple of H; value
head h reads key head h // (HV // H)), K and V their dimensions, N sequences: B, or
``len(cu_seqlens) - 1`` of a packed batch, which has B = 1 and all tokens one after the other.

All take tensors of the CPU and of CUDA devices, in float32, float16 or bfloat16 (q, k and v alike; gates
as q or in float32), and have gradients for every floating-point input, the final state's included. They
work under ``torch.compile(fullgraph=True)``, ``torch.export``, autocast (q, k, v and norm_gate are cast), activation
checkpointing, ``torch.func.grad``, ``torch.func.vmap`` (whose dimension becomes a part of the
batch, or a call for each sample where batches are packed or parameters of the gate or the norm differ or
get gradients) and, once called with the same shapes before, in CUDA graphs. They run on the current
stream, take all memory from PyTorch and wait for nothing but, in the first call of a problem without norms,
for the length of its first keys, of which far above 1 they warn. Second derivatives, and derivatives
carried forwards (``torch.autograd.forward_ad``, ``torch.func.jvp``), raise NotImplementedError. A
program of ``torch.export`` is for inference: it has no gradients.

float64 q, k and v, on the CPU, are computed by the recurrence in float64, token by token, with derivatives
of every order, in reverse and forwards: for ``torch.autograd.gradcheck`` and as a reference. Gates, rates and
states may have any floating-point dtype then, o and the final state are float64, and ``chunk_size``,
``precision`` and ``disable_recompute`` make no difference. float64 on a CUDA device raises TypeError,
``return_intermediate_states`` ValueError.

q, k, v, gates and rates may be slices of one projection (``qkv[..., :H * K].unflatten(-1, (H, K))``): rows
of tokens, each contiguous, that lie a multiple of 16 bytes apart are read where they are, in the forward
and the backward pass, as is the gradient of the output. What else is not contiguous, or does not start at a
multiple of 16 bytes, is copied first, in either pass.

Wrong arguments raise TypeError or ValueError naming the argument; a GPU, NVRTC or the CPU's compiler that
is missing raises RuntimeError saying what to do, when an operator is called. So do outputs and workspace
larger than the CPU's free memory, with their size; PyTorch's error of a CUDA device names it.
"""

from __future__ import annotations

import warnings
from operator import sub
from typing import Any, NamedTuple, NoReturn

from ._torch import torch  # before what imports it by its own name
from torch import Tensor
from torch.autograd import forward_ad

from . import _recurrence
from ._arguments import floating, integer, real, tensor
from ._call import (
    VECTOR_GATED,
    Inputs,
    Problem,
    by_parameter,
    forward_op,
    is_transformed,
    raise_as_python,
    refuse_tangents,
    run,
    scale_shape,
    text_of,
    update,
)
from .distributed._context import around

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
]

# Asked at each call, so it must be quick: whether autocast is on for any device.
_any_autocast = torch._C._is_any_autocast_enabled
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PRECISIONS = ("tf32", "tf32x3", "ieee")
_CONV_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: "none"}
_OUTPUTS = {torch.float8_e4m3fn: "float8_e4m3"}  # the fields' names
_NORM_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}  # the fields' names
_heads_first_told = False
_LONGEST_KEYS = 2.0  # at a rate of 0.5 longer ones turn the state around and make it grow
_keys_told = _gates_told = False
_seen: set[str] = set()  # texts of problems whose first keys and gates were looked at


class _Pool(NamedTuple):
    """What a call has beside its inputs: tensors, by the names of parameters (states that are updated in place
    and inside sequences, out), and the problem's fields that go with them."""

    tensors: dict[str, Tensor]
    fields: Problem


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    precision: str | None = None,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
    seqlens_hint: int | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoints: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (Gated DeltaNet, arXiv 2412.06464): S <- exp(g) S; u = beta (v - S^T k);
    S <- S + k u^T; o = scale S^T q.

    Rows of k must have a length of at most 1, or the state grows from token to token: normalize q and k, or
    let ``use_qk_l2norm_in_kernel`` do it. :func:`wyvern.tune` finds the fastest plan for a problem;
    :func:`wyvern.policy` says whether calls may tune by themselves.

    Example:
        >>> import torch, wyvern
        >>> q, k, v = (torch.randn(1, 256, 2, 32) for _ in range(3))
        >>> g, beta = -torch.rand(1, 256, 2), torch.rand(1, 256, 2)
        >>> o, state = wyvern.ops.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([1, 256, 2, 32]), torch.Size([1, 2, 32, 32]))

    Args:
        q, k: ``[B, T, H, K]``, K at most 256; k of length 1 or less.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV]``, the natural logarithm of the decay, at most 0; with ``use_gate_in_kernel`` what
            ``-exp(A_log) * softplus(g + dt_bias)`` makes the decay of.
        beta: ``[B, T, HV]``; logits with ``use_beta_sigmoid_in_kernel``.
        scale: factor on o; ``K ** -0.5`` by default.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``; zeros by default.
        output_final_state: return the state after the last token.
        use_qk_l2norm_in_kernel: normalize the rows of q and k, of a length of at most 1e19.
        use_beta_sigmoid_in_kernel: ``beta <- sigmoid(beta)``.
        allow_neg_eigval: with it, ``beta <- 2 sigmoid(beta)``.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]``, int32 or int64, the boundaries of a packed batch.
        cu_seqlens_cpu: its copy on the CPU: checked in full before anything runs, and read for
            ``seqlens_hint`` where one sequence is far longer than the others.
        chunk_indices: taken for compatibility; nothing needs it.
        cp_context: a ``torch.distributed`` ProcessGroup or DeviceMesh: T are this rank's tokens of sequences that
            go through all of its ranks; or what :func:`wyvern.distributed.build_cp_context` makes of a pack,
            whose boundaries ``cu_seqlens`` then must not repeat. N are this rank's sequences: of those that
            come from another rank ``initial_state`` and ``initial_conv_state`` are not read, of those that go on
            to one the final states are those at the border. All ranks call it, forwards and backwards; they need
            not have the same T. Without pools, ``checkpoints``, ``out``, intermediate states and ``torch.func``.
        A_log, dt_bias: ``[HV]``, of the gate.
        chunk_size: 16, 32, 64 or 128; chosen by the plan by default.
        disable_recompute: keep what the backward pass would compute anew: faster, more memory.
        precision: what float32 products and the inverse inside a chunk are at least computed in,
            forwards and backwards: "tf32" (the default of 16-bit q, k and v), "tf32x3" (three
            products of split numbers, near float32; the default of float32) or "ieee" (float32
            throughout). 16-bit q, k and v use 16-bit tensor cores with each.
        transpose_state_layout: the old name of ``state_v_first``.
        seqlens_hint: tokens of the longest sequence of a packed batch, about: the plan is chosen by it; without
            it, and without ``cu_seqlens_cpu``, sequences are taken to be alike. No hint makes a result
            wrong, and ``batch_invariant`` knows none. Each makes a problem of its own, so round those that
            change from call to call.
        batch_invariant: a sequence's bits do not depend on the sequences beside it, on its place among them
            or on tuning, and going on from a float32 final state after a multiple of 64 tokens gives the
            bits of one call; without gradients. On a GPU no sequence is shared out over blocks then.
        state: a pool of states ``[slots, HV, K, V]`` (``[slots, HV, V, K]`` with ``state_v_first``) in
            float32, float16, bfloat16 or a float8 type, in the place of ``initial_state`` and ``output_final_state``: the states
            that sequences start from, where their final states are left. It is updated in place, without
            gradients: inputs that require them are refused. Slots are contiguous, at any distance of a
            multiple of 16 bytes from one to the next; another pool is refused, not copied.
        state_scale: ``[slots, HV]``, float32, contiguous, positive; with a ``state`` of torch.float8_e4m3fn
            or torch.float8_e5m2, with ``checkpoints`` in float32 and no ``intermediate_states``: what the
            elements of a slot and head count times. It is read, never written: a final state is divided by
            the scale of its slot and rounded to nearest, and what is beyond the largest finite number
            becomes that number.
        state_index: ``[N]``, int32 or int64, the slot of each sequence; by default n of sequence n, of N
            slots. A slot that a sequence writes must be no other sequence's. An index below 0, or at or
            past the slots, makes a null sequence: it computes nothing, its rows of o are 0, and no slot is
            read or written for it.
        output_state_index: ``[N]``, of the same dtype, the slot of each final state; by default that of
            ``state_index``. An index that is none of a slot makes a null sequence here too.
        has_initial_state: ``[N]``, bool: where it is false the sequence starts from zeros, whatever its
            slot holds.
        null_slots: "negative", or "non-positive": index 0 makes a null sequence too.
        checkpoint_every: a multiple of 64: the state after every so many tokens of each sequence goes to
            ``checkpoints``, without gradients.
        checkpoint_offsets: ``[N]``, int32 or int64 as ``state_index``: the state after so many tokens of
            each sequence goes to ``checkpoints`` instead. A multiple of 16; 0, a number past the sequence's
            end or any other: none does.
        checkpoints: ``[rows, HV, K, V]`` (``[rows, HV, V, K]`` with ``state_v_first``) in float32, or in the
            dtype of ``initial_state`` or ``state``; without these float32, float16 or bfloat16. With
            ``checkpoint_offsets`` row n is sequence n's, of N rows. With ``checkpoint_every`` rows of a
            sequence of L tokens are ``L // checkpoint_every``, one sequence after the other; of more than
            there are rows the last are not written. Other rows, and those of null sequences, keep what they
            hold.
        conv_weight: ``[C, W]``, W from 2 to 4, in the dtype of q or float32: q, k and v as they are given are
            convolved before all else, each of their C = H K + H K + HV V channels (q's, then k's, then v's) by
            itself: row t becomes ``act(conv_bias + sum(conv_weight[:, i] * row[t - W + 1 + i]))``, rounded to
            the dtype of q. Gates and beta are not convolved. With ``state`` it needs ``conv_state``. Who keeps
            ``checkpoints`` keeps the W - 1 rows before each too: they are the last of q, k and v there.
        conv_bias: ``[C]``, of the same dtype.
        conv_activation: "silu" (or "swish"), or None.
        initial_conv_state: ``[N, C, W - 1]`` in the dtype of q: the rows before each sequence's first, the
            newest last; zeros by default.
        output_conv_state: return the last W - 1 rows too, of ``initial_conv_state`` and the sequence, as they
            were given: what the convolution of later tokens goes on from.
        conv_state: a pool of these rows beside ``state``, ``[slots, C, L]`` in the dtype of q, L at least W - 1, in
            the place of ``initial_conv_state`` and ``output_conv_state``: a sequence has the slot here that it
            has there, whose first W - 1 columns are read and updated in place. Strides say how slots lie: of 1
            in L, or in C. Slots are contiguous, at any distance of a multiple of 16 bytes; at the distance of
            those of ``state`` they may lie between them, as in pages of both.
        norm_weight: ``[V]``, float32 or cast to it, with ``norm_gate``: o is normalized and gated,
            ``o * rsqrt(mean(o ** 2) + norm_eps) * norm_weight * act(norm_gate)``, each value head's row by
            itself, after it was rounded to the dtype of q. Rows of null sequences stay 0. For the backward
            pass o before the norm is kept too.
        norm_gate: ``[B, T, HV, V]`` in the dtype of q; rows of tokens may be strided, as v's may.
        norm_eps: above 0.
        norm_activation: what the gate goes through, "silu" (or "swish") or "sigmoid".
        out: ``[B, T, HV, V]``, contiguous, aligned to 16 bytes, in the dtype of q (autocast's where that
            is on): where o goes, and what is returned as o, without gradients. It overlaps no other tensor
            of the call.
        output_dtype: torch.float8_e4m3fn, with ``norm_weight`` and V a multiple of 128, without gradients: o is
            quantized, and ``(o, o_scale)`` is returned in its place. Each 128 columns of a token's HV V are
            divided by their scale, the largest of them, once rounded to the dtype of q, over 448; ``o_scale`` is
            ``[B * T, HV * V // 128]``, float32. ``out`` is of this dtype then.
        output_scale_tokens_last: ``o_scale`` is ``[HV * V // 128, 4 * ceil(B * T / 4)]``, zeros behind the last
            token: ``o_scale.T[: B * T]`` lies as DeepGEMM takes it on Hopper.

    Returns:
        o ``[B, T, HV, V]`` in the dtype of q, and the final state, as ``initial_state`` but float32, or
        None; with ``state`` None. With ``output_conv_state`` the rows that it asks for, as
        ``initial_conv_state``, behind all else.
    """
    _refuse_old(head_first)
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    problem: Problem = {"op": "gated_delta_rule"}
    if use_gate_in_kernel:
        _need(A_log, "A_log", "use_gate_in_kernel is true")
        problem["use_gate_in_kernel"] = 1
    else:
        A_log = dt_bias = None
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        chunk_size, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    _beta_options(problem, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(
        problem, Inputs(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate, cu_seqlens_cpu=cu_seqlens_cpu,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ), disable_recompute,
        cp_context=cp_context, seqlens_hint=seqlens_hint, pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            checkpoint_every, checkpoint_offsets, checkpoints, out=out, conv_state=conv_state,
        ),
    )  # fmt: skip


chunk_gdn = chunk_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    cp_context: Any = None,
    state_v_first: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    precision: str | None = None,
    head_first: bool | None = None,
    seqlens_hint: int | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoints: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule (DeltaNet, arXiv 2406.06484): u = beta (v - S^T k); S <- S + k u^T; o = scale S^T q.

    Arguments as those of :func:`chunk_gated_delta_rule`; HV may be a multiple of H here too, and q float32.

    Returns:
        o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` in float32, or None.
    """
    _refuse_old(head_first)
    problem: Problem = {"op": "delta_rule"}
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        chunk_size, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    return _call(
        problem, Inputs(
            q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            norm_weight=norm_weight, norm_gate=norm_gate, cu_seqlens_cpu=cu_seqlens_cpu,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ), disable_recompute,
        cp_context=cp_context, seqlens_hint=seqlens_hint, pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            checkpoint_every, checkpoint_offsets, checkpoints, out=out, conv_state=conv_state,
        ),
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    transpose_state_layout: bool | None = None,
    seqlens_hint: int | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoints: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, ...]:
    """Kimi Delta Attention (arXiv 2510.26692): the gated delta rule with a decay for every key channel.

    Arguments as those of :func:`chunk_gated_delta_rule`, but for:

    Args:
        g: ``[B, T, HV, K]``.
        lower_bound: with ``use_gate_in_kernel``, in [-5, 0): the decay is
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``, and A_log may be None (0 then).
        safe_gate: promises ``g >= lower_bound`` (-5 by default) where the gate is not computed here.
        return_intermediate_states: return too the state before each chunk; not differentiable.
        use_graph, max_num_seqs: taken for compatibility: every call may be captured in a CUDA graph.
        A_log: ``[HV]``.
        dt_bias: ``[HV, K]`` or ``[HV * K]``.

    Returns:
        o, the final state or None, and with ``return_intermediate_states`` the states ``[B, chunks, HV, K,
        V]`` in the dtype of q (a packed batch's chunks one after the other, whose count is read from
        ``cu_seqlens_cpu``, else from ``cu_seqlens``, for which the device is waited for).
    """
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    problem: Problem = {"op": "kda"}
    A_log, dt_bias = _vector_gate(
        problem, v, g, use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias
    )
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        chunk_size, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    _beta_options(problem, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(
        problem, Inputs(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate, cu_seqlens_cpu=cu_seqlens_cpu,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ), disable_recompute, return_intermediate_states,
        cp_context=cp_context, seqlens_hint=seqlens_hint, pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            checkpoint_every, checkpoint_offsets, checkpoints, out=out, conv_state=conv_state,
        ),
    )  # fmt: skip


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    *,
    state_v_first: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    precision: str | None = None,
    seqlens_hint: int | None = None,
    batch_invariant: bool = False,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaProduct (arXiv 2502.10297): the gated delta rule with n = num_householder steps a token.

    Arguments as those of :func:`chunk_gated_delta_rule`, but for:

    Args:
        k: ``[B, n T, H, K]``, the steps of token t at rows n t to n t + n - 1.
        v: ``[B, n T, HV, V]``.
        beta: ``[B, n T, HV]``.
        g: ``[B, T, HV]``, before a token's first step, or None: no decay.
        cu_seqlens: counts tokens.
        conv_weight: of C = H K + n (H K + HV V) channels: those of q, then of each step of k, then of each step
            of v, which follows the same step of the tokens before.

    Returns:
        o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` in float32, or None.
    """
    steps = integer("num_householder", num_householder)
    problem: Problem = {"op": "gated_delta_product", "num_householder": steps}
    if g is None:
        problem["has_g"] = 0
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        chunk_size, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    return _call(
        problem, Inputs(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            norm_weight=norm_weight, norm_gate=norm_gate, cu_seqlens_cpu=cu_seqlens_cpu,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ), disable_recompute,
        cp_context=cp_context, seqlens_hint=seqlens_hint, pool=_pool(out=out),
    )  # fmt: skip


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    precision: str | None = None,
    transpose_state_layout: bool | None = None,
    seqlens_hint: int | None = None,
    batch_invariant: bool = False,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, ...]:
    """The second gated delta rule: S <- exp(g) * S; u = w * v - S^T (b * k); S <- S + k u^T;
    o = scale S^T q.

    Arguments as those of :func:`chunk_kda`, but for:

    Args:
        b: ``[B, T, HV, K]``, the erase gate.
        w: ``[B, T, HV, V]``, the write gate.

    Returns:
        As :func:`chunk_kda`.
    """
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    problem: Problem = {"op": "gdn2"}
    A_log, dt_bias = _vector_gate(
        problem, v, g, use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias
    )
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        chunk_size, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    return _call(
        problem, Inputs(
            q, k, v, g, erase=b, write=w, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate, cu_seqlens_cpu=cu_seqlens_cpu,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ), disable_recompute, return_intermediate_states,
        cp_context=cp_context, seqlens_hint=seqlens_hint, pool=_pool(out=out),
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule token by token, for decoding: one or a few tokens a sequence.

    Arguments as those of :func:`chunk_gated_delta_rule`, but for:

    Args:
        g: ``[B, T, HV]``, or None: no decay, but for ``gk``.
        gk: ``[B, T, HV, K]``, a decay for every key channel, beside that of g.
        gv: must be None; no operator has a decay for every value channel.
        beta: ``[B, T, HV]``; ones by default.
        num_accepted: ``[N]``, of the dtype of ``state_index``, which is ``[N, M]`` with it, M at least T of
            at most 16: sequence n starts from the slot in column ``num_accepted[n] - 1``; a number outside
            1 to M, or no slot in that column, makes a null sequence. The state after token t of a sequence
            goes to the slot in column t; where that holds none of a slot, or a packed sequence has more
            tokens than M, it is not written.
        intermediate_states: ``[rows, T, HV, K, V]`` (``[rows, T, HV, V, K]`` with ``state_v_first``) in the
            dtype of ``state`` or ``initial_state``: the state after each token, of at most 16 a sequence; of
            packed batches T is any number of at most 16, and states of later tokens are not written.
        intermediate_index: ``[N]``, int32 or int64 as ``state_index``: the row of each sequence; of one
            outside the rows nothing is written.
        disable_state_update: ``state`` is read only. Operators that PyTorch traces count it as written.
        parent: ``[N, T]`` as ``intermediate_index``, T that of ``intermediate_states``: token t of sequence n
            goes on from the state after token ``parent[n, t]`` < t, or with -1 from the sequence's start:
            trees of drafts. That state is read from ``intermediate_states``, rounded to its dtype, unless it
            is that of the last token before; a sequence without a row there is a null one. A token with
            any other parent, or that goes on from such a token, is null: its row of o is 0, its state
            is not written. With ``state`` it needs ``disable_state_update``; ``output_final_state`` must
            be false.
        conv_weight: as there; with ``intermediate_states`` it needs ``intermediate_conv_states``.
        conv_state: as there; with ``num_accepted`` of L at least W - 2 + M columns. Sequence n has the slot of
            column 0 of ``state_index`` then: columns ``num_accepted[n] - 1`` to ``num_accepted[n] + W - 3`` are
            the rows before its first, and where it has l tokens columns 0 to W - 3 + min(l, M) become the last
            W - 2 of these rows and then those of its tokens. Where that column holds none of a slot, a sequence
            with a state starts from zeros, and its rows are not written.
        intermediate_conv_states: ``[rows, T, C, W - 1]`` in the dtype of q, beside ``intermediate_states``: the last
            W - 1 rows before the convolution behind each token, in a tree those of the token and its ancestors,
            where its state is there; contiguous, or as ``conv_state`` of stride 1 in C.
        norm_weight: ``[V]``, float32 or cast to it, with ``norm_gate``: o is normalized and gated where it is
            computed, ``o * rsqrt(mean(o ** 2) + norm_eps) * norm_weight * act(norm_gate)``, each value head's
            row by itself. Rows of null sequences and null tokens stay 0. There is no gradient then, which the
            chunk functions have, unless q is float64.
        norm_gate: ``[B, T, HV, V]`` in the dtype of q; rows of tokens may be strided, as v's may.
        norm_eps: above 0.
        norm_activation: what the gate goes through, "silu" (or "swish") or "sigmoid".
        output_dtype, output_scale_tokens_last: o in 8 bits, as :func:`chunk_gated_delta_rule`.

    Gradients are those of the chunked backward pass.

    Returns:
        o ``[B, T, HV, V]`` and the final state as :func:`chunk_gated_delta_rule`, or None.
    """
    if gv is not None:
        raise ValueError("gv is given; it must be None: no operator decays value channels")
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    if beta is None:
        beta = tensor("v", v).new_ones(v.shape[:3])
    problem: Problem = {"op": "gated_delta_rule", "pass": "recurrent"}
    if use_gate_in_kernel:
        _need(A_log, "A_log", "use_gate_in_kernel is true")
        _need(g, "g", "use_gate_in_kernel is true")
        if gk is not None:
            raise ValueError("gk is given; it must be None where use_gate_in_kernel is true")
        problem["use_gate_in_kernel"] = 1
    else:
        A_log = dt_bias = None
    if gk is not None:
        problem["op"] = "kda"
        g = _with_channels(gk, g, q, v)
    elif g is None:
        problem["op"] = "delta_rule"
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        None, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    _beta_options(problem, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(
        problem, Inputs(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ),
        pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            num_accepted=num_accepted, intermediate_states=intermediate_states,
            intermediate_index=intermediate_index, disable_state_update=disable_state_update, parent=parent,
            out=out, conv_state=conv_state, intermediate_conv_states=intermediate_conv_states,
        ),
    )  # fmt: skip


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    precision: str | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule token by token, for decoding.

    Arguments as those of :func:`chunk_delta_rule`, and those of drafts and of the norm of o as those of
    :func:`fused_recurrent_gated_delta_rule`; beta ``[B, T, HV]``, ones by default. Gradients are those of the
    chunked backward pass.

    Returns:
        o ``[B, T, HV, V]`` and the final state ``[N, HV, K, V]`` in float32, or None.
    """
    if beta is None:
        beta = tensor("v", v).new_ones(v.shape[:3])
    problem: Problem = {"op": "delta_rule", "pass": "recurrent"}
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel,
        state_v_first, None, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    return _call(
        problem, Inputs(
            q, k, v, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
            norm_weight=norm_weight, norm_gate=norm_gate,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ),
        pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            num_accepted=num_accepted, intermediate_states=intermediate_states,
            intermediate_index=intermediate_index, disable_state_update=disable_state_update, parent=parent,
            out=out, conv_state=conv_state, intermediate_conv_states=intermediate_conv_states,
        ),
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    conv_state: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention token by token, for decoding.

    Arguments as those of :func:`chunk_kda`, and those of drafts and of the norm of o as those of
    :func:`fused_recurrent_gated_delta_rule`. Gradients are those of the chunked backward pass.

    Returns:
        o ``[B, T, HV, V]`` and the final state as :func:`chunk_gated_delta_rule`, or None.
    """
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    problem: Problem = {"op": "kda", "pass": "recurrent"}
    A_log, dt_bias = _vector_gate(
        problem, v, g, use_gate_in_kernel, False, lower_bound, A_log, dt_bias
    )
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        None, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    _beta_options(problem, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _call(
        problem, Inputs(
            q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ),
        pool=_pool(
            state, state_scale, state_index, output_state_index, has_initial_state, null_slots,
            num_accepted=num_accepted, intermediate_states=intermediate_states,
            intermediate_index=intermediate_index, disable_state_update=disable_state_update, parent=parent,
            out=out, conv_state=conv_state, intermediate_conv_states=intermediate_conv_states,
        ),
    )  # fmt: skip


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_activation: str | None = "silu",
    initial_conv_state: Tensor | None = None,
    output_conv_state: bool = False,
    norm_weight: Tensor | None = None,
    norm_gate: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_activation: str = "silu",
    out: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output_scale_tokens_last: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The second gated delta rule token by token, for decoding.

    Arguments as those of :func:`chunk_gdn2`. Gradients are those of the chunked backward pass.

    Returns:
        o ``[B, T, HV, V]`` and the final state as :func:`chunk_gated_delta_rule`, or None.
    """
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    problem: Problem = {"op": "gdn2", "pass": "recurrent"}
    A_log, dt_bias = _vector_gate(
        problem, v, g, use_gate_in_kernel, False, lower_bound, A_log, dt_bias
    )
    _options(
        problem, scale, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        None, precision, batch_invariant,
    )  # fmt: skip
    _conv_options(problem, conv_weight, conv_bias, conv_activation, initial_conv_state, output_conv_state)
    _norm_options(problem, norm_weight, norm_gate, norm_eps, norm_activation)
    _output_options(problem, output_dtype, output_scale_tokens_last)
    return _call(
        problem, Inputs(
            q, k, v, g, erase=b, write=w, initial_state=initial_state, cu_seqlens=cu_seqlens, A_log=A_log,
            dt_bias=dt_bias, norm_weight=norm_weight, norm_gate=norm_gate,
            conv_weight=conv_weight, conv_bias=conv_bias, initial_conv_state=initial_conv_state,
        ),
        pool=_pool(out=out),
    )  # fmt: skip


def _options(
    problem: Problem,
    scale: float | None,
    output_final_state: bool,
    use_qk_l2norm: bool,
    state_v_first: bool,
    chunk_size: int | None,
    precision: str | None,
    batch_invariant: bool,
) -> None:
    """Sets the options that every operator has."""
    if scale is not None:
        problem["scale"] = real("scale", scale)
    if output_final_state:
        problem["output_final_state"] = 1
    if use_qk_l2norm:
        problem["use_qk_l2norm"] = 1
    if state_v_first:
        problem["state_v_first"] = 1
    if chunk_size is not None:
        problem["chunk_size"] = integer("chunk_size", chunk_size)
    if precision is not None:
        if precision not in _PRECISIONS:
            raise ValueError(
                f"precision is {precision!r}; it must be one of {', '.join(map(repr, _PRECISIONS))}"
            )
        problem["precision"] = precision
    if batch_invariant:
        problem["batch_invariant"] = 1


def _norm_options(
    problem: Problem,
    norm_weight: Tensor | None,
    norm_gate: Tensor | None,
    norm_eps: float,
    norm_activation: str,
) -> None:
    """The norm of o, which a call with both tensors asks for."""
    if (norm_weight is None) != (norm_gate is None):
        name, other = ("norm_weight", "norm_gate") if norm_weight is None else ("norm_gate", "norm_weight")
        raise ValueError(f"{name} is missing; it must be given with {other}")
    if norm_weight is None:
        return
    if norm_activation not in _NORM_ACTIVATIONS:
        legal = ", ".join(map(repr, _NORM_ACTIVATIONS))
        raise ValueError(f"norm_activation is {norm_activation!r}; it must be one of {legal}")
    problem["output_norm"] = _NORM_ACTIVATIONS[norm_activation]
    problem["norm_eps"] = real("norm_eps", norm_eps)


def _output_options(problem: Problem, output_dtype: torch.dtype | None, tokens_last: bool) -> None:
    """The dtype of o, where it is not that of q."""
    if output_dtype is None:
        if tokens_last:
            raise ValueError("output_scale_tokens_last is true; it must be false without output_dtype")
        return
    if output_dtype not in _OUTPUTS:
        raise ValueError(f"output_dtype is {output_dtype}; it must be None or torch.float8_e4m3fn")
    if "output_norm" not in problem:
        raise ValueError(f"output_dtype is {output_dtype}; it must be None without norm_weight")
    problem["output_dtype"] = _OUTPUTS[output_dtype]
    if tokens_last:
        problem["output_scale_tokens_last"] = 1


def _conv_options(
    problem: Problem,
    conv_weight: Tensor | None,
    conv_bias: Tensor | None,
    conv_activation: str | None,
    initial_conv_state: Tensor | None,
    output_conv_state: bool,
) -> None:
    """The convolution of q, k and v, which a call with conv_weight asks for."""
    if conv_weight is None:
        given = {"conv_bias": conv_bias, "initial_conv_state": initial_conv_state}
        for name, x in given.items():
            if x is not None:
                raise ValueError(f"{name} is given without conv_weight; give both or neither")
        if output_conv_state:
            raise ValueError("output_conv_state is true; it must be false without conv_weight")
        return
    shape = tensor("conv_weight", conv_weight).shape
    if len(shape) != 2 or not 2 <= shape[1] <= 4:
        raise ValueError(f"conv_weight has shape {list(shape)}; it must be [C, W] with W from 2 to 4")
    if conv_activation not in _CONV_ACTIVATIONS:
        legal = ", ".join(map(repr, _CONV_ACTIVATIONS))
        raise ValueError(f"conv_activation is {conv_activation!r}; it must be one of {legal}")
    problem["conv_activation"] = _CONV_ACTIVATIONS[conv_activation]
    if output_conv_state:
        problem["output_conv_state"] = 1


def _beta_options(problem: Problem, use_beta_sigmoid: bool, allow_neg_eigval: bool) -> None:
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError("allow_neg_eigval is true; use_beta_sigmoid_in_kernel must be too")
    if use_beta_sigmoid:
        problem["use_beta_sigmoid"] = 1
    if allow_neg_eigval:
        problem["allow_neg_eigval"] = 1


def _vector_gate(
    problem: Problem,
    v: Tensor,
    g: Tensor,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Sets the gate of kda and gdn2, and returns A_log and dt_bias as it uses them."""
    if not use_gate_in_kernel:
        if safe_gate:
            problem["safe_gate"] = 1
            problem["lower_bound"] = -5.0 if lower_bound is None else real("lower_bound", lower_bound)
        return None, None
    problem["use_gate_in_kernel"] = 1
    if lower_bound is not None:
        problem["lower_bound"] = real("lower_bound", lower_bound)
        if A_log is None:
            problem["has_A_log"] = 0
    elif safe_gate:
        raise ValueError("lower_bound is None; safe_gate with use_gate_in_kernel needs it")
    else:
        _need(A_log, "A_log", "use_gate_in_kernel is true and lower_bound is None")
    if dt_bias is not None and tensor("dt_bias", dt_bias).dim() != 2:
        heads = tensor("v", v).shape[2] if v.dim() == 4 else 1  # another v is refused by the operator
        if heads == 0 or dt_bias.numel() % heads != 0:
            raise ValueError(f"dt_bias has shape {list(dt_bias.shape)}; it must be [HV, K] or [HV * K]")
        dt_bias = dt_bias.reshape(heads, -1)
    return A_log, dt_bias


def _with_channels(gk: Tensor, g: Tensor | None, q: Tensor, v: Tensor) -> Tensor:
    """The decay for every key channel, that of g in it."""
    given = {"gk": gk, "q": q, "v": v} if g is None else {"gk": gk, "q": q, "v": v, "g": g}
    for name, x in given.items():
        if tensor(name, x).device != q.device:
            raise ValueError(f"{name} is on {x.device}; it must be on {q.device}, where q is")
    shape = [*v.shape[:3], *q.shape[3:]]
    if list(gk.shape) != shape:
        raise ValueError(f"gk has shape {list(gk.shape)}; it must be {shape}")
    floating("gk", gk)
    if g is None:
        return gk
    if list(g.shape) != shape[:3]:
        raise ValueError(f"g has shape {list(g.shape)}; it must be {shape[:3]}")
    return gk + floating("g", g).unsqueeze(-1)


def _need(value: object, name: str, where: str) -> None:
    if value is None:
        raise ValueError(f"{name} is None; it must be given where {where}")


def _refuse_old(head_first: bool | None) -> None:
    if head_first is not None:
        raise ValueError("head_first is given; it was removed: heads come after tokens, [B, T, H, ...]")


def _renamed(state_v_first: bool, transpose_state_layout: bool) -> bool:
    if state_v_first:
        raise ValueError("transpose_state_layout is the old name of state_v_first; give one of them")
    warnings.warn(
        "transpose_state_layout is deprecated; it is called state_v_first now",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout


def _suspect_heads_first(q: Tensor) -> None:
    """Warns, once in a process, of fewer tokens than heads: [B, H, T, K] in the place of [B, T, H, K]."""
    global _heads_first_told
    if torch.compiler.is_compiling():  # a comparison of sizes would be a condition of what is compiled
        return
    shape = q.shape
    if len(shape) != 4 or not 1 < shape[1] < shape[2]:
        return
    _heads_first_told = True
    warnings.warn(
        f"q is {list(shape)}, [B, T, H, K] with fewer tokens ({shape[1]}) than heads ({shape[2]}); if it is "
        "[B, H, T, K], pass q, k, v, gates and rates transposed: q.transpose(1, 2)",
        stacklevel=4,
    )


def _suspect_values(problem: Problem, text: str, k: Tensor, g: Tensor | None) -> None:
    """Warns, once in a process of each, of keys far longer than 1, by the first rows of a problem's first
    call, and of gates above 0, by all of that call."""
    global _keys_told, _gates_told
    # A subclass (FakeTensor) may have no values; traced and mapped tensors have none that can be read.
    if type(k) is not Tensor or is_transformed() or k.dim() != 4 or k.numel() == 0:
        return
    if not (k.is_cpu or (k.is_cuda and not torch.cuda.is_current_stream_capturing())):
        return
    _seen.add(text)
    if not _keys_told and "use_qk_l2norm" not in problem and "conv_activation" not in problem:
        length = float(k.detach()[0, :64].float().norm(dim=-1).mean())
        if length > _LONGEST_KEYS:
            _keys_told = True
            warnings.warn(
                f"rows of k have a length of about {length:.3g}, and far above 1 the state grows from token "
                "to token; normalize q and k, or pass use_qk_l2norm_in_kernel=True",
                stacklevel=4,
            )
    if _gates_told or g is None or "use_gate_in_kernel" in problem:
        return
    if type(g) is not Tensor or g.device != k.device or g.numel() == 0:
        return
    most = float(g.detach().max())
    if most > 0:
        _gates_told = True
        warnings.warn(
            f"g is up to {most:.3g}, and gates must be at most 0, the logarithm of a decay: what is computed "
            "with it is undefined; pass use_gate_in_kernel=True where g is what a gate is computed from",
            stacklevel=4,
        )


def _call(
    problem: Problem,
    inputs: Inputs,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    pool: _Pool | None = None,
    seqlens_hint: int | None = None,
    cp_context: Any = None,
) -> tuple[Any, ...]:
    """Casts what the operators do not take as it is, and calls them."""
    try:
        q, k, v, g, beta, erase, write, _, cu_seqlens, A_log, dt_bias, norm_weight = inputs[:12]
        conv_weight, conv_bias, cu_seqlens_cpu = inputs.conv_weight, inputs.conv_bias, inputs.cu_seqlens_cpu
        if cp_context is None:
            cp_context = _context_around(problem)
        if pool is not None:
            _check_pool(problem, pool, inputs, disable_recompute, return_intermediate_states)
            problem |= pool.fields
        if not (_heads_first_told or conv_weight is not None or cp_context is not None):
            if problem.get("pass") != "recurrent":  # decoding has few tokens, and so may layers and ranks
                _suspect_heads_first(q)
        if dt_bias is not None:
            problem["has_dt_bias"] = 1
        text = text_of(problem)
        # What was seen would be a condition of what is compiled.
        if not torch.compiler.is_compiling() and text not in _seen:
            _suspect_values(problem, text, k, g)
        cast = _autocast(inputs) if _any_autocast() else {}
        dtype = cast.get("q", q).dtype
        if dtype is torch.float64:
            inputs = inputs._replace(**cast)
            if cp_context is not None:
                return _over_ranks(problem, inputs, cp_context, return_intermediate_states, pool)
            return _exact(problem, inputs, return_intermediate_states)
        if g is not None and g.dtype is not torch.float32 and g.dtype is not dtype:
            cast["g"] = _gate(problem, g)
        if beta is not None and beta.dtype is not dtype and beta.dtype is not torch.float32:
            cast["beta"] = floating("beta", beta).float()
        if erase is not None and write is not None:
            if erase.dtype is not write.dtype or erase.dtype is not dtype:
                cast["erase"], cast["write"] = floating("b", erase).float(), floating("w", write).float()
        if A_log is not None:
            cast["A_log"] = floating("A_log", A_log).reshape(-1).float()
        if dt_bias is not None:
            cast["dt_bias"] = floating("dt_bias", dt_bias).float()
        if norm_weight is not None:
            cast["norm_weight"] = floating("norm_weight", norm_weight).float()
        if conv_weight is not None:
            given = {"conv_weight": conv_weight} | ({} if conv_bias is None else {"conv_bias": conv_bias})
            if {x.dtype for x in given.values()} not in ({dtype}, {torch.float32}):
                cast |= {name: floating(name, x).float() for name, x in given.items()}
        if cast:
            inputs = inputs._replace(**cast)
        if cu_seqlens_cpu is not None:
            _check_copy(cu_seqlens, cu_seqlens_cpu)
            if seqlens_hint is None and "batch_invariant" not in problem:
                seqlens_hint = _longest_of_uneven(cu_seqlens_cpu)
        if seqlens_hint is not None:
            problem["seqlens_hint"] = integer("seqlens_hint", seqlens_hint)
            text = text_of(problem)  # which `_seen` has without it: lengths change from call to call
        if cp_context is not None:
            return _over_ranks(problem, inputs, cp_context, return_intermediate_states, pool)
        if forward_ad._current_level >= 0:
            refuse_tangents(problem["op"], *inputs)
        if return_intermediate_states:
            return _with_states(problem, inputs)
        if pool is not None:
            tensors, final_state = pool.tensors, None
            if "output_final_state" in problem:  # without a pool, so with states inside sequences
                N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
                KV = [*q.shape[3:], *v.shape[3:]]
                KV = KV[::-1] if "state_v_first" in problem else KV
                final_state = q.new_empty([N, *v.shape[2:3], *KV], dtype=torch.float32)
                tensors = {**tensors, "final_state": final_state}
            if "output_dtype" in problem:
                tensors = {**tensors, "o_scale": q.new_empty(scale_shape(problem, q, v), dtype=torch.float32)}
            if "output_conv_state" not in problem:
                return _with_scale(update(text, inputs, tensors), tensors), final_state
            N, (C, W) = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, conv_weight.shape
            final_conv_state = q.new_empty([N, C, W - 1])
            tensors = {**tensors, "final_conv_state": final_conv_state}
            return _with_scale(update(text, inputs, tensors), tensors), final_state, final_conv_state
        outputs = run(problem, text, inputs, disable_recompute)
        o: Any = outputs[0]
        if "output_dtype" in problem:
            *outputs, o_scale = outputs
            o = o, o_scale
        made = o, outputs[1] if "output_final_state" in problem else None
        return made if "output_conv_state" not in problem else (*made, outputs[-1])
    except (AttributeError, RuntimeError) as error:
        inside = {} if pool is None else pool.tensors
        raise_as_python(error, **by_parameter(problem, inputs), **inside)


def _with_scale(o: Tensor, tensors: dict[str, Tensor]) -> Any:
    """o, with its scales where a call has them."""
    return (o, tensors["o_scale"]) if "o_scale" in tensors else o


def _context_around(problem: Problem) -> Any:
    """The context of a context_parallel() block around the call, or None."""
    context = around()
    if context is not None and problem.get("pass") == "recurrent":
        raise ValueError(
            "a fused_recurrent function is called inside wyvern.distributed.context_parallel(); it computes "
            "one rank's tokens alone: call it outside, or the chunk function"
        )
    return context


def _over_ranks(
    problem: Problem,
    inputs: Inputs,
    cp_context: Any,
    return_intermediate_states: bool,
    pool: _Pool | None,
) -> tuple[Any, ...]:
    """The same of this rank's tokens, where sequences go through several ranks."""
    from .distributed import _parallel

    refused: str | None = None
    if inputs.cu_seqlens is not None:
        refused = "cu_seqlens"
    elif return_intermediate_states:
        refused = "return_intermediate_states"
    elif pool is not None:
        refused = next(iter(pool.tensors))
    elif "output_dtype" in problem:
        refused = "output_dtype"
    return _parallel.run(cp_context, refused, problem, inputs)


def _pool(
    state: Tensor | None = None,
    state_scale: Tensor | None = None,
    state_index: Tensor | None = None,
    output_state_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    null_slots: str = "negative",
    checkpoint_every: int | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoints: Tensor | None = None,
    num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    intermediate_index: Tensor | None = None,
    disable_state_update: bool = False,
    parent: Tensor | None = None,
    out: Tensor | None = None,
    conv_state: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
) -> _Pool | None:
    """What a call says of states in place and inside sequences and of where o goes; None where it has none."""
    if null_slots not in ("negative", "non-positive"):
        raise ValueError(f"null_slots is {null_slots!r}; it must be 'negative' or 'non-positive'")
    if state is None:
        for name, x in (
            ("state_scale", state_scale),
            ("state_index", state_index),
            ("output_state_index", output_state_index),
            ("has_initial_state", has_initial_state),
            ("conv_state", conv_state),
        ):
            if x is not None:
                raise ValueError(f"{name} is given without state; it must be None, or state a pool of states")
        if disable_state_update:
            raise ValueError("disable_state_update is true; it must be false without state")
    if state_index is None:
        if output_state_index is not None:
            raise ValueError("output_state_index is given without state_index; give both or neither")
        if null_slots != "negative":
            raise ValueError(f"null_slots is {null_slots!r} without state_index; it must be 'negative'")
    columns = state_index is not None and tensor("state_index", state_index).dim() == 2
    if columns != (num_accepted is not None):
        what = "missing; it must be given with" if columns else "given without"
        raise ValueError(f"num_accepted is {what} a state_index of two dimensions, [N, M]")
    if (intermediate_states is None) != (intermediate_index is None):
        name, other = ("intermediate_index", "intermediate_states")
        if intermediate_states is None:
            name, other = other, name
        raise ValueError(f"{name} is missing; it must be given with {other}")
    if parent is not None and intermediate_states is None:
        raise ValueError("parent is given without intermediate_states, which tokens go on from")
    if intermediate_conv_states is not None and intermediate_states is None:
        raise ValueError("intermediate_conv_states is given without intermediate_states, beside which rows are kept")
    if checkpoint_every is not None and checkpoint_offsets is not None:
        raise ValueError("checkpoint_every and checkpoint_offsets are given; give one of them")
    if (checkpoints is None) != (checkpoint_every is None and checkpoint_offsets is None):
        what = "missing; it must be given with" if checkpoints is None else "given without"
        raise ValueError(f"checkpoints is {what} checkpoint_every or checkpoint_offsets")
    if state is None and checkpoints is None and intermediate_states is None and out is None:
        return None
    fields: Problem = {}
    if disable_state_update:
        fields["disable_state_update"] = 1
    if checkpoint_every is not None:
        every = fields["checkpoint_every"] = integer("checkpoint_every", checkpoint_every)
        if every <= 0:
            raise ValueError(f"checkpoint_every is {every}; it must be a multiple of 64")
    if null_slots == "non-positive":
        fields["null_slot_zero"] = 1
    if conv_state is not None and tensor("conv_state", conv_state).dim() == 3:  # another is refused by the operator
        if conv_state.stride(1) == 1 != conv_state.stride(2):
            fields["conv_tokens_first"] = 1
            conv_state = conv_state.transpose(1, 2)
            if intermediate_conv_states is not None:
                windows = tensor("intermediate_conv_states", intermediate_conv_states)
                intermediate_conv_states = windows.transpose(2, 3) if windows.dim() == 4 else windows
    tensors = {
        "state": state,
        "state_scale": state_scale,
        "state_index": state_index,
        "output_state_index": output_state_index,
        "has_initial_state": has_initial_state,
        "num_accepted": num_accepted,
        "intermediate_index": intermediate_index,
        "parent": parent,
        "checkpoint_offsets": checkpoint_offsets,
        "checkpoints": checkpoints,
        "intermediate_states": intermediate_states,
        "out": out,
        "conv_state": conv_state,
        "intermediate_conv_states": intermediate_conv_states,
    }
    return _Pool({name: x for name, x in tensors.items() if x is not None}, fields)


def _check_pool(
    problem: Problem,
    pool: _Pool,
    inputs: Inputs,
    disable_recompute: bool,
    return_intermediate_states: bool,
) -> None:
    """Refuses what else is asked for and goes with none of the pool's tensors."""
    written = ("state", "checkpoints", "intermediate_states")
    tensors = pool.tensors
    given = next((name for name in written if name in tensors), "out")
    for name in written:
        x = tensors.get(name)
        if x is None or tensor(name, x).dtype in _FLOATS or (name == "state" and x.dtype in _FLOAT8):
            continue
        more = ", torch.float8_e4m3fn or torch.float8_e5m2" if name == "state" else ""
        raise TypeError(
            f"{name} is {x.dtype}; it must be torch.float32, torch.float16 or torch.bfloat16{more}"
        )
    state = tensors.get("state")
    if state is not None:
        scaled = "state_scale" in tensors
        if scaled != (state.dtype in _FLOAT8):
            what = "given with" if scaled else "missing; it must be given with"
            raise ValueError(f"state_scale is {what} a state of {state.dtype}")
        if inputs.initial_state is not None:
            raise ValueError("initial_state is given; it must be None with state, whose slots hold it")
        if "output_final_state" in problem:
            raise ValueError(
                "output_final_state is true; it must be false with state, which is updated in place"
            )
        _check_conv_pool(problem, pool, inputs)
    convolved = inputs.conv_weight is not None
    if "intermediate_states" in tensors and convolved != ("intermediate_conv_states" in tensors):
        name, other = ("intermediate_conv_states", "conv_weight")
        name, other = (name, other) if convolved else (other, name)
        raise ValueError(f"{name} is missing; with intermediate_states it must be given with {other}")
    for name, value in (
        ("disable_recompute", disable_recompute),
        ("return_intermediate_states", return_intermediate_states),
    ):
        if value:
            raise ValueError(f"{name} is true; it must be false with {given}, which has no gradient")
    if tensor("q", inputs.q).dtype is torch.float64:
        _refuse_float64(given)


def _refuse_float64(given: str) -> NoReturn:
    raise TypeError(f"q is torch.float64; with {given} it must be torch.float32, torch.float16 or torch.bfloat16")


def _check_conv_pool(problem: Problem, pool: _Pool, inputs: Inputs) -> None:
    """Refuses windows of which not all are in a pool beside the states."""
    weight, conv_state = inputs.conv_weight, pool.tensors.get("conv_state")
    if (weight is None) != (conv_state is None):
        name, other = ("conv_state", "conv_weight") if conv_state is None else ("conv_weight", "conv_state")
        raise ValueError(f"{name} is missing; with state it must be given with {other}")
    if weight is None or conv_state is None:
        return
    if inputs.initial_conv_state is not None:
        raise ValueError("initial_conv_state is given; it must be None with conv_state, whose slots hold it")
    if "output_conv_state" in problem:
        raise ValueError(
            "output_conv_state is true; it must be false with conv_state, which is updated in place"
        )
    columns = conv_state.shape[1 if "conv_tokens_first" in pool.fields else -1] if conv_state.dim() else 0
    least = weight.shape[1] - 1
    if "num_accepted" in pool.tensors:
        least += max(pool.tensors["state_index"].shape[1], 1) - 1
    if conv_state.dim() != 3 or columns < least:
        raise ValueError(
            f"conv_state has {conv_state.dim()} dimensions and {columns} columns; it must be [slots, C, L] with L "
            f"at least {least}"
        )


def _check_copy(cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor) -> None:
    if cu_seqlens is None or cu_seqlens_cpu.numel() == 0:
        what = "is empty" if cu_seqlens is not None else "is given without cu_seqlens"
        raise ValueError(f"cu_seqlens_cpu {what}; it must be a copy of cu_seqlens")


def _longest_of_uneven(cu_seqlens_cpu: Tensor) -> int | None:
    """hint_of_uneven() of a pack; None where there are no values to read."""
    if type(cu_seqlens_cpu) is not Tensor or torch.compiler.is_compiling() or is_transformed():
        return None
    N = cu_seqlens_cpu.numel() - 1
    if not cu_seqlens_cpu.is_cpu or cu_seqlens_cpu.dim() != 1 or N < 2:
        return None
    if N <= 64:  # 0.7 to 3 us, where tensors take 5
        ends = cu_seqlens_cpu.tolist()
        return hint_of_uneven(max(map(sub, ends[1:], ends)), ends[-1], N)
    return hint_of_uneven(int(cu_seqlens_cpu.diff().max()), int(cu_seqlens_cpu[-1]), N)


def hint_of_uneven(longest: int, tokens: int, N: int) -> int | None:
    """``seqlens_hint`` of a pack of N sequences: None unless the longest has one and a half times the mean or
    more; rounded up to four binary digits, so that packs that differ a little are one problem."""
    if N < 2 or not 0 < 3 * tokens <= 2 * longest * N:
        return None
    unit = 1 << max(longest.bit_length() - 4, 0)
    return min((longest + unit - 1) // unit * unit, tokens)


def _exact(
    problem: Problem, inputs: Inputs, return_intermediate_states: bool
) -> tuple[Tensor, Tensor | None]:
    """The same of float64 q, k and v, by the recurrence."""
    if "output_dtype" in problem:
        _refuse_float64("output_dtype")
    if return_intermediate_states:
        raise ValueError(
            "return_intermediate_states is true; it must be false where q is torch.float64, which is "
            "computed without chunks"
        )
    if inputs.cu_seqlens_cpu is not None:
        _check_copy(inputs.cu_seqlens, inputs.cu_seqlens_cpu)
    if inputs.A_log is not None:
        inputs = inputs._replace(A_log=inputs.A_log.reshape(-1))
    return _recurrence.run(problem, inputs)


def _autocast(inputs: Inputs) -> dict[str, Tensor]:
    """What autocast would have in another dtype, by name: rows of tokens and windows of them; gates of decays,
    rates, weights and states keep their dtypes."""
    kind = inputs.q.device.type
    if not torch.is_autocast_enabled(kind):
        return {}
    dtype = torch.get_autocast_dtype(kind)
    names = ("q", "k", "v", "norm_gate", "initial_conv_state")
    given = {name: x for name in names if (x := getattr(inputs, name)) is not None}
    if any(x.dtype not in _FLOATS for x in given.values()):
        return {}
    return {name: x.to(dtype) for name, x in given.items()}


def _gate(problem: Problem, g: Tensor) -> Tensor:
    """g in a dtype that the operator takes: one of a vector may be any float."""
    vector = problem["op"] in VECTOR_GATED
    return g if vector and g.dtype in _FLOATS else floating("g", g).float()


def _with_states(problem: Problem, inputs: Inputs) -> tuple[Any, ...]:
    """o, the final state or None, and the state before each chunk."""
    q, cu_seqlens = inputs.q, inputs.cu_seqlens
    if torch.is_grad_enabled() and (
        is_transformed() or any(x is not None and x.requires_grad for x in inputs)
    ):
        raise ValueError(
            "return_intermediate_states is true; it has no gradient, so call under torch.no_grad()"
        )
    outputs = forward_op(text_of({**problem, "return_intermediate_states": 1}), *inputs)
    o: Any = outputs[0]
    if "output_dtype" in problem:
        *outputs, o_scale = outputs
        o = o, o_scale
    has_state, has_window = "output_final_state" in problem, "output_conv_state" in problem
    states = outputs[1 + has_state]
    if cu_seqlens is None:
        # A batch without tokens has no chunks to tell its size from.
        states = states.reshape(q.shape[0], -1 if states.numel() else 0, *states.shape[1:])
    else:
        size = problem.get("chunk_size", 64)
        ends = (cu_seqlens if inputs.cu_seqlens_cpu is None else inputs.cu_seqlens_cpu).tolist()
        chunks = sum(-(-(end - begin) // size) for begin, end in zip(ends, ends[1:], strict=False))
        states = states[:chunks].unsqueeze(0)
    return o, outputs[1] if has_state else None, states, *(outputs[-1:] if has_window else ())
