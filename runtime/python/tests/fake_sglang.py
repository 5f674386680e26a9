"""SGLang 0.5.23 in small: its registry of hooks, two dispatchers and their Triton kernels, in float64."""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from engines import prefill, split, update
from torch import Tensor

LINEAR = "sglang.srt.layers.attention.linear"
PLUGINS = "sglang.srt.plugins.hook_registry"
CHUNK = 64


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    """Of hooks around methods alone."""

    hooks: dict[str, list[Callable[..., Any]]] = {}
    patched: set[str] = set()

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType = HookType.AFTER) -> None:
        assert hook_type is HookType.AROUND
        cls.hooks.setdefault(target, []).append(hook)

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hooks in cls.hooks.items():
            if target in cls.patched:
                continue
            path, name = target.rsplit(".", 1)
            kind = pkgutil.resolve_name(path)
            for hook in hooks:
                setattr(kind, name, cls._around(getattr(kind, name), hook))
            cls.patched.add(target)

    @staticmethod
    def _around(own: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(own, *args, **kwargs)

        return wrapper


class LinearAttnKernelBase:
    uses_state_checkpoints = False
    supports_fused_chain_verify = False
    supports_strided_target_verify_qkv = False
    supports_track_state_snapshot = False


def chunk_states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ends: Tensor, start: Tensor, **options: Any
) -> Tensor:
    """The states before each chunk of each sequence ``[1, chunks, HV, V, K]``."""
    counts = [-(-length // CHUNK) for length in ends.diff().tolist()]
    states = start.new_zeros(sum(counts), *start.shape[1:])
    firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
    for n, count in enumerate(counts):
        for chunk in range(count):
            first, tokens = int(ends[n]), slice(int(ends[n]), int(ends[n]) + chunk * CHUNK)
            if chunk == 0:
                states[firsts[n]] = start[n]
                continue
            part = [x[:, tokens] for x in (q, k, v, g, beta)]
            _, state = prefill(
                *part, cu_seqlens=torch.tensor([0, tokens.stop - first]), initial_state=start[n : n + 1],
                output_final_state=True, state_v_first=True, **options,
            )  # fmt: skip
            states[firsts[n] + chunk] = state[0]
    return states[None]


class _Kernel(LinearAttnKernelBase):
    supports_packed_decode = True
    kda = False

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int,
        lower_bound: float | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return update(
            *split(mixed_qkv, ssm_states), a, b, ssm_states, cache_indices,
            torch.arange(len(mixed_qkv) + 1), A_log=A_log, dt_bias=dt_bias, scale=scale,
            lower_bound=lower_bound, kda=self.kda, null="negative",
        )  # fmt: skip

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
        lower_bound: float | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return update(
            q, k, v, a, b, ssm_states, cache_indices, query_start_loc, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, kda=self.kda, null="negative",
        )  # fmt: skip

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor,
        intermediate_states_buffer: Tensor, intermediate_state_indices: Tensor, cache_steps: int,
        retrieve_parent_token: Tensor | None, lower_bound: float | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        parent = retrieve_parent_token
        if parent is not None:
            parent = parent.clone()
            parent[:, 0] = -1
        return update(
            q, k, v, a, b, ssm_states, cache_indices, query_start_loc, A_log=A_log, dt_bias=dt_bias,
            lower_bound=lower_bound, kda=self.kda, null="negative", disable_state_update=True,
            parent=parent, intermediate_states=intermediate_states_buffer,
            intermediate_index=intermediate_state_indices,
        )  # fmt: skip


class TritonGDNKernel(_Kernel):
    supports_strided_target_verify_qkv = True

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, inplace_update: bool = True, **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor]:  # fmt: skip
        start = ssm_states[cache_indices].clone()
        h = chunk_states(q, k, v, g, beta, query_start_loc, start, use_qk_l2norm_in_kernel=True)
        o, _ = prefill(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=query_start_loc,
            state=ssm_states if inplace_update else ssm_states.clone(), state_index=cache_indices,
        )  # fmt: skip
        return o, None, h


class FlashInferGDNKernel(_Kernel):
    """States every so many tokens where they are asked for, in the place of those before each chunk."""

    uses_state_checkpoints = True
    supports_packed_decode = False

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, state_checkpoint_cu_starts: Tensor | None = None,
        num_state_checkpoints: int = 0, state_checkpoint_every_n_tokens: int = 0, **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
        states = None
        if num_state_checkpoints:
            states = ssm_states.new_empty(num_state_checkpoints, *ssm_states.shape[1:])
        o, _ = prefill(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=query_start_loc,
            state=ssm_states, state_index=cache_indices, checkpoints=states,
            checkpoint_every=state_checkpoint_every_n_tokens or None,
        )  # fmt: skip
        if kwargs.get("output") is not None:
            o = kwargs["output"].copy_(o)
        return o, None, None if states is None else states[None]


class TritonKDAKernel(_Kernel):
    kda = True
    supports_track_state_snapshot = True

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor,
        cache_indices: Tensor, query_start_loc: Tensor, A_log: Tensor | None = None,
        dt_bias: Tensor | None = None, lower_bound: float | None = None, beta_is_raw: bool = False,
        return_intermediate_states: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        gates = {
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": A_log is not None, "A_log": A_log,
            "dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": beta_is_raw, "lower_bound": lower_bound,
        }  # fmt: skip
        g = g.reshape(*v.shape[:3], q.shape[3])
        h = chunk_states(q, k, v, g, beta, query_start_loc, ssm_states[cache_indices].clone(), **gates)
        if kwargs.get("track_state") is not None:
            counts = (query_start_loc.diff() + CHUNK - 1) // CHUNK
            for n, chunk in enumerate(kwargs["track_chunk_idx"].tolist()):
                if chunk >= 0:
                    kwargs["track_state"][n] = h[0, int(counts[:n].sum()) + chunk]
        o, _ = prefill(
            q, k, v, g, beta, state_v_first=True, cu_seqlens=query_start_loc, state=ssm_states,
            state_index=cache_indices, **gates,
        )  # fmt: skip
        return (o, h) if return_intermediate_states else o


class GDNKernelDispatcher:
    def __init__(self, decode_backend: str, prefill_backend: str, verify_backend: str | None = None) -> None:
        triton = TritonGDNKernel()
        flashinfer = FlashInferGDNKernel()
        kinds = {"triton": triton, "flashinfer": flashinfer}
        self.tree_verify_kernel = triton
        self.decode_kernel = kinds[decode_backend]
        self.extend_kernel = kinds[prefill_backend]
        self.verify_kernel = kinds[verify_backend or "triton"]
        self.supports_packed_decode = self.decode_kernel.supports_packed_decode


class GDNAttnBackend:
    def __init__(self, dispatcher: GDNKernelDispatcher) -> None:
        self.kernel_dispatcher = dispatcher

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **kwargs: Any
    ) -> Any:  # fmt: skip
        step, cache = self.forward_metadata, self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        windows, index, ends = cache.conv[0], step.mamba_cache_indices, step.query_start_loc.tolist()
        if step.has_mamba_track_mask:
            windows[step.conv_states_mask_indices] = mixed_qkv[step.track_conv_indices].transpose(1, 2)
        y, taps = mixed_qkv.clone(), layer.conv_weights.double().T
        for n, slot in enumerate(index.tolist()):
            before = windows[slot].double().T * (forward_batch.extend_prefix_lens[n] > 0)
            x = torch.cat([before, mixed_qkv[ends[n] : ends[n + 1]].double()])
            for t in range(ends[n + 1] - ends[n]):
                y[ends[n] + t] = torch.nn.functional.silu((x[t : t + 4] * taps).sum(0) + layer.bias)
            windows[slot] = x[-3:].T
        q, k, v = split(y, cache.temporal)
        kernel, snapshots, more = self.kernel_dispatcher.extend_kernel, None, {}
        if step.has_mamba_track_mask and kernel.supports_track_state_snapshot:
            snapshots = torch.empty(len(index), *cache.temporal.shape[1:])
            more = {"track_state": snapshots, "track_chunk_idx": step.track_chunk_idx}
        o, _, states = kernel.extend(
            q, k, v, (-layer.A_log.exp() * torch.nn.functional.softplus(a + layer.dt_bias))[None],
            b.sigmoid()[None], ssm_states=cache.temporal, cache_indices=index,
            query_start_loc=step.query_start_loc, num_state_checkpoints=step.num_state_checkpoints,
            state_checkpoint_every_n_tokens=step.state_checkpoint_every_n_tokens,
            output=kwargs.get("linear_attn_output"), **more,
        )  # fmt: skip
        if step.has_mamba_track_mask:
            self._track_mamba_state_extend(forward_batch, states, cache.temporal, step, h_track_buf=snapshots)
        return o

    def _track_mamba_state_extend(
        self, forward_batch: Any, h: Tensor | None, ssm_states: Tensor, step: Any, *, h_track_buf: Tensor | None
    ) -> None:  # fmt: skip
        kept = h[0][step.track_ssm_h_src] if h_track_buf is None else h_track_buf[step.track_ssm_h_batch_src]
        ssm_states[step.track_ssm_h_dst] = kept.to(ssm_states.dtype)

    def forward_decode(
        self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Tensor, b: Tensor, **kwargs: Any
    ) -> Any:  # fmt: skip
        cache, index = self.req_to_token_pool.mamba2_layer_cache(0), self.forward_metadata.mamba_cache_indices
        z = None
        if isinstance(mixed_qkv, tuple):
            (rows, gates), width = mixed_qkv, layer.q_dim + layer.k_dim + layer.v_dim
            mixed_qkv, z = rows[:, :width], rows[:, width:].unflatten(-1, (layer.num_v_heads, -1))
            b, a = gates.chunk(2, -1)
        y, taps = mixed_qkv.clone(), layer.conv_weights.double()
        for n, slot in enumerate(index.tolist()):
            if slot >= 0:
                columns = torch.cat([cache.conv[0][slot].double(), mixed_qkv[n, :, None].double()], 1)
                y[n] = torch.nn.functional.silu((columns * taps).sum(1) + layer.bias)
                cache.conv[0][slot] = columns[:, 1:]
        o = self.kernel_dispatcher.decode_kernel.packed_decode(
            y, a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, scale=layer.head_k_dim**-0.5,
            ssm_states=cache.temporal, cache_indices=index, num_v_heads=layer.num_v_heads,
            head_v_dim=layer.head_v_dim,
        )  # fmt: skip
        self._track_mamba_state_decode(forward_batch, cache.conv[0], cache.temporal, index, layer.layer_id)
        return o if z is None else (o, z)

    def _track_mamba_state_decode(self, forward_batch: Any, *given: Any) -> None:
        forward_batch.tracked.append(given)


class KDAKernelDispatcher:
    def __init__(self, decode_backend: str, prefill_backend: str, verify_backend: str) -> None:
        assert decode_backend == prefill_backend == verify_backend == "triton"
        self.triton_kernel = TritonKDAKernel()
        self.decode_kernel = self.extend_kernel = self.verify_kernel = self.triton_kernel
        self.supports_packed_decode = self.decode_kernel.supports_packed_decode


def install(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules, their hooks none; gives the classes."""
    monkeypatch.setattr(HookRegistry, "hooks", {})
    monkeypatch.setattr(HookRegistry, "patched", set())
    for kind in (GDNKernelDispatcher, KDAKernelDispatcher):
        monkeypatch.setattr(kind, "__init__", kind.__init__)  # taken back after hooks
    for name in ("forward_extend", "forward_decode"):
        monkeypatch.setattr(GDNAttnBackend, name, getattr(GDNAttnBackend, name))
    engines.install(monkeypatch, PLUGINS, HookRegistry=HookRegistry, HookType=HookType)
    engines.install(
        monkeypatch, f"{LINEAR}.gdn_backend", GDNKernelDispatcher=GDNKernelDispatcher,
        GDNAttnBackend=GDNAttnBackend,
    )  # fmt: skip
    engines.install(monkeypatch, f"{LINEAR}.kda_backend", KDAKernelDispatcher=KDAKernelDispatcher)
    engines.install(monkeypatch, f"{LINEAR}.kernels.gdn_triton", TritonGDNKernel=TritonGDNKernel)
    return SimpleNamespace(
        **{name: x for name, x in vars(sys.modules[__name__]).items() if isinstance(x, type)}
    )
