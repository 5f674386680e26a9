"""SGLang's delta rules, computed by Wyvern where it can.

    pip install wyvern-kernels             # beside SGLang 0.5.23, which finds it as a plugin in every process
    python -m sglang.launch_server --model-path Qwen/Qwen3-Next-80B-A3B-Instruct

or, in a program of one's own, before an engine is made::

    import wyvern.sglang
    wyvern.sglang.enable()
    ...
    print(wyvern.sglang.report())          # what was served, and what was not and why

Hooks around the ``__init__`` of ``GDNKernelDispatcher`` and ``KDAKernelDispatcher`` give the kernels that
these chose, by ``--linear-attn-backend`` and its like, methods of Wyvern: decode, packed_decode, extend and
target_verify. Hooks around ``GDNAttnBackend.forward_extend`` and ``forward_decode`` have the convolution, the gates
and the recurrence of prompts, and of tokens that decode, in one call. What Wyvern declines goes to SGLang's own
method, whose calls of kernels are served; so are those that verify drafts. WYVERN_SGLANG=0 keeps Wyvern out of a
process; so does SGLang's own SGLANG_PLUGINS.

With ``--enable-deterministic-inference`` all calls are made with ``batch_invariant``, and a call that would
be declined is an error (SPECIFICATION.md section 10).
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ._torch import torch  # noqa: F401 (before what imports it by its own name)
import torch.nn.functional as F
from torch import Tensor

from . import ops
from ._engine import decline_if, decode, packed_heads, place_in
from ._serving import Enabled, Pairs, Report, Switch, replacement

__all__ = ["Report", "disable", "enable", "is_enabled", "plugin", "report"]

_VARIABLE = "WYVERN_SGLANG"
_LINEAR = "sglang.srt.layers.attention.linear"
_CHUNK = 64  # tokens between two states of SGLang's own chunked kernels
# Tokens of each sequence that a GDN layer prefills now, on the host.
_lengths: ContextVar[Any] = ContextVar("lengths", default=None)


def enable() -> Enabled:
    """Serves SGLang's delta rules from now on: those of dispatchers that are made later, for all threads.

    As a context manager it disables at the end what it enabled.

    Raises:
        ImportError: SGLang 0.5.23 is not installed, or has not these dispatchers.
    """
    enabled = _switch.enable()
    _hooks().HookRegistry.apply_hooks()
    return enabled


def disable() -> None:
    """Has SGLang's own kernels compute, those of dispatchers that exist too; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served: enabled, and not switched off by WYVERN_SGLANG=0."""
    return _switch.is_enabled() and os.environ.get(_VARIABLE, "1") != "0"


def report(reset: bool = False, own: bool = False) -> Report:
    """Counts of served calls by method, and of declined ones by method and reason, of the engine's processes.

    These are this process and those on this machine that it, or the process above it, has started since
    Wyvern was enabled there. Counts of others come within a second. Replays of CUDA graphs are not counted.

    reset: count from 0 again, for reports of this process. own: of this process alone.
    """
    return _switch.counts.report(reset, own)


def plugin() -> None:
    """What SGLang calls in each of its processes (entry point group ``sglang.srt.plugins``); it applies the
    hooks itself when all plugins have theirs.

    As :func:`enable`; where that fails, SGLang goes on without Wyvern and a warning says why.
    """
    try:
        _switch.enable()
    except Exception as error:  # whatever it is, the engine starts
        warnings.warn(f"Wyvern serves nothing in this process: {error}", stacklevel=1)


def _is_invariant() -> bool:
    """Whether SGLang is asked for deterministic inference, which it tells its processes by this variable."""
    return os.environ.get("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "0").lower() in ("1", "true")


def _may_decline() -> str | None:
    return (
        "SGLang's own function does not keep deterministic inference's promise" if _is_invariant() else None
    )


# The functions below have the arguments of the kernels' methods. q, k [1, T, H, K], v [1, T, HV, V], pools
# [slots, HV, V, K], where an index below 0 is padding.


def gdn_decode(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    kda: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    return decode(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, kda=kda, pool=ssm_states, lower_bound=lower_bound,
        state_index=cache_indices, cu_seqlens=query_start_loc, batch_invariant=_is_invariant(),
    )  # fmt: skip


def gdn_packed_decode(
    kernel: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_states: Tensor,
    cache_indices: Tensor,
    num_v_heads: int,
    head_v_dim: int,
    kda: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    decline_if(
        kwargs.get("replayssm_write_pos") is not None, "replayssm_write_pos is given: ReplaySSM's rings"
    )
    o = decode(
        *packed_heads(mixed_qkv, ssm_states), a, b, A_log=A_log, dt_bias=dt_bias, kda=kda, pool=ssm_states,
        scale=scale, lower_bound=lower_bound, state_index=cache_indices, batch_invariant=_is_invariant(),
    )  # fmt: skip
    return o.transpose(0, 1)


def forward_decode(
    layer: Any, step: Any, cache: Any, mixed_qkv: Tensor | tuple[Tensor, Tensor], a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor | None]:
    """o ``[1, N, HV, V]`` of a token of each sequence, convolved in the pool's windows, and z where it is there.

    mixed_qkv: q, k and v side by side ``[N, C]``; or these and z ``[N, C + HV V]``, and b and a ``[N, 2 HV]``.
    """
    decline_if(
        getattr(step, "replayssm_write_pos", None) is not None, "replayssm_write_pos is given: ReplaySSM's rings"
    )
    pool, z = cache.temporal, None
    if isinstance(mixed_qkv, tuple):
        rows, gates = mixed_qkv
        width = layer.q_dim + layer.k_dim + layer.v_dim
        mixed_qkv, z = rows[:, :width], rows[:, width:].unflatten(-1, pool.shape[1:3])
        b, a = gates.chunk(2, dim=-1)
    o = decode(
        *packed_heads(mixed_qkv, pool), a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, kda=False, pool=pool,
        state_index=step.mamba_cache_indices, batch_invariant=_is_invariant(), conv_weight=layer.conv_weights,
        conv_bias=layer.bias, conv_activation=layer.activation, conv_state=cache.conv[0],
    )  # fmt: skip
    return o.transpose(0, 1), z


def forward_extend(
    layer: Any, batch: Any, step: Any, cache: Any, rows: Tensor, a: Tensor, b: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o ``[1, T, HV, V]`` of prompts, convolved in the pool's windows; the states that SGLang keeps of them at every so
    many tokens ``[1, rows, HV, V, K]``; and those before the chunks that it names, ``[N, HV, V, K]`` in fp32.

    rows: q, k and v side by side ``[T, C]``.
    """
    pool, windows, index = cache.temporal, cache.conv[0], step.mamba_cache_indices
    options, states, snapshots = {}, None, None
    tracks = step.has_mamba_track_mask
    if step.num_state_checkpoints:
        states = pool.new_empty(step.num_state_checkpoints, *pool.shape[1:])
        options = {"checkpoint_every": step.state_checkpoint_every_n_tokens, "checkpoints": states}
    elif tracks and step.track_ssm_h_src.numel() > 0:
        decline_if(step.track_chunk_idx is None, "track_chunk_idx is missing: the states of all chunks")
        snapshots = pool.new_empty(len(index), *pool.shape[1:], dtype=torch.float32)
    if tracks:  # the rows from which a sequence goes on that begins as this one does
        windows[step.conv_states_mask_indices] = rows[step.track_conv_indices].transpose(1, 2)
    q, k, v = (x.transpose(0, 1) for x in packed_heads(rows, pool))
    o = _extend(
        ops.chunk_gated_delta_rule, q, k, v, a.reshape(v.shape[:3]), b.reshape(v.shape[:3]), pool, index,
        step.query_start_loc, batch.extend_seq_lens_cpu, snapshots,
        None if snapshots is None else step.track_chunk_idx, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, A_log=layer.A_log, dt_bias=layer.dt_bias,
        has_initial_state=batch.extend_prefix_lens > 0, conv_weight=layer.conv_weights, conv_bias=layer.bias,
        conv_activation=layer.activation, conv_state=windows, out=place_in(out, v), **options,
    )  # fmt: skip
    return o, None if states is None else states.unsqueeze(0), snapshots


def gdn_target_verify(
    kernel: Any,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor,
    cache_steps: int,
    retrieve_parent_token: Tensor | None,
    kda: bool = False,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> Tensor:
    decline_if(bool(kwargs.get("cache_ring")), "cache_ring is true: ReplaySSM's rings")
    decline_if(kwargs.get("fused_accept_state_indices") is not None, "fused_accept_state_indices is given")
    N = query_start_loc.shape[0] - 1
    tree = {}
    if retrieve_parent_token is not None:
        # SGLang leaves the first token's unset: it continues from the pool's state. As wide as the buffer.
        parent = retrieve_parent_token[:N, 1:].to(cache_indices)
        missing = intermediate_states_buffer.shape[1] - parent.shape[1] - 1
        tree = {"parent": F.pad(parent, (1, missing), value=-1)}
    return decode(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, kda=kda, pool=ssm_states, lower_bound=lower_bound,
        state_index=cache_indices[:N], cu_seqlens=query_start_loc, disable_state_update=True,
        intermediate_states=intermediate_states_buffer,
        intermediate_index=intermediate_state_indices[:N].to(cache_indices),
        batch_invariant=_is_invariant(), **tree,
    )  # fmt: skip


def gdn_extend(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    num_state_checkpoints: int = 0,
    state_checkpoint_every_n_tokens: int = 0,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    output: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor | None]:
    decline_if(not inplace_update, "inplace_update is false; it must be true")
    checkpoints, states = {}, None
    if num_state_checkpoints:
        decline_if(track_state is not None, "num_state_checkpoints and track_state are given; one must be")
        states = ssm_states.new_empty(num_state_checkpoints, *ssm_states.shape[1:])
        checkpoints = {"checkpoint_every": state_checkpoint_every_n_tokens, "checkpoints": states}
    o = _extend(
        ops.chunk_gated_delta_rule, q, k, v, g, beta, ssm_states, cache_indices, query_start_loc,
        _lengths.get(), track_state, track_chunk_idx, out=place_in(output, v), **checkpoints,
    )  # fmt: skip
    return o, None, None if states is None else states.unsqueeze(0)


def kda_extend(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    extend_seq_lens_cpu: Any = None,
    return_intermediate_states: bool = False,
    is_spec_decode: bool = False,
    track_ssm_h_src: Tensor | None = None,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, None]:
    decline_if(is_spec_decode, "is_spec_decode is true: the state must not change in place")
    decline_if(
        bool(kwargs.get("num_state_checkpoints")), "num_state_checkpoints is given without track_state"
    )
    decline_if(
        return_intermediate_states
        and track_state is None
        and (track_ssm_h_src is None or track_ssm_h_src.numel() > 0),
        "return_intermediate_states is true without track_state: the states of all chunks",
    )
    o = _extend(
        ops.chunk_kda, q, k, v, g.reshape(*v.shape[:3], q.shape[3]), beta.reshape(v.shape[:3]), ssm_states,
        cache_indices, query_start_loc, extend_seq_lens_cpu, track_state, track_chunk_idx,
        use_gate_in_kernel=A_log is not None, use_beta_sigmoid_in_kernel=beta_is_raw,
        lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    return (o, None) if return_intermediate_states else o


def _extend(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    index: Tensor,
    cu_seqlens: Tensor,
    lengths: Any,
    snapshots: Tensor | None,
    chunks: Tensor | None,
    **options: Any,
) -> Tensor:
    """o of a prefill into the pool; in snapshots, which may have another dtype than the pool, each sequence's
    state before the chunk that chunks says, -1: none.

    lengths: tokens of each sequence, a list or a tensor of the CPU. None, or of other sequences, as SGLang's
    multi-item scoring has them: they are taken to be alike.
    """
    kept, N = None, cu_seqlens.shape[0] - 1
    options["batch_invariant"] = _is_invariant()
    if lengths is not None and len(lengths) == N and not options["batch_invariant"]:
        longest = int(max(lengths, default=0))
        options["seqlens_hint"] = ops.hint_of_uneven(longest, q.shape[1], N)
    if snapshots is not None and chunks is not None:
        # Before chunk 0 it is that of the pool: no checkpoint is after 0 tokens.
        kept = pool[index.clamp(0, pool.shape[0] - 1)]
        options |= {"checkpoint_offsets": chunks.clamp(min=0) * _CHUNK, "checkpoints": kept}
    o, _ = function(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, state_v_first=True, cu_seqlens=cu_seqlens,
        state=pool, state_index=index, **options,
    )  # fmt: skip
    if kept is not None:
        snapshots.copy_(kept)
    return o


def _of_kda(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with a decay for every channel."""
    made = functools.partial(function, kda=True)
    made.__name__ = function.__name__.replace("gdn", "kda")  # type: ignore[attr-defined]
    return made


_GDN = {
    "decode": gdn_decode,
    "packed_decode": gdn_packed_decode,
    "extend": gdn_extend,
    "target_verify": gdn_target_verify,
}
_KDA = {name: _of_kda(function) for name, function in _GDN.items()} | {"extend": kda_extend}
# The dispatchers, by module and class, and what stands for their kernels' methods.
_DISPATCHERS = {
    f"{_LINEAR}.gdn_backend.GDNKernelDispatcher": _GDN,
    f"{_LINEAR}.kda_backend.KDAKernelDispatcher": _KDA,
}
# Which convolves in front of its kernel, and knows how long sequences are.
_LAYER = f"{_LINEAR}.gdn_backend.GDNAttnBackend"
_KERNELS = ("decode_kernel", "extend_kernel", "verify_kernel", "tree_verify_kernel", "triton_kernel")


def _hooks() -> Any:
    return importlib.import_module("sglang.srt.plugins.hook_registry")


def _find() -> Pairs:
    """Registers the hooks, once: nothing is replaced by name."""
    try:
        hooks = _hooks()
        for dispatcher, functions in _DISPATCHERS.items():
            hook = functools.partial(_around_init, functions)
            hooks.HookRegistry.register(f"{dispatcher}.__init__", hook, hooks.HookType.AROUND)
        hooks.HookRegistry.register(f"{_LAYER}.forward_extend", _around_extend, hooks.HookType.AROUND)
        hooks.HookRegistry.register(f"{_LAYER}.forward_decode", _around_decode, hooks.HookType.AROUND)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"wyvern.sglang needs SGLang 0.5.23 or later: pip install -U sglang ({error})"
        ) from error
    return []


def _around_init(
    functions: dict[str, Callable[..., Any]],
    init: Callable[..., None],
    dispatcher: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    init(dispatcher, *args, **kwargs)
    for name in _KERNELS:
        kernel = getattr(dispatcher, name, None)
        if kernel is not None and not isinstance(kernel, _Served):
            kernel.__class__ = _served_kind(type(kernel), functions is _KDA)


def _around_extend(
    forward: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Any,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Any:
    if is_enabled() and not forward_batch.forward_mode.is_target_verify() and backend.mis_metadata is None:
        step, cache = backend.forward_metadata, backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        given = (layer, forward_batch, step, cache, mixed_qkv, a, b, kwargs.get("linear_attn_output"))
        result, declined = _switch.counts.attempt(forward_extend, *given)
        if declined is None:
            o, states, snapshots = result
            if step.has_mamba_track_mask:
                backend._track_mamba_state_extend(
                    forward_batch, states, cache.temporal, step, h_track_buf=snapshots
                )
            return o
    before = _lengths.set(forward_batch.extend_seq_lens_cpu)
    try:
        return forward(backend, layer, forward_batch, mixed_qkv, a, b, **kwargs)
    finally:
        _lengths.reset(before)


def _around_decode(
    forward: Callable[..., Any],
    backend: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Any,
    a: Tensor,
    b: Tensor,
    **kwargs: Any,
) -> Any:
    if is_enabled():
        step, cache = backend.forward_metadata, backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        result, declined = _switch.counts.attempt(forward_decode, layer, step, cache, mixed_qkv, a, b)
        if declined is None:
            index = step.mamba_cache_indices
            backend._track_mamba_state_decode(forward_batch, cache.conv[0], cache.temporal, index, layer.layer_id)
            o, z = result
            return o if z is None else (o, z)
    return forward(backend, layer, forward_batch, mixed_qkv, a, b, **kwargs)


class _Served:
    """Marks the classes of kernels whose methods are tried here first."""


_making = threading.Lock()
_made: dict[tuple[type, bool], type] = {}


def _served_kind(kind: type, kda: bool) -> type:
    """A subclass of a kernel's class, with the abilities that dispatchers and backends ask for."""
    with _making:
        if (kind, kda) not in _made:
            _made[kind, kda] = _make_served_kind(kind, kda)
        return _made[kind, kda]


def _make_served_kind(kind: Any, kda: bool) -> type:
    members: dict[str, Any] = {}
    for name, function in (_KDA if kda else _GDN).items():
        own = getattr(kind, name, None)
        if own is None:
            continue
        if name == "extend" and not kda and issubclass(kind, _triton_gdn_kernel()):
            # Of the states that it gives the caller reads a few, which then are asked for by track_state.
            own = _with_snapshots(own)
            members["supports_track_state_snapshot"] = True
        members[name] = replacement(own, function, _switch.counts, is_enabled, _may_decline)
    return type(f"{kind.__name__}WithWyvern", (kind, _Served), members)


def _triton_gdn_kernel() -> Any:
    return importlib.import_module(f"{_LINEAR}.kernels.gdn_triton").TritonGDNKernel


def _with_snapshots(own: Callable[..., Any]) -> Callable[..., Any]:
    """With track_state an extend() that gives the states before all chunks ``[1, chunks, HV, V, K]``."""

    @functools.wraps(own)
    def extend(
        self: Any,
        *args: Any,
        query_start_loc: Tensor,
        track_state: Tensor | None = None,
        track_chunk_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        result = own(self, *args, query_start_loc=query_start_loc, **kwargs)
        if track_state is not None and track_chunk_idx is not None:
            states = result[2][0]
            counts = (query_start_loc.diff() + _CHUNK - 1) // _CHUNK
            rows = counts.cumsum(0) - counts + track_chunk_idx.clamp(min=0)
            track_state.copy_(states[rows.clamp(max=states.shape[0] - 1)])
        return result

    return extend


_switch = Switch(_find, "sglang")
