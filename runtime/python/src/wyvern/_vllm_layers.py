"""vLLM's layers as a whole: convolution, delta rule and, where the layer asks for it there, the norm behind it.

A step's tokens are of up to three kinds: prompts, which go through the chunked pass, tokens that decode, and drafts
that are verified, which go through the recurrent one. Each kind is one call of an operator, which reads and writes the
states and the windows of the convolution in vLLM's pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ._torch import torch
from torch import Tensor

from . import _vllm_invariance, ops
from ._engine import decline_if, decode, packed_heads, place_in
from ._serving import DECLINED


def of_qwen(
    layer: Any,
    *,
    mixed_qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    out: Tensor,
    norm_gate: Tensor | None = None,
) -> Tensor:
    """``QwenGatedDeltaNetAttention``: out, with o ``[T, HV, V]``, normalized and gated where a gate is given.

    mixed_qkv: q, k and v before the convolution, side by side ``[T, 2 H K + HV V]``. g, beta: ``[T, HV]``, both raw.
    norm_gate: as out.
    """
    step = _step_of(layer)
    if step is None:  # vLLM measures its memory; states have no pages yet
        layer._warmup_prefill_kernels(mixed_qkv, 0)
        return out
    if not step.num_prefills and not step.num_spec_decodes:
        decline_narrow(layer.kv_cache[1])
    plan, checkpoints = step.flashinfer_checkpoint_plan, None
    if plan is not None:
        (states,) = _workspace(layer._checkpoint_buffer_spec)
        states = states[: plan.num_checkpoints]
        checkpoints = _Checkpoints(states, {"checkpoint_every": plan.every_n_tokens}, {"recurrent_rows": plan.rows})
    norm = {} if norm_gate is None else _norm_of(layer.norm)
    _run(_Layer(layer, mixed_qkv, g, beta, norm_gate, out, kda=False, bound=None, norm=norm), step, checkpoints)
    return out


def of_kimi(layer: Any, *, mixed_qkv: Tensor, g: Tensor, norm_gate: Tensor, beta: Tensor, out: Tensor) -> Tensor:
    """``KimiGatedDeltaNetAttention``: out, with o ``[1, T, H, V]``, normalized and gated.

    mixed_qkv: as of_qwen has it. g: ``[1, T, H, K]``, beta: ``[1, T, H]``, both raw. norm_gate: ``[T, H, V]``.
    """
    step = _step_of(layer)
    if step is not None:
        _run(_kimi(layer, mixed_qkv, g, beta, norm_gate, out), step, None)
    return out


def of_kimi_k3(
    layer: Any, *, mixed_qkv: Tensor, g: Tensor, norm_gate: Tensor, beta: Tensor, out: Tensor
) -> Tensor:
    """``KimiK3DeltaAttention``, as of_kimi has it: but for tokens that decode by vLLM's own kernel, which takes less
    time, and drafts that RecoverSSM rolls back."""
    step = _step_of(layer)
    if step is None:
        return out
    decline_if(
        not step.num_prefills and not step.num_spec_decodes and layer.kda_decode_backend != "triton",
        "vLLM's own kernel takes less time",
    )
    decline_if(step.num_spec_decodes > 0 and layer.use_recoverssm, "drafts are verified by RecoverSSM")
    checkpoints = None
    if step.checkpoint is not None and layer.kda_prefill_backend == "flashkda":
        offsets = step.checkpoint.checkpoint_offsets
        states = _workspace(*layer._flashkda_buffer_specs)[2][: len(offsets)]
        checkpoints = _Checkpoints(states, {"checkpoint_offsets": offsets}, {})
    _run(_kimi(layer, mixed_qkv, g, beta, norm_gate, out), step, checkpoints, peeled=False)
    return out


def _kimi(layer: Any, rows: Tensor, g: Tensor, beta: Tensor, norm_gate: Tensor, out: Tensor) -> _Layer:
    # A step may have tokens that decode among its prompts. By function they get the bits of other steps.
    decline_if(_vllm_invariance.is_on(), "with VLLM_BATCH_INVARIANT it is served by function")
    norm, bound = _norm_of(layer.o_norm), layer.gate_lower_bound
    return _Layer(layer, rows, g[0], beta[0], norm_gate, out[0], kda=True, bound=bound, norm=norm)


def _workspace(*specs: Any) -> Any:
    """vLLM's buffers of these shapes and dtypes."""
    return sys.modules["vllm.v1.worker.workspace"].current_workspace_manager().get_simultaneous(*specs)


def decline_narrow(pool: Tensor) -> None:
    """Declines tokens of the gated delta rule that decode, one a sequence, with states of 16 bits: vLLM's
    convolution and kernel take less time there (tools/benchmark/RESULTS.md)."""
    decline_if(
        pool.element_size() < 4 and not _vllm_invariance.is_on(),
        "vLLM's own kernel takes less time with 16-bit states",
    )


def _step_of(layer: Any) -> Any:
    """The metadata of the layer's tokens in this step; None where there is none."""
    steps = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
    return steps.get(layer.prefix) if isinstance(steps, dict) else None


def _norm_of(norm: Any) -> dict[str, Any]:
    decline_if(norm.weight is None, "the norm has no weight")
    decline_if(getattr(norm, "bias", None) is not None, "the norm has a bias")
    decline_if(not getattr(norm, "norm_before_gate", True), "the gate is applied before the norm")
    decline_if(
        getattr(norm, "group_size", None) not in (None, norm.weight.numel()), "the norm is of parts of a head"
    )
    return {
        "norm_weight": norm.weight,
        "norm_eps": norm.eps,
        "norm_activation": "silu" if norm.activation == "swish" else norm.activation,
    }


class PartError(Exception):
    """A step was computed in part."""


class _Layer(NamedTuple):
    """A layer's weights and pages, and the rows of a step's tokens, or of some."""

    layer: Any
    rows: Tensor  # [T, C]
    g: Tensor  # [T, HV] or [T, HV, K]
    beta: Tensor  # [T, HV]
    norm_gate: Tensor | None  # [T, HV, V]
    out: Tensor | None  # [T, HV, V]; None: a new tensor
    kda: bool
    bound: float | None
    norm: dict[str, Any]

    def pages(self) -> dict[str, Any]:
        """What all calls of the layer have."""
        windows, states = self.layer.kv_cache[:2]
        convolution = self.layer.conv1d
        return {
            "state": states,
            # Pages hold tokens of channels, or channels of tokens.
            "conv_state": windows if windows.shape[-2] == self.rows.shape[-1] else windows.mT,
            "conv_weight": convolution.weight.flatten(1),
            "conv_bias": convolution.bias,
            "A_log": self.layer.A_log,
            "dt_bias": self.layer.dt_bias,
            "null_slots": "non-positive",
            "batch_invariant": _vllm_invariance.is_on(),
            **self.norm,
        }


class _Part(NamedTuple):
    """Tokens of one kind, a slice of the step's or their numbers."""

    where: slice | Tensor
    call: Callable[..., Tensor]
    options: dict[str, Any]


class _Checkpoints(NamedTuple):
    """The states inside prompts that vLLM's prefix cache wants."""

    states: Tensor
    when: dict[str, Any]  # the operator's options
    rows: dict[str, Any]  # which state is which checkpoint's, where they are not in order


def _run(whole: _Layer, step: Any, checkpoints: _Checkpoints | None, peeled: bool = True) -> None:
    """Computes a step's tokens part by part. peeled: tokens that decode beside prompts are a part of their own.

    Raises:
        ValueError: a part was declined before anything was written.
        PartError: a part was declined after another had changed its pages, which nothing else can repeat.
    """
    written = False
    for part in _parts(step, checkpoints, peeled):
        run = isinstance(part.where, slice)
        rows, g, beta, gate = (
            x if x is None else x[part.where] if run else x.index_select(0, part.where)
            for x in (whole.rows, whole.g, whole.beta, whole.norm_gate)
        )
        place = whole.out[part.where] if run else None
        try:
            o = part.call(whole._replace(rows=rows, g=g, beta=beta, norm_gate=gate, out=place), **part.options)
        except DECLINED as error:
            if not written:
                raise
            raise PartError(
                f"Wyvern declines a part of a step whose other part has changed its states: {error}"
            ) from error
        written = True
        if place is None:
            whole.out.index_copy_(0, part.where, o)
        if checkpoints is not None and part.call is _prompts:
            # vLLM finds the rows before a checkpoint in those of all tokens that are no drafts.
            pages, drafted = whole.pages(), step.num_spec_decodes > 0
            whole.layer._checkpoint_exporter.export(
                step.checkpoint,
                raw_qkv=rows if drafted else whole.rows[: step.num_actual_tokens],
                conv_state=pages["conv_state"],
                recurrent_checkpoint=checkpoints.states,
                recurrent_state=pages["state"],
                cu_seqlens=step.non_spec_query_start_loc,
                **checkpoints.rows,
            )


def _parts(step: Any, checkpoints: _Checkpoints | None, peeled: bool) -> Iterator[_Part]:
    """Prompts first: what they ask for is declined more often."""
    tokens, N = step.num_actual_tokens, step.num_spec_decodes
    decline_if(N > 0 and step.num_decodes > 0, "tokens decode beside drafts")
    decoding = 0 if N else tokens if not step.num_prefills else step.num_decode_tokens if peeled else 0
    if step.num_prefills:
        start = getattr(step, "non_spec_token_start", None)
        yield _Part(
            slice(decoding, tokens) if not N
            else step.non_spec_token_indx if start is None
            else slice(start, start + step.num_prefill_tokens + step.num_decode_tokens),
            _prompts,
            {
                "ends": step.prefill_query_start_loc if peeled else step.non_spec_query_start_loc,
                "state_index": step.prefill_state_indices if peeled else step.non_spec_state_indices_tensor,
                "has_initial_state": step.prefill_has_initial_state if peeled else step.has_initial_state,
                **({} if checkpoints is None else checkpoints.when | {"checkpoints": checkpoints.states}),
            },
        )  # fmt: skip
    if decoding:
        index = step.non_spec_state_indices_tensor[:decoding]
        yield _Part(slice(0, decoding), _decoded, {"state_index": index})
    if N:
        start = getattr(step, "spec_token_start", None)
        index = step.spec_state_indices_tensor[:N]
        yield _Part(
            slice(0, tokens) if not step.num_prefills
            else step.spec_token_indx if start is None
            else slice(start, start + step.num_spec_decode_tokens),
            _decoded,
            {
                "cu_seqlens": step.spec_query_start_loc[: N + 1],
                "state_index": index,
                "num_accepted": step.num_accepted_tokens[:N].to(index),
            },
        )  # fmt: skip


def _prompts(some: _Layer, *, ends: Tensor, **options: Any) -> Tensor:
    """o ``[T, HV, V]`` of sequences of tokens whose ends are given."""
    pages = some.pages()
    q, k, v = (x.transpose(0, 1) for x in packed_heads(some.rows, pages["state"]))
    if some.kda:
        options["lower_bound"] = some.bound
    o, _ = (ops.chunk_kda if some.kda else ops.chunk_gated_delta_rule)(
        q,
        k,
        v,
        some.g[None],
        some.beta[None],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        cu_seqlens=ends,
        seqlens_hint=None if pages["batch_invariant"] else hint(ends, len(some.rows)),
        norm_gate=None if some.norm_gate is None else some.norm_gate[None],
        out=place_in(some.out, v),
        **pages,
        **options,
    )
    return o[0]


def _decoded(some: _Layer, **options: Any) -> Tensor:
    """o ``[T, HV, V]`` of one token of each sequence or, with cu_seqlens, of each sequence's drafts."""
    pages = some.pages()
    pool = pages.pop("state")
    q, k, v = packed_heads(some.rows, pool)
    if "cu_seqlens" in options:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    o = decode(
        q,
        k,
        v,
        some.g,
        some.beta,
        kda=some.kda,
        pool=pool,
        lower_bound=some.bound,
        norm_gate=None if some.norm_gate is None else some.norm_gate.reshape(v.shape),
        out=some.out,
        **pages,
        **options,
    )
    return o.view(len(some.rows), *v.shape[2:])


def hint(cu_seqlens: Tensor, tokens: int) -> int | None:
    """``seqlens_hint`` of a prefill by what vLLM's metadata of this step has on the host: how many blocks of
    tokens the convolution takes of each sequence. None where cu_seqlens is not the metadata's."""
    context = sys.modules.get("vllm.forward_context")
    if context is None or not context.is_forward_context_available():
        return None
    steps = context.get_forward_context().attn_metadata
    for layers in steps if isinstance(steps, list) else [steps]:
        for metadata in (layers or {}).values():
            if (
                cu_seqlens is getattr(metadata, "prefill_query_start_loc", None)
                or cu_seqlens is getattr(metadata, "non_spec_query_start_loc", None)
            ) and getattr(metadata, "nums_dict", None):
                size, blocks = next(iter(metadata.nums_dict.items()))
                longest = min(size * int(blocks["nums"].max()), tokens)
                return ops.hint_of_uneven(longest, tokens, cu_seqlens.shape[0] - 1)
    return None
