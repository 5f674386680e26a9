"""vLLM 0.33 in small: its registries, three of its layers and the functions that they call, in float64."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
import torch.nn.functional as F
from engines import prefill, split, update
from reference import recurrence
from torch import Tensor

LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
FLA = "vllm.third_party.flash_linear_attention.ops"
K3 = "vllm.models.kimi_k3.nvidia"
GLM = "vllm.models.glm5next"


class _Pluggable(torch.nn.Module):
    """As vLLM's CustomOp and PluggableLayer: what is made is the class registered under the class's name."""

    registry: dict[str, type] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls.registry.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, decorated: type | None = None, name: str | None = None) -> Any:
        def decorator(kind: Any) -> Any:
            registered = name if name is not None else cls.__name__
            assert registered not in cls.registry, registered
            kind.name = registered
            cls.registry[registered] = kind
            return kind

        return decorator if decorated is None else decorator(decorated)


def last(out: Tensor | None, o: Tensor) -> Tensor:
    return o if out is None else out.copy_(o.reshape(out.shape))


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float = None,
    initial_state: Tensor = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None, chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, core_attn_out: Tensor | None = None,
):  # fmt: skip
    o, state = prefill(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
    )  # fmt: skip
    if core_attn_out is not None:
        core_attn_out.reshape(-1)[: o.numel()].copy_(o.reshape(-1))
    return o, state


def fi_chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None, use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: Tensor | None = None, checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0, use_cp: Any = "auto",
):  # fmt: skip
    return prefill(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, state_v_first=True,
        checkpoints=state_checkpoints, checkpoint_every=checkpoint_every_n_tokens or None,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
    initial_state: Tensor, out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
):  # fmt: skip
    o = update(
        *split(mixed_qkv, initial_state), a, b, initial_state, ssm_state_indices, torch.arange(len(a) + 1),
        A_log=A_log, dt_bias=dt_bias, scale=scale, l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return last(out, o), initial_state


def fused_gdn_decode_post_conv_mtp(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state_indices: Tensor,
    cu_seqlens: Tensor, num_accepted_tokens: Tensor, state: Tensor, output_gate: Tensor,
    norm_weight: Tensor, out: Tensor | None = None, scale: float = 128**-0.5, norm_eps: float = 1e-5,
    output_gate_activation: str = "silu",
):  # fmt: skip
    o = update(
        *(x.double() for x in split(mixed_qkv, state)), a, b, state, state_indices, cu_seqlens,
        A_log=A_log, dt_bias=dt_bias, scale=scale, accepted=num_accepted_tokens,
    )  # fmt: skip
    activation = {"silu": F.silu, "sigmoid": torch.sigmoid}[output_gate_activation]
    o = F.rms_norm(o[0], o.shape[-1:], norm_weight.double(), norm_eps) * activation(output_gate.double())
    return last(torch.empty_like(output_gate) if out is None else out, o)


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor,
    beta: float = 1.0, threshold: float = 20.0, scale: float = None, initial_state: Tensor = None,
    inplace_final_state: bool = True, cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False, is_kda: bool = False,
):  # fmt: skip
    o = update(
        q, k, v, a, b, initial_state, ssm_state_indices, cu_seqlens, A_log=A_log, dt_bias=dt_bias,
        scale=scale, l2norm=use_qk_l2norm_in_kernel, kda=is_kda, accepted=num_accepted_tokens,
    )  # fmt: skip
    return o, initial_state


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor = None, scale: float = None,
    initial_state: Tensor = None, inplace_final_state: bool = True, cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
):  # fmt: skip
    o = update(
        q, k, v, g, torch.ones_like(g) if beta is None else beta, initial_state, ssm_state_indices,
        cu_seqlens, scale=scale, l2norm=use_qk_l2norm_in_kernel, raw_gate=False, raw_beta=False,
        accepted=num_accepted_tokens,
    )  # fmt: skip
    return o, initial_state


def glm_fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor = None, scale: float = None,
    initial_state: Tensor = None, inplace_final_state: bool = True, use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None, out: Tensor | None = None, sigmoid_beta: bool = False,
    a_log: Tensor | None = None, g_bias: Tensor | None = None, compute_gate: bool = False,
    lower_bound: float | None = -5.0, **kwargs: Any,
):  # fmt: skip
    o = update(
        q, k, v, g, beta, initial_state, ssm_state_indices, cu_seqlens, A_log=a_log, dt_bias=g_bias,
        scale=scale, l2norm=use_qk_l2norm_in_kernel, kda=True, raw_gate=compute_gate,
        raw_beta=sigmoid_beta, lower_bound=lower_bound, accepted=num_accepted_tokens,
    )  # fmt: skip
    return last(out, o), initial_state


def fla_fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor = None, scale: float = None,
    initial_state: Tensor = None, inplace_final_state: bool = True, use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None, ssm_state_indices: Tensor | None = None, **kwargs: Any,
):  # fmt: skip
    return glm_fused_recurrent_kda(
        q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        ssm_state_indices,
    )  # fmt: skip


def fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    inplace_final_state: bool = True, cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None, num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
):  # fmt: skip
    return glm_fused_recurrent_kda(
        q, k, v, g, beta, scale, initial_state, inplace_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        ssm_state_indices, num_accepted_tokens,
    )  # fmt: skip


def fused_kda_decode(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, raw_g: Tensor, raw_beta: Tensor,
    A_log: Tensor, dt_bias: Tensor, state_indices: Tensor, state: Tensor, out: Tensor | None = None,
    lower_bound: float | None = None, output_gate: Tensor | None = None, norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
):  # fmt: skip
    y, taps = x.clone(), weight.double().mT.flatten(0, 1)
    for n, slot in enumerate(state_indices.tolist()):
        if slot <= 0:
            continue
        rows = torch.cat([conv_state[slot].double(), x[n, :, None].double()], 1)
        c = (rows * taps).sum(1) + (0 if bias is None else bias.double())
        y[n] = F.silu(c)
        conv_state[slot] = rows[:, 1:]
    ends = torch.arange(len(x) + 1)
    o = update(
        *split(y, state), raw_g, raw_beta, state, state_indices, ends, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, kda=True,
    )  # fmt: skip
    if output_gate is not None:
        o = F.rms_norm(o, o.shape[-1:], norm_weight.double(), norm_eps) * output_gate.double().sigmoid()
    return last(torch.empty_like(raw_g) if out is None else out, o)


def flashinfer_fused_kda_decode(*args: Any, **kwargs: Any):
    return args, kwargs


def flashinfer_packed_fused_kda_decode(*args: Any, **kwargs: Any):
    return args, kwargs


def k3_fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor | None,
    lower_bound: float | None, initial_state: Tensor, cu_seqlens: Tensor, ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None, out: Tensor | None = None, fuse_gate: bool | None = None,
):  # fmt: skip
    o = update(
        q, k, v, raw_g, raw_beta, initial_state, ssm_state_indices, cu_seqlens, A_log=A_log,
        dt_bias=dt_bias, lower_bound=lower_bound, kda=True, accepted=num_accepted_tokens,
    )  # fmt: skip
    return last(out, o), initial_state


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, initial_state: Tensor, state_indices: Tensor, scale: float | None = None,
    out: Tensor | None = None,
):  # fmt: skip
    ends = torch.arange(len(mixed_qkv) + 1)
    o = update(
        *split(mixed_qkv, initial_state), raw_g, raw_beta, initial_state, state_indices, ends, A_log=A_log,
        dt_bias=dt_bias, scale=scale, lower_bound=lower_bound, kda=True,
    )  # fmt: skip
    return last(out, o), initial_state


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float = None,
    initial_state: Tensor = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
):  # fmt: skip
    return prefill(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, state_v_first=True,
    )  # fmt: skip


def fla_chunk_kda_with_fused_gate(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, beta: Tensor, A_log: Tensor, g_bias: Tensor | None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    lower_bound: float | None = None, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
):  # fmt: skip
    return prefill(
        q, k, v, raw_g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, state_v_first=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=g_bias,
        lower_bound=lower_bound,
    )  # fmt: skip


def glm_chunk_kda_with_fused_gate(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, beta: Tensor, A_log: Tensor, g_bias: Tensor | None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, safe_gate: bool = False,
    lower_bound: float = -5.0, **kwargs: Any,
):  # fmt: skip
    return fla_chunk_kda_with_fused_gate(
        q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state, output_final_state,
        lower_bound if safe_gate else None, use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip


def k3_chunk_kda_with_fused_gate(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor,
    g_bias: Tensor | None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, out: Tensor | None = None,
    **kwargs: Any,
):  # fmt: skip
    o, state = fla_chunk_kda_with_fused_gate(
        q, k, v, raw_g, raw_beta.sigmoid(), A_log, g_bias, scale, initial_state, output_final_state,
        lower_bound, use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip
    return last(out, o), state


def k3_flashkda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float, initial_state: Tensor, cu_seqlens: Tensor, out: Tensor, final_state: Tensor,
    workspace: Tensor, checkpoint_state: Tensor | None = None, checkpoint_offsets: Tensor | None = None,
):  # fmt: skip
    o, state = prefill(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        cu_seqlens=cu_seqlens, state_v_first=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        checkpoints=checkpoint_state, checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip
    return last(out, o), final_state.copy_(state)


class ChunkGatedDeltaRule(_Pluggable):
    name = "chunk_gated_delta_rule"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
        output_final_state: bool, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None,
        chunk_offsets: Tensor | None = None, use_qk_l2norm_in_kernel: bool = True,
        core_attn_out: Tensor | None = None, aiter_prefill_metadata: object | None = None,
    ):  # fmt: skip
        return chunk_gated_delta_rule(
            q, k, v, g, beta, None, initial_state, output_final_state, cu_seqlens, chunk_indices,
            chunk_offsets, use_qk_l2norm_in_kernel, core_attn_out,
        )  # fmt: skip


class Exporter:
    """Where a layer's checkpoints go."""

    def __init__(self) -> None:
        self.exported: list[dict[str, Any]] = []

    def export(self, checkpoint: Any, **tensors: Any) -> None:
        self.exported.append(tensors | {"checkpoint": checkpoint})


class Glm5NextLinearAttention(_Pluggable):
    def __init__(self, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> None:
        super().__init__()
        self.A_log = torch.nn.Parameter(A_log)
        self.dt_bias = torch.nn.Parameter(dt_bias)
        self.kda_lower_bound = lower_bound
        self._checkpoint_exporter = Exporter()

    def _flashkda_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor,
        cu_seqlens: Tensor, out: Tensor | None, checkpoint: Any = None, raw_qkv: Tensor | None = None,
        conv_state: Tensor | None = None, recurrent_state: Tensor | None = None,
    ):  # fmt: skip
        states = None if checkpoint is None else torch.empty_like(initial_state)
        result = k3_flashkda_prefill(
            q, k, v, g, beta, self.A_log, self.dt_bias, self.kda_lower_bound, initial_state, cu_seqlens,
            torch.empty_like(v) if out is None else out, torch.empty_like(initial_state), torch.empty(0),
            states, None if checkpoint is None else checkpoint.checkpoint_offsets,
        )  # fmt: skip
        if checkpoint is not None:
            self._checkpoint_exporter.export(
                checkpoint, raw_qkv=raw_qkv, conv_state=conv_state, recurrent_checkpoint=states,
                recurrent_state=recurrent_state, cu_seqlens=cu_seqlens,
            )  # fmt: skip
        return result


class _Layer(_Pluggable):
    """A layer's convolution, delta rule and norm over pages, in float64, sequence by sequence."""

    prefix = "layers.0"

    def __init__(
        self, weight: Tensor, A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, pages: list[Tensor], eps: float
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv1d = SimpleNamespace(weight=weight[:, None], bias=None)
        self.A_log = torch.nn.Parameter(A_log)
        self.dt_bias = torch.nn.Parameter(dt_bias)
        self.norm = SimpleNamespace(
            weight=norm_weight, bias=None, eps=eps, activation="silu", norm_before_gate=True, group_size=None
        )
        self.kv_cache = pages
        self.warmed = 0

    def _warmup_prefill_kernels(self, rows: Tensor, width: int) -> None:
        self.warmed += 1

    def _core(self, x: Tensor, g: Tensor, beta: Tensor, out: Tensor, **gates: Any) -> None:
        """gates: what the recurrence calls options, beyond A_log, dt_bias and norms."""
        step = sys.modules["vllm.forward_context"].get_forward_context().attn_metadata
        if step is None:
            return
        step = step[self.prefix]
        pool, windows = self.kv_cache[1], self.kv_cache[0]
        windows = windows if windows.shape[-2] == x.shape[-1] else windows.mT
        taps = self.conv1d.weight[:, 0].double()
        before = taps.shape[1] - 1
        for rows, slots, accepted, starts in self._sequences(step):
            if not len(rows):
                continue
            first = slots[accepted - 1] if accepted else slots[0]
            if first <= 0:
                out[rows] = 0
                continue
            at = accepted - 1 if accepted else 0
            window = windows[slots[0]][:, at : at + before].double() if starts else torch.zeros(len(taps), before)
            state = pool[first].double() if starts else torch.zeros(pool.shape[1:], dtype=torch.float64)
            columns = torch.cat([window, x[rows].double().mT], 1)
            y = F.silu(torch.nn.functional.conv1d(columns[None].double(), taps[:, None], groups=len(taps))[0].mT)
            y = y.to(x.dtype)
            for t, row in enumerate(rows):
                o, after = recurrence(
                    *(one.double() for one in split(y[t : t + 1], pool)), g[None, row, None].double(),
                    beta[None, row, None].double(), initial_state=state[None], v_first=True, l2norm=True, gate=True,
                    beta_sigmoid=True, A_log=self.A_log.double(), **gates,
                )  # fmt: skip
                state = after[0]
                out[row] = o[0, 0]
                if accepted:
                    pool[slots[t]] = state.to(pool.dtype)
            if accepted:  # the older columns of the window, then the drafts
                windows[slots[0]][:, : before - 1 + len(rows)] = columns[:, 1:].to(windows.dtype)
            else:
                pool[slots[0]] = state.to(pool.dtype)
                windows[slots[0]][:, :before] = columns[:, -before:].to(windows.dtype)

    def _sequences(self, step: Any) -> Any:
        """(rows, slots, tokens accepted before or 0, whether a state and a window are there)."""
        drafts = step.spec_sequence_masks is not None
        if step.non_spec_query_start_loc is not None:
            ends = step.non_spec_query_start_loc.tolist()
            rows = step.non_spec_token_indx.tolist() if drafts else range(ends[-1])
            for n, slot in enumerate(step.non_spec_state_indices_tensor.tolist()):
                starts = step.num_prefills == 0 or bool(step.has_initial_state[n])
                yield list(rows[ends[n] : ends[n + 1]]), [slot], 0, starts
        if drafts:
            ends, rows = step.spec_query_start_loc.tolist(), step.spec_token_indx.tolist()
            for n in range(step.num_spec_decodes):
                slots = step.spec_state_indices_tensor[n].tolist()
                yield rows[ends[n] : ends[n + 1]], slots, int(step.num_accepted_tokens[n]), True

    def _normalized(self, o: Tensor, gate: Tensor, activation: str) -> Tensor:
        act = {"silu": F.silu, "sigmoid": torch.sigmoid}[activation]
        normed = F.rms_norm(o.double(), o.shape[-1:], self.norm.weight.double(), self.norm.eps)
        return (normed * act(gate.double())).to(o.dtype)


class QwenGatedDeltaNetAttention(_Layer):
    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        self._core(mixed_qkv, a, b, core_attn_out, dt_bias=self.dt_bias.double())

    def _forward_core_fused_norm(
        self, mixed_qkv: Tensor, b: Tensor, a: Tensor, output_gate: Tensor, core_attn_out: Tensor
    ) -> None:  # fmt: skip
        o = core_attn_out.double()
        self._core(mixed_qkv, a, b, o, dt_bias=self.dt_bias.double())
        core_attn_out.copy_(self._normalized(o, output_gate, self.norm.activation))


class KimiGatedDeltaNetAttention(_Layer):
    gate_lower_bound: float | None = -5.0

    @property
    def o_norm(self) -> Any:
        return SimpleNamespace(weight=self.norm.weight, bias=None, eps=self.norm.eps, activation="sigmoid")

    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        o = core_attn_out[0].double()
        dt_bias = self.dt_bias.double().view(o.shape[1:])
        self._core(mixed_qkv, g1[0], beta[0], o, dt_bias=dt_bias, lower_bound=self.gate_lower_bound)
        core_attn_out[0] = self._normalized(o, g2, "sigmoid")


class KimiK3DeltaAttention(KimiGatedDeltaNetAttention):
    kda_decode_backend = "triton"
    kda_prefill_backend = "flashkda"
    use_recoverssm = False

    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        super()._forward(mixed_qkv, g1, g2, beta, core_attn_out)


# The modules, and what each calls the functions above.
MODULES: dict[str, dict[str, Any]] = {
    "vllm._custom_ops": {
        "fused_gdn_decode_post_conv_mtp": fused_gdn_decode_post_conv_mtp,
        "fused_kda_decode": fused_kda_decode,
    },
    "vllm.utils.flashinfer": {
        "flashinfer_fused_kda_decode": flashinfer_fused_kda_decode,
        "flashinfer_packed_fused_kda_decode": flashinfer_packed_fused_kda_decode,
    },
    LAYERS: {
        "fi_chunk_gated_delta_rule": fi_chunk_gated_delta_rule,
        "ChunkGatedDeltaRule": ChunkGatedDeltaRule,
        "QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention,
        "fused_sigmoid_gating_delta_rule_update": fused_sigmoid_gating_delta_rule_update,
    },
    KIMI: {"KimiGatedDeltaNetAttention": KimiGatedDeltaNetAttention},
    FLA: {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
        "fused_recurrent_gated_delta_rule_packed_decode": fused_recurrent_gated_delta_rule_packed_decode,
        "fused_sigmoid_gating_delta_rule_update": fused_sigmoid_gating_delta_rule_update,
    },
    f"{FLA}.kda": {
        "chunk_kda": chunk_kda,
        "chunk_kda_with_fused_gate": fla_chunk_kda_with_fused_gate,
        "fused_recurrent_kda": fla_fused_recurrent_kda,
        "fused_recurrent_kda_fwd": fused_recurrent_kda_fwd,
    },
    f"{K3}.kda": {
        "_flashkda_prefill": k3_flashkda_prefill,
        "KimiK3DeltaAttention": KimiK3DeltaAttention,
    },
    f"{K3}.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": k3_chunk_kda_with_fused_gate,
        "fused_recurrent_kda": k3_fused_recurrent_kda,
        "fused_recurrent_kda_packed_decode": fused_recurrent_kda_packed_decode,
    },
    f"{GLM}.nvidia.ops.third_party.kda": {
        "chunk_kda_with_fused_gate": glm_chunk_kda_with_fused_gate,
        "fused_recurrent_kda": glm_fused_recurrent_kda,
    },
    f"{GLM}.common.kda": {"Glm5NextLinearAttention": Glm5NextLinearAttention},
}


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules; gives the functions as they are before wyvern.vllm.enable(), by the names above."""
    registry: dict[str, type] = {}
    monkeypatch.setattr(_Pluggable, "registry", registry)
    engines.install(
        monkeypatch, "vllm.model_executor.custom_op", op_registry_oot=registry, CustomOp=_Pluggable,
        PluggableLayer=_Pluggable,
    )  # fmt: skip
    for path, names in MODULES.items():
        engines.install(monkeypatch, path, **names)
    return SimpleNamespace(**{name: x for name, x in globals().items() if callable(x)}, registry=registry)
