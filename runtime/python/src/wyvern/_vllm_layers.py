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
    plan = step.flashinfer_checkpoint_plan
    norm = {} if norm_gate is None else _norm_of(layer.norm)
    _run(
        _Layer(layer, mixed_qkv, g, beta, norm_gate, out, kda=False, bound=None, norm=norm),
        step,
        None if plan is None else _Checkpoints(layer, step, plan),
    )
    return out


def of_kimi(layer: Any, *, mixed_qkv: Tensor, g: Tensor, norm_gate: Tensor, beta: Tensor, out: Tensor) -> Tensor:
    """``KimiGatedDeltaNetAttention``: out, with o ``[1, T, H, V]``, normalized and gated.

    mixed_qkv: as of_qwen has it. g: ``[1, T, H, K]``, beta: ``[1, T, H]``, both raw. norm_gate: ``[T, H, V]``.
    """
    step = _step_of(layer)
    if step is not None:
        norm, bound = _norm_of(layer.o_norm), layer.gate_lower_bound
        _run(_Layer(layer, mixed_qkv, g[0], beta[0], norm_gate, out[0], kda=True, bound=bound, norm=norm), step)
    return out


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
    """A layer's weights and pages, and the rows of a step's tokens."""

    layer: Any
    rows: Tensor  # [T, C]
    g: Tensor  # [T, HV] or [T, HV, K]
    beta: Tensor  # [T, HV]
    norm_gate: Tensor | None  # [T, HV, V]
    out: Tensor  # [T, HV, V]
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


def _run(whole: _Layer, step: Any, checkpoints: _Checkpoints | None = None) -> None:
    """Computes a step's tokens part by part.

    Raises:
        ValueError: a part was declined before anything was written.
        PartError: a part was declined after another had changed its pages, which nothing else can repeat.
    """
    written = False
    for part in _parts(step, checkpoints):
        rows, g, beta, gate = (
            x if x is None else x[part.where] if isinstance(part.where, slice) else x.index_select(0, part.where)
            for x in (whole.rows, whole.g, whole.beta, whole.norm_gate)
        )
        place = whole.out[part.where] if isinstance(part.where, slice) else None
        try:
            o = part.call(whole, rows, g, beta, gate, place, **part.options)
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
            checkpoints.export(rows, whole)


def _parts(step: Any, checkpoints: _Checkpoints | None) -> Iterator[_Part]:
    """Prompts first: what they ask for is declined more often."""
    tokens, drafted = step.num_actual_tokens, step.spec_sequence_masks is not None
    decline_if(drafted and step.num_decodes > 0, "tokens decode beside drafts")
    decoding = 0 if drafted else step.num_decode_tokens if step.num_prefills else tokens
    if step.num_prefills:
        options = {} if checkpoints is None else checkpoints.options
        yield _Part(
            step.non_spec_token_indx if drafted else slice(decoding, tokens),
            _prompts,
            {
                "ends": step.prefill_query_start_loc,
                "state_index": step.prefill_state_indices,
                "has_initial_state": step.prefill_has_initial_state,
                **options,
            },
        )
    if decoding:
        index = step.non_spec_state_indices_tensor[:decoding]
        yield _Part(slice(0, decoding), _decoded, {"state_index": index})
    if drafted:
        N = step.num_spec_decodes
        yield _Part(
            step.spec_token_indx if step.num_prefills else slice(0, tokens),
            _decoded,
            {
                "cu_seqlens": step.spec_query_start_loc[: N + 1],
                "state_index": step.spec_state_indices_tensor[:N],
                "num_accepted": step.num_accepted_tokens[:N],
            },
        )


def _prompts(
    whole: _Layer,
    rows: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor | None,
    place: Tensor | None,
    *,
    ends: Tensor,
    **options: Any,
) -> Tensor:
    """o ``[T, HV, V]`` of sequences of tokens whose ends are given."""
    pages = whole.pages()
    q, k, v = (x.transpose(0, 1) for x in packed_heads(rows, pages["state"]))
    if whole.kda:
        options["lower_bound"] = whole.bound
    o, _ = (ops.chunk_kda if whole.kda else ops.chunk_gated_delta_rule)(
        q,
        k,
        v,
        g[None],
        beta[None],
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        cu_seqlens=ends,
        seqlens_hint=None if pages["batch_invariant"] else hint(ends, len(rows)),
        norm_gate=None if gate is None else gate[None],
        out=place_in(place, v),
        **pages,
        **options,
    )
    return o[0]


def _decoded(
    whole: _Layer,
    rows: Tensor,
    g: Tensor,
    beta: Tensor,
    gate: Tensor | None,
    place: Tensor | None,
    **options: Any,
) -> Tensor:
    """o ``[T, HV, V]`` of one token of each sequence or, with cu_seqlens, of each sequence's drafts."""
    pages = whole.pages()
    pool = pages.pop("state")
    q, k, v = packed_heads(rows, pool)
    if "cu_seqlens" in options:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    o = decode(
        q,
        k,
        v,
        g,
        beta,
        kda=whole.kda,
        pool=pool,
        lower_bound=whole.bound,
        norm_gate=None if gate is None else gate.reshape(v.shape),
        out=place,
        **pages,
        **options,
    )
    return o.view(len(rows), *v.shape[2:])


class _Checkpoints:
    """The states inside prompts that vLLM's prefix cache wants, by the plan of a step for FlashInfer."""

    def __init__(self, layer: Any, step: Any, plan: Any) -> None:
        workspace = sys.modules["vllm.v1.worker.workspace"].current_workspace_manager()
        (buffer,) = workspace.get_simultaneous(layer._checkpoint_buffer_spec)
        self._layer, self._step, self._plan = layer, step, plan
        self._states = buffer[: plan.num_checkpoints]
        self.options = {"checkpoint_every": plan.every_n_tokens, "checkpoints": self._states}

    def export(self, rows: Tensor, whole: _Layer) -> None:
        """Hands them to vLLM, which finds the rows before each in those of all tokens that are no drafts."""
        step, pages = self._step, whole.pages()
        every = whole.rows[: step.num_actual_tokens] if step.spec_sequence_masks is None else rows
        self._layer._checkpoint_exporter.export(
            step.checkpoint,
            raw_qkv=every,
            conv_state=pages["conv_state"],
            recurrent_checkpoint=self._states,
            recurrent_state=pages["state"],
            cu_seqlens=step.non_spec_query_start_loc,
            recurrent_rows=self._plan.rows,
        )


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
