"""vLLM's delta rules, computed by Wyvern where it can.

    pip install wyvern-kernels             # beside vLLM 0.33, which finds it as a plugin in every process
    vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct

or, in a program of one's own, before models are loaded::

    import wyvern.vllm
    wyvern.vllm.enable()
    ...
    print(wyvern.vllm.report())            # what was served, and what was not and why

Served are Qwen3-Next and Qwen3.5, OLMo hybrid, Kimi K3, GLM-5.3-Flash and others that call the same
functions: prefill with and without checkpoints, decoding, and verifying drafts. Layers call functions of
vLLM's modules, which are replaced by name in all modules that have them, and two classes, of which vLLM's
registry of out-of-tree layers has subclasses: ``ChunkGatedDeltaRule``, and ``Glm5NextLinearAttention``,
whose method calls FlashKDA. What Wyvern declines goes to vLLM's own function. WYVERN_VLLM=0 keeps Wyvern out
of a process; so does vLLM's own VLLM_PLUGINS.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

from ._torch import torch
from torch import Tensor

from . import ops
from ._engine import decline_if, decode, into, packed_heads
from ._serving import Enabled, Pairs, Report, Switch, replacement

__all__ = ["Report", "disable", "enable", "is_enabled", "plugin", "report"]

_VARIABLE = "WYVERN_VLLM"
_LAYERS = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_GLM5NEXT = "vllm.models.glm5next.common.kda"
# As torch's softplus has it, beyond which it is the identity.
_THRESHOLD = 20.0


def enable() -> Enabled:
    """Serves vLLM's delta rules from now on, for all threads of the process.

    Layers that exist have their functions replaced too, but keep the class ``ChunkGatedDeltaRule`` or
    ``Glm5NextLinearAttention`` that they were made with. As a context manager it disables at the end what it
    enabled.

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


def report(reset: bool = False) -> Report:
    """Counts of served calls by function, and of declined ones by function and reason, of this process.

    reset: count from 0 again.
    """
    return _switch.counts.report(reset)


def plugin() -> None:
    """What vLLM calls in each of its processes (entry point group ``vllm.general_plugins``).

    As :func:`enable`; where that fails, vLLM goes on without Wyvern and a warning says why.
    """
    try:
        enable()
    except ImportError as error:
        warnings.warn(str(error), stacklevel=1)


# The functions below have the names and arguments of vLLM's. Theirs say which shapes: q, k [1, T, H, K],
# v [1, T, HV, V], states [N, HV, V, K], pools [slots, HV, V, K].


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
    **checkpoints: Any,
) -> tuple[Tensor, Tensor | None]:
    o, final_state = ops.chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        **checkpoints,
    )
    if core_attn_out is not None:  # at least as large as o
        core_attn_out.view(-1)[: o.numel()].copy_(o.view(-1))
    return o, final_state


def fi_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
) -> tuple[Tensor, Tensor | None]:
    checkpoints = {}
    if checkpoint_every_n_tokens:
        checkpoints = {"checkpoint_every": checkpoint_every_n_tokens, "checkpoints": state_checkpoints}
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **checkpoints,
    )


def ChunkGatedDeltaRule(  # noqa: N802 (the class whose forward() it stands for)
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        core_attn_out=core_attn_out,
    )


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    o = decode(
        *packed_heads(mixed_qkv, initial_state),
        a,
        b,
        A_log=A_log,
        dt_bias=dt_bias,
        kda=False,
        pool=initial_state,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        out=out,
        state_index=ssm_state_indices,
        null_slots="non-positive",
    )
    return o, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = _THRESHOLD,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    decline_if(beta != 1.0, f"beta, of softplus, is {beta}; it must be 1")
    decline_if(threshold != _THRESHOLD, f"threshold, of softplus, is {threshold}; it must be {_THRESHOLD}")
    return _update(
        q, k, v, a, b, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens, A_log=A_log, dt_bias=dt_bias, kda=is_kda, scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    if beta is None:
        beta = torch.ones_like(g)
    decline_if(beta.dim() == v.dim(), "beta has a rate for every value channel; it must be [1, T, HV]")
    return _update(
        q, k, v, g, beta, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens, A_log=None, dt_bias=None, kda=False, scale=scale,
        l2norm=use_qk_l2norm_in_kernel, raw_gate=False, raw_beta=False,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    return _update(
        q, k, v, g, beta, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices,
        num_accepted_tokens, out, A_log=a_log, dt_bias=g_bias, kda=True, scale=scale,
        lower_bound=lower_bound if compute_gate else None, l2norm=use_qk_l2norm_in_kernel,
        raw_gate=compute_gate, raw_beta=sigmoid_beta,
    )  # fmt: skip


def kimi_k3_fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    return _update(
        q, k, v, raw_g, raw_beta, initial_state, True, cu_seqlens, ssm_state_indices, num_accepted_tokens,
        out, A_log=A_log, dt_bias=dt_bias, kda=True, lower_bound=lower_bound,
    )  # fmt: skip


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    o = decode(
        *packed_heads(mixed_qkv, initial_state),
        raw_g,
        raw_beta,
        A_log=A_log,
        dt_bias=dt_bias,
        kda=True,
        pool=initial_state,
        scale=scale,
        lower_bound=lower_bound,
        out=out,
        state_index=state_indices,
        null_slots="non-positive",
    )
    return o.transpose(0, 1) if out is None else o, initial_state


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
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return ops.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )


def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return _gated_kda(
        q, k, v, raw_g, beta, A_log, g_bias, lower_bound, initial_state, cu_seqlens, scale=scale,
        raw_beta=False, l2norm=use_qk_l2norm_in_kernel, output_final_state=output_final_state,
    )  # fmt: skip


def glm5next_chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    return chunk_kda_with_fused_gate(
        q, k, v, raw_g, beta, A_log, g_bias, scale, initial_state, output_final_state,
        lower_bound if safe_gate else None, use_qk_l2norm_in_kernel, cu_seqlens,
    )  # fmt: skip


def kimi_k3_chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    o, final_state = _gated_kda(
        q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound, initial_state, cu_seqlens, scale=scale,
        l2norm=use_qk_l2norm_in_kernel, output_final_state=output_final_state,
    )  # fmt: skip
    return into(out, o), final_state


def kimi_k3_flashkda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    final_state: Tensor,
    workspace: Tensor,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    o, state = _gated_kda(
        q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens,
        **_at_offsets(checkpoint_offsets, checkpoint_state),
    )  # fmt: skip
    return into(out, o), final_state.copy_(state)


def glm5next_flashkda_prefill(
    layer: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    out: Tensor | None,
    checkpoint: Any = None,
    raw_qkv: Tensor | None = None,
    conv_state: Tensor | None = None,
    recurrent_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    states = None if checkpoint is None else torch.empty_like(initial_state)
    o, final_state = _gated_kda(
        q, k, v, g, beta, layer.A_log, layer.dt_bias, layer.kda_lower_bound, initial_state, cu_seqlens,
        **_at_offsets(None if checkpoint is None else checkpoint.checkpoint_offsets, states),
    )  # fmt: skip
    if checkpoint is not None:
        layer._checkpoint_exporter.export(
            checkpoint,
            raw_qkv=raw_qkv,
            conv_state=conv_state,
            recurrent_checkpoint=states,
            recurrent_state=recurrent_state,
            cu_seqlens=cu_seqlens,
        )
    return into(out, o), final_state


def _update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor | None,
    in_place: bool,
    cu_seqlens: Tensor | None,
    index: Tensor | None,
    num_accepted: Tensor | None,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """o, in out where it is given, and the pool. Rows of indices and counts may be more than sequences are.

    index: ``[N]``, or ``[N, M]``: token t leaves its state in column t's slot, and the first starts from
    column num_accepted - 1, or 0.
    """
    decline_if(not in_place, "inplace_final_state is false; it must be true")
    decline_if(pool is None or index is None, "initial_state or ssm_state_indices is missing")
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    index = index[:N]
    if index.dim() == 2 and index.shape[1] == 1 and num_accepted is None:
        index = index[:, 0]
    if index.dim() == 2:
        options["num_accepted"] = index.new_ones(N) if num_accepted is None else num_accepted[:N].to(index)
    o = decode(
        q,
        k,
        v,
        a,
        b,
        pool=pool,
        out=out,
        cu_seqlens=cu_seqlens,
        state_index=index,
        null_slots="non-positive",
        **options,
    )
    return o, pool


def _gated_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    scale: float | None = None,
    raw_beta: bool = True,
    l2norm: bool = True,
    output_final_state: bool = True,
    **checkpoints: Any,
) -> tuple[Tensor, Tensor | None]:
    return ops.chunk_kda(
        q,
        k,
        v,
        g.reshape(*v.shape[:3], q.shape[3]),
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=raw_beta,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        **checkpoints,
    )


def _at_offsets(offsets: Tensor | None, states: Tensor | None) -> dict[str, Any]:
    """The options of states after so many tokens of each sequence, 0: none."""
    return {} if offsets is None else {"checkpoint_offsets": offsets, "checkpoints": states}


_FLA = "vllm.third_party.flash_linear_attention.ops"
_K3 = "vllm.models.kimi_k3.nvidia"
_KDA = "ops.third_party.kda"
# Modules of vLLM, and of each the names of functions that those here stand for.
_FUNCTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    _FLA: {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
        "fused_recurrent_gated_delta_rule_packed_decode": fused_recurrent_gated_delta_rule_packed_decode,
        "fused_sigmoid_gating_delta_rule_update": fused_sigmoid_gating_delta_rule_update,
    },
    f"{_FLA}.kda": {
        "chunk_kda": chunk_kda,
        "chunk_kda_with_fused_gate": chunk_kda_with_fused_gate,
        "fused_recurrent_kda": fused_recurrent_kda,
    },
    _LAYERS: {"fi_chunk_gated_delta_rule": fi_chunk_gated_delta_rule},
    f"{_K3}.kda": {"_flashkda_prefill": kimi_k3_flashkda_prefill},
    f"{_K3}.{_KDA}": {
        "chunk_kda_with_fused_gate": kimi_k3_chunk_kda_with_fused_gate,
        "fused_recurrent_kda": kimi_k3_fused_recurrent_kda,
        "fused_recurrent_kda_packed_decode": fused_recurrent_kda_packed_decode,
    },
    f"vllm.models.glm5next.nvidia.{_KDA}": {
        "chunk_kda_with_fused_gate": glm5next_chunk_kda_with_fused_gate,
        "fused_recurrent_kda": fused_recurrent_kda,
    },
}
# Classes of vLLM, and of each the method that a function here stands for.
_METHODS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "ChunkGatedDeltaRule": (_LAYERS, "forward", ChunkGatedDeltaRule),
    "Glm5NextLinearAttention": (_GLM5NEXT, "_flashkda_prefill", glm5next_flashkda_prefill),
}


def _find() -> Pairs:
    """vLLM's functions and their replacements; registers the classes."""
    pairs = []
    missing: Exception | None = None
    for path, functions in _FUNCTIONS.items():
        try:
            module = importlib.import_module(path)
        except (ImportError, AttributeError) as error:  # a part that this vLLM, or its platform, is without
            missing = error
            continue
        for name, function in functions.items():
            original = getattr(module, name, None)
            if original is not None:
                pairs.append((original, replacement(original, function, _switch.counts, is_enabled)))
    if not pairs:
        raise ImportError(
            f"wyvern.vllm needs vLLM 0.33, whose functions were not found: pip install -U vllm ({missing})"
        ) from missing
    registry = importlib.import_module("vllm.model_executor.custom_op").op_registry_oot
    for name, (path, method, function) in _METHODS.items():
        try:
            layer = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError):
            continue
        if name not in registry:  # another plugin's class stays
            own = getattr(layer, method)
            serve = replacement(own, function, _switch.counts, is_enabled)
            layer.register_oot(type(f"Wyvern{name}", (layer,), {method: functools.wraps(own)(serve)}))
    return pairs


_switch = Switch(_find)
