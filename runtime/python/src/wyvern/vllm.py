"""vLLM's delta rules, computed by Wyvern where it can.

    pip install wyvern-kernels             # beside vLLM 0.33, which finds it as a plugin in every process
    vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct

or, in a program of one's own, before models are loaded::

    import wyvern.vllm
    wyvern.vllm.enable()
    ...
    print(wyvern.vllm.report())            # what was served, and what was not and why

Served are Qwen3-Next and Qwen3.5, OLMo hybrid, Kimi Linear, GLM-5.3-Flash, Ling 3 (Bailing) and others that
call the same functions: prefill with and without checkpoints, decoding, and verifying drafts. Of Kimi K3
prefill and drafts are served, and decoding with ``kda_decode_backend=triton``; vLLM's fused decode of KDA, which
takes less time, is served where the batch is to be invariant, and else counted as declined. So is decoding of
one token a sequence by the gated delta rule where states have 16 bits.

Layers of Qwen, Kimi Linear and Kimi K3 are served from their projections on: convolution, delta rule and, in
Kimi's and where Qwen3.5 verifies drafts, the norm are one call for prompts and one for tokens that decode,
which read and write vLLM's pages in place (_vllm_layers.py).

Other layers call functions of vLLM's modules, which are replaced by name in all modules that have them.
Methods are replaced in subclasses, which vLLM's registry of out-of-tree layers has: those of the layers
above, of ``ChunkGatedDeltaRule``, and of ``Glm5NextLinearAttention``, which calls FlashKDA. That is done when
vLLM imports these modules, so nothing is imported and no CUDA is initialized before. What Wyvern declines goes
to vLLM's own function or method. WYVERN_VLLM=0 keeps Wyvern out of a process; so does vLLM's own VLLM_PLUGINS.

VLLM_BATCH_INVARIANT=1, which vLLM itself refuses for these models, is accepted: all calls are made with
``batch_invariant``, chunks of prompts end at multiples of 64 tokens, and a call that would be declined is an
error (SPECIFICATION.md section 10).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ._torch import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import _vllm_invariance, _vllm_layers, ops
from ._engine import decline_if, decode, packed_heads, place_in
from ._hooks import after_import, is_installed
from ._serving import Enabled, Pairs, Report, Switch, replacement, serving_layer

__all__ = ["Report", "disable", "enable", "is_enabled", "plugin", "report"]

_VARIABLE = "WYVERN_VLLM"
_LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
# As torch's softplus has it, beyond which it is the identity.
_THRESHOLD = 20.0


def enable() -> Enabled:
    """Serves vLLM's delta rules from now on, for all threads of the process.

    Modules of vLLM that are imported have their functions replaced now, others when they are imported. Layers
    that exist keep the class ``ChunkGatedDeltaRule`` or ``Glm5NextLinearAttention`` that they were made with.
    As a context manager it disables at the end what it enabled.

    Raises:
        ImportError: vLLM 0.33 is not installed, or none of its modules with these functions is in it.
    """
    return _switch.enable()


def disable() -> None:
    """Gives vLLM its own functions back; counts are kept. Layers that were made meanwhile call vLLM's too."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served: enabled, and not switched off by WYVERN_VLLM=0."""
    return _switch.is_enabled() and os.environ.get(_VARIABLE, "1") != "0"


def report(reset: bool = False, own: bool = False) -> Report:
    """Counts of served calls by function, and of declined ones by function and reason, of a whole engine.

    These are this process and those on this machine that it, or the process above it, has started since
    Wyvern was enabled there. Counts of others come within a second. Replays of CUDA graphs are not counted.

    reset: count from 0 again, for reports of this process. own: of this process alone.
    """
    return _switch.counts.report(reset, own)


def plugin() -> None:
    """What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``).

    As :func:`enable`; where that fails, vLLM goes on without Wyvern and a warning says why.
    """
    try:
        enable()
    except Exception as error:  # whatever it is, the engine starts
        warnings.warn(f"Wyvern serves nothing in this process: {error}", stacklevel=1)


# What a function of vLLM calls an argument of those below, where that is another name. Theirs say which shapes:
# q, k [1, T, H, K], v [1, T, HV, V], states [N, HV, V, K], pools [slots, HV, V, K].
_NAMES = {
    "self": "layer",
    "a": "g",
    "raw_g": "g",
    "b": "beta",
    "raw_beta": "beta",
    "a_log": "A_log",
    "g_bias": "dt_bias",
    "is_kda": "kda",
    "compute_gate": "raw_gate",
    "sigmoid_beta": "raw_beta",
    "use_qk_l2norm_in_kernel": "l2norm",
    "state_indices": "index",
    "ssm_state_indices": "index",
    "num_accepted_tokens": "num_accepted",
    "state": "initial_state",
    "output_gate": "norm_gate",
    "output_gate_activation": "norm_activation",
    "core_attn_out": "out",
    "checkpoint_state": "checkpoints",
    "state_checkpoints": "checkpoints",
    "checkpoint_every_n_tokens": "checkpoint_every",
}
# Arguments that say how vLLM computes, not what.
_UNUSED = {
    "aiter_prefill_metadata",
    "checkpoint_cu_starts",
    "chunk_indices",
    "chunk_offsets",
    "fuse_gate",
    "self",
    "use_cp",
    "workspace",
}


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float | None = None,
    output_final_state: bool = True,
    l2norm: bool = True,
    kda: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = True,
    lower_bound: float | None = None,
    raw_gate: bool = True,
    raw_beta: bool = True,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    checkpoint_every: int = 0,
    checkpoint_offsets: Tensor | None = None,
    checkpoints: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o in the shape of v, in out where it is given, and the final states, in final_state where it is given.

    lower_bound counts with safe_gate alone, checkpoints where it is said after which tokens they are.
    """
    options: dict[str, Any] = {}
    if kda:
        g = g.reshape(*v.shape[:3], q.shape[3])
        options = {
            "use_gate_in_kernel": raw_gate,
            "use_beta_sigmoid_in_kernel": raw_beta,
            "lower_bound": lower_bound if safe_gate else None,
            "A_log": A_log,
            "dt_bias": dt_bias,
        }
    if checkpoint_every:
        options |= {"checkpoint_every": checkpoint_every, "checkpoints": checkpoints}
    elif checkpoint_offsets is not None:
        options |= {"checkpoint_offsets": checkpoint_offsets, "checkpoints": checkpoints}
    invariant = _vllm_invariance.is_on()
    function = ops.chunk_kda if kda else ops.chunk_gated_delta_rule
    o, state = function(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        seqlens_hint=None if cu_seqlens is None or invariant else _vllm_layers.hint(cu_seqlens, q.shape[1]),
        batch_invariant=invariant,
        out=place_in(out, v),
        **options,
    )
    if invariant and kda and cu_seqlens is not None:
        _decode_single_tokens(
            o, state, (q, k, v, g, beta), initial_state, cu_seqlens, kda=True, A_log=A_log, dt_bias=dt_bias,
            scale=scale, lower_bound=options["lower_bound"], l2norm=l2norm, raw_gate=raw_gate, raw_beta=raw_beta,
        )  # fmt: skip
    return o, state if final_state is None else final_state.copy_(state)


def _decode_single_tokens(
    o: Tensor,
    state: Tensor | None,
    tokens: tuple[Tensor, ...],
    initial_state: Tensor | None,
    cu_seqlens: Tensor,
    **options: Any,
) -> None:
    """Overwrites o and the final states of sequences of one token with what decoding computes.

    vLLM's Kimi layers pass sequences that decode through prefill where a step has both; its GDN layers do
    not. A sequence that decodes alone, or beside others that decode, must get the same bits. Waits for the
    device, which tells where sequences begin.

    tokens: q, k, v, g and beta, ``[1, T, ...]``.
    """
    bounds = cu_seqlens.tolist()
    single = [n for n, first in enumerate(bounds[:-1]) if bounds[n + 1] == first + 1]
    if not single:
        return
    rows = cu_seqlens.new_tensor([bounds[n] for n in single])
    single = cu_seqlens.new_tensor(single)
    q, k, v, g, beta = (x[0, rows].unsqueeze(1) for x in tokens)
    pool = v.new_zeros(len(single) + 1, v.shape[2], v.shape[3], q.shape[3], dtype=torch.float32)
    if initial_state is not None:
        pool[1:] = initial_state[single]  # slot 0 is null
    index = torch.arange(1, len(single) + 1, dtype=torch.int32, device=v.device)
    o[0, rows] = decode(
        q, k, v, g, beta, pool=pool, state_index=index, null_slots="non-positive", batch_invariant=True,
        **options,
    )[:, 0]  # fmt: skip
    if state is not None:
        state[single] = pool[1:].to(state.dtype)


def _prefill_of_glm5next(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor | None = None,
    checkpoint: Any = None,
    raw_qkv: Tensor | None = None,
    conv_state: Tensor | None = None,
    recurrent_state: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    states = None if checkpoint is None else torch.empty_like(initial_state)
    result = _prefill(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        kda=True,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        lower_bound=layer.kda_lower_bound,
        out=out,
        checkpoint_offsets=None if checkpoint is None else checkpoint.checkpoint_offsets,
        checkpoints=states,
    )
    if checkpoint is not None:
        layer._checkpoint_exporter.export(
            checkpoint,
            raw_qkv=raw_qkv,
            conv_state=conv_state,
            recurrent_checkpoint=states,
            recurrent_state=recurrent_state,
            cu_seqlens=cu_seqlens,
        )
    return result


def _update(
    g: Tensor,
    beta: Tensor | None,
    *,
    initial_state: Tensor | None,
    index: Tensor | None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    mixed_qkv: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    inplace_final_state: bool = True,
    num_accepted: Tensor | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = _THRESHOLD,
    kda: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    l2norm: bool = True,
    raw_gate: bool = True,
    raw_beta: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o, in out where it is given, and the pool. Rows of indices and counts may be more than sequences are.

    mixed_qkv: q, k and v of a token of each sequence, in their place; o is ``[1, N, HV, V]`` then.
    index: ``[N]``, or ``[N, M]``: token t leaves its state in column t's slot, and the first starts from
    column num_accepted - 1, or 0.
    """
    decline_if(softplus_beta != 1.0, f"beta, of softplus, is {softplus_beta}; it must be 1")
    decline_if(
        softplus_threshold != _THRESHOLD,
        f"threshold, of softplus, is {softplus_threshold}; it must be {_THRESHOLD}",
    )
    decline_if(not inplace_final_state, "inplace_final_state is false; it must be true")
    if initial_state is None or index is None:
        raise ValueError("initial_state or ssm_state_indices is missing; both must be given")
    pool = initial_state
    if pool.dim() == 2 and mixed_qkv is None:  # whole pages, as vLLM warms its kernels up with
        shape = (v.shape[2], v.shape[3], q.shape[3])
        pool = pool[:, : shape[0] * shape[1] * shape[2]].unflatten(1, shape)
    if mixed_qkv is not None:
        q, k, v = packed_heads(mixed_qkv, pool)
        if not kda:
            _vllm_layers.decline_narrow(pool)
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    decline_if(
        beta.numel() != v.shape[:3].numel(),
        f"beta has shape {list(beta.shape)}; it must have one rate a token and head",
    )
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    index = index[:N]
    if index.dim() == 2 and index.shape[1] == 1 and num_accepted is None:
        index = index[:, 0]
    options = {}
    if index.dim() == 2:
        options["num_accepted"] = index.new_ones(N) if num_accepted is None else num_accepted[:N].to(index)
    o = decode(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        kda=kda,
        pool=pool,
        scale=scale,
        lower_bound=lower_bound,
        l2norm=l2norm,
        raw_gate=raw_gate,
        raw_beta=raw_beta,
        out=out,
        cu_seqlens=cu_seqlens,
        state_index=index,
        null_slots="non-positive",
        batch_invariant=_vllm_invariance.is_on(),
        **options,
    )
    return o.transpose(0, 1) if mixed_qkv is not None and out is None else o, initial_state


def _update_with_norm(
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    index: Tensor,
    mixed_qkv: Tensor,
    cu_seqlens: Tensor,
    num_accepted: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    norm_gate: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    norm_activation: str,
    out: Tensor | None = None,
) -> Tensor:
    """o ``[T, HV, V]``, normalized and gated, in out where it is given; the rest as _update has it.

    mixed_qkv: q, k and v of all sequences' tokens, packed. norm_gate: ``[T, HV, V]``.
    """
    q, k, v = (x.transpose(0, 1) for x in packed_heads(mixed_qkv, initial_state))
    return decode(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        kda=False,
        pool=initial_state,
        scale=scale,
        out=torch.empty_like(norm_gate, memory_format=torch.contiguous_format) if out is None else out,
        cu_seqlens=cu_seqlens,
        state_index=index,
        null_slots="non-positive",
        batch_invariant=_vllm_invariance.is_on(),
        num_accepted=num_accepted,
        norm_weight=norm_weight,
        norm_gate=norm_gate[None],
        norm_eps=norm_eps,
        norm_activation=norm_activation,
    )


def _update_of_layer(
    g: Tensor,
    beta: Tensor,
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    initial_state: Tensor,
    index: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    norm_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """o ``[1, N, H, V]`` of one token of each sequence, convolved, and normalized and gated where a gate is given.

    x: q, k and v before the convolution, side by side ``[N, C]``. weight: ``[3, W, C / 3]``, of q, k and v, the newest
    token's last; bias: C elements. conv_state: ``[slots, C, W - 1]``, the rows before each sequence in the slot of its
    state, either stride 1. norm_gate: as many elements as o.
    """
    invariant = _vllm_invariance.is_on()
    decline_if(
        not invariant,
        "vLLM's own kernel takes less time: it is served with VLLM_BATCH_INVARIANT alone",
    )
    q, k, v = packed_heads(x, initial_state)
    options: dict[str, Any] = {}
    if norm_gate is not None:
        options = {"norm_weight": norm_weight, "norm_gate": norm_gate.reshape(v.shape), "norm_eps": norm_eps}
    o = decode(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        kda=True,
        pool=initial_state,
        lower_bound=lower_bound,
        out=out,
        state_index=index[: len(x)].flatten(),
        null_slots="non-positive",
        batch_invariant=invariant,
        conv_weight=_taps_of(weight),
        conv_bias=None if bias is None else bias.flatten(),
        conv_state=conv_state,
        norm_activation="sigmoid",
        **options,
    )
    return o.transpose(0, 1) if out is None else out


_taps = WeakTensorKeyDictionary()  # (version, taps) by weight


def _taps_of(weight: Tensor) -> Tensor:
    """``[C, W]`` of ``[3, W, C / 3]``, made once for a weight as it is."""
    version, taps = _taps.get(weight, (None, weight))
    if version == weight._version:
        return taps
    taps = weight.mT.flatten(0, 1).contiguous()
    # What a graph that is being captured makes has no values yet.
    if not (taps.is_cuda and torch.cuda.is_current_stream_capturing()):
        _taps[weight] = weight._version, taps
    return taps


class _Served(NamedTuple):
    """What serves a function of vLLM: a function above, with what all calls have, and names as _NAMES'."""

    by: Callable[..., Any]
    fixed: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    names: dict[str, str] = {}  # noqa: RUF012
    # A method of a layer: where it is declined, vLLM's calls functions that are served.
    whole: bool = False

    def ours(self, name: str) -> str | None:
        """What the function above calls vLLM's argument; None where it has none such."""
        ours = self.names.get(name, _NAMES.get(name, name))
        return ours if ours in inspect.signature(self.by).parameters else None

    def calling(self, name: str, theirs: inspect.Signature) -> Callable[..., Any]:
        """A function of this name that takes the arguments of vLLM's, with its defaults.

        An argument of another vLLM that has no meaning here is declined, unless it is what it is by default.
        """
        named = [
            x
            for x in theirs.parameters.values()
            if x.kind is x.POSITIONAL_OR_KEYWORD or x.kind is x.KEYWORD_ONLY
        ]
        order = [x.name for x in named]
        defaults = {x.name: None if x.default is x.empty else x.default for x in named}
        ours = {x: self.ours(x) for x in order}
        known = [(x, ours[x]) for x in order if ours[x] is not None]
        unknown = [x for x in order if ours[x] is None and x not in _UNUSED]

        def serve(*args: Any, **kwargs: Any) -> Any:
            given = {**defaults, **dict(zip(order, args, strict=False)), **kwargs}
            for x in unknown:
                decline_if(given[x] is not defaults[x], f"{x} is given; vLLM 0.33 has no such argument")
            return self.by(**{**self.fixed, **{mine: given[x] for x, mine in known}})

        serve.__name__ = name
        return serve


class _Declined(NamedTuple):
    """A function of vLLM that is counted, and goes to vLLM always."""

    why: str

    def calling(self, name: str, theirs: inspect.Signature) -> Callable[..., Any]:
        def decline(*args: Any, **kwargs: Any) -> Any:
            raise ValueError(self.why)

        decline.__name__ = name
        return decline


_FLA = "vllm.third_party.flash_linear_attention.ops"
_K3 = "vllm.models.kimi_k3.nvidia"
_GLM = "vllm.models.glm5next"
_KDA = "ops.third_party.kda"
_COMPUTED = {"raw_gate": False, "raw_beta": False}
# What counts name functions by, before their names in vLLM.
_MODELS = {_K3: "kimi_k3_", _GLM: "glm5next_"}
_AFTER_HOPPER = _Declined("it is of GPUs after Hopper, for which Wyvern has no kernel in its place")
# Modules of vLLM, their functions, and what serves those.
_FUNCTIONS: dict[str, dict[str, _Served | _Declined]] = {
    "vllm._custom_ops": {
        "fused_gdn_decode_post_conv_mtp": _Served(_update_with_norm),
        "fused_kda_decode": _Served(_update_of_layer),
    },
    "vllm.utils.flashinfer": {
        "flashinfer_fused_kda_decode": _AFTER_HOPPER,
        "flashinfer_packed_fused_kda_decode": _AFTER_HOPPER,
    },
    _FLA: {
        "chunk_gated_delta_rule": _Served(_prefill),
        "fused_recurrent_gated_delta_rule": _Served(_update, _COMPUTED),
        "fused_recurrent_gated_delta_rule_packed_decode": _Served(_update),
        "fused_sigmoid_gating_delta_rule_update": _Served(
            _update, names={"beta": "softplus_beta", "threshold": "softplus_threshold"}
        ),
    },
    f"{_FLA}.kda": {
        "chunk_kda": _Served(_prefill, {"kda": True, **_COMPUTED}),
        "chunk_kda_with_fused_gate": _Served(_prefill, {"kda": True, "raw_beta": False}),
        "fused_recurrent_kda": _Served(_update, {"kda": True, **_COMPUTED}),
        "fused_recurrent_kda_fwd": _Served(_update, {"kda": True, **_COMPUTED}),
    },
    _LAYERS: {"fi_chunk_gated_delta_rule": _Served(_prefill)},
    f"{_K3}.kda": {"_flashkda_prefill": _Served(_prefill, {"kda": True})},
    f"{_K3}.{_KDA}": {
        "chunk_kda_with_fused_gate": _Served(_prefill, {"kda": True}),
        "fused_recurrent_kda": _Served(_update, {"kda": True}),
        "fused_recurrent_kda_packed_decode": _Served(_update, {"kda": True}),
    },
    f"{_GLM}.nvidia.{_KDA}": {
        "chunk_kda_with_fused_gate": _Served(_prefill, {"kda": True, "raw_beta": False}),
        "fused_recurrent_kda": _Served(_update, {"kda": True}),
    },
}
_KIMI_NAMES = {"g1": "g", "g2": "norm_gate"}
# Classes of vLLM: the module, and the methods that are served, each by the one that names its arguments and by what.
_METHODS: dict[str, tuple[str, dict[str, tuple[str, _Served]]]] = {
    "ChunkGatedDeltaRule": (_LAYERS, {"forward": ("forward_native", _Served(_prefill))}),
    "Glm5NextLinearAttention": (
        f"{_GLM}.common.kda", {"_flashkda_prefill": ("_flashkda_prefill", _Served(_prefill_of_glm5next))},
    ),
    "QwenGatedDeltaNetAttention": (
        _LAYERS,
        {
            name: (name, _Served(_vllm_layers.of_qwen, whole=True))
            for name in ("_forward_core", "_forward_core_fused_norm")
        },
    ),
    "KimiGatedDeltaNetAttention": (
        _KIMI,
        {"_forward": ("_forward", _Served(_vllm_layers.of_kimi, names=_KIMI_NAMES, whole=True))},
    ),
    "KimiK3DeltaAttention": (
        f"{_K3}.kda",
        {"_forward": ("_forward", _Served(_vllm_layers.of_kimi_k3, names=_KIMI_NAMES, whole=True))},
    ),
}  # fmt: skip


def _counted(path: str, name: str) -> str:
    """What counts call a function of a module."""
    model = next((prefix for model, prefix in _MODELS.items() if path.startswith(model)), "")
    return model + name.removeprefix("_")


def _find() -> Pairs:
    """Has vLLM's modules changed: those that are imported now, others when they are."""
    paths = {*_FUNCTIONS, *(path for path, _ in _METHODS.values())}
    if not any(is_installed(path) for path in paths):
        raise ImportError("wyvern.vllm needs vLLM 0.33, whose functions were not found: pip install -U vllm")
    for path in paths:
        after_import(path, _met)
    _vllm_invariance.enable(is_enabled)
    return []


def _met(module: ModuleType) -> None:
    """Adds the replacements of a module's functions, and registers its classes."""
    path, pairs = module.__name__, []
    for name, served in _FUNCTIONS.get(path, {}).items():
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "__wyvern__"):
            pairs.append((original, _replacement(original, served, _counted(path, name), original)))
    _switch.add(pairs)
    for name, (where, methods) in _METHODS.items():
        layer = getattr(module, name, None) if where == path else None
        if layer is None or name in _registry():  # another plugin's class stays
            continue
        serving = {}
        for method, (described, served) in methods.items():
            own = getattr(layer, method, None)
            if own is None:
                continue
            counted = _counted(path, method) if method == described else name
            serve = _replacement(own, served, counted, getattr(layer, described, own))
            # What vLLM keeps out of its graphs stays out of them.
            breaks = getattr(module, "eager_break_during_capture", None) if hasattr(own, "__wrapped__") else None
            serving[method] = functools.wraps(own)(serve if breaks is None else breaks(serve))
        if serving:
            layer.register_oot(type(f"Wyvern{name}", (layer,), serving))


def _registry() -> Any:
    """Of out-of-tree layers; imported by the modules that have the classes."""
    return sys.modules["vllm.model_executor.custom_op"].op_registry_oot


def _replacement(
    original: Callable[..., Any], served: _Served | _Declined, name: str, described: Callable[..., Any]
) -> Callable[..., Any]:
    """described: the function that names original's arguments."""
    function = served.calling(name, inspect.signature(described))
    if isinstance(served, _Served) and served.whole:
        return serving_layer(original, lambda *args, **kwargs: _attempt(function, *args, **kwargs), is_enabled)
    made = replacement(original, function, _switch.counts, is_enabled, _vllm_invariance.may_decline)
    made.__wyvern__ = True  # type: ignore[attr-defined]
    return made


@torch.compiler.disable
def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What function makes of a call; None where it is declined, which is counted."""
    return _switch.counts.attempt(function, *args, **kwargs)[0]


_switch = Switch(_find, "vllm")
