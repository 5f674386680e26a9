"""Megatron-Core's Gated DeltaNet, computed by Wyvern where it can.

    import wyvern.megatron
    wyvern.megatron.enable()
    ...                              # training and evaluation, of models that exist already too
    print(wyvern.megatron.report())  # what was served, and what was not and why

Needs megatron-core 0.16 or later. ``GatedDeltaNet`` is computed by :mod:`wyvern.layers` between its own ``in_proj``
and ``out_proj``: convolution, norms, decays, operator and gated norm in one call, forwards and backwards, on the
heads of this rank of tensor parallelism. So it is with ``deterministic_mode``, as Wyvern gives the same bits in every
run, and with THD packs (``PackedSeqParams``), also where the library's own code takes none. Decays, rates and the
gated norm are computed in float32 throughout; the library rounds some of them to the parameters' dtype in between.

What Wyvern declines the library's own code computes, and ``report()`` has the reason: context parallelism,
inference contexts, recomputation of the norm's output alone (``gdn_norm_out``), subclasses, and modules or hooks that
do something else. Operators of layers that are declined are FLA's, which ``wyvern.fla.enable()`` serves.

A batch of more than one sequence in ``[s, b, h]`` has its projection copied to ``[b, s, h]``: of Qwen3.5-397B (16
heads of keys, 64 of values, 128 each) 41 KB a token are read and written. One sequence, or a pack, is read in place.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ._torch import torch  # before what imports it by its own name
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from . import layers
from ._serving import Enabled, Layer, Report, Switch, has_own_forward, is_plain, serving_layer
from .distributed._context import around

__all__ = ["Report", "disable", "enable", "is_enabled", "report"]


def enable() -> Enabled:
    """Serves Megatron-Core's ``GatedDeltaNet`` from now on, for all threads of the process.

    As a context manager it disables at the end what it enabled::

        with wyvern.megatron.enable():
            loss = model(tokens, position_ids, attention_mask, labels=labels)

    Every rank of a group of tensor parallelism enables it, or none.

    Raises:
        ImportError: megatron-core 0.16 or later is not installed.
    """
    return _switch.enable(layers=True)


def disable() -> None:
    """Gives the layer its own method back; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served."""
    return _switch.is_enabled()


def report(reset: bool = False) -> Report:
    """Counts of served calls, under ``gated_delta_net``, and of declined ones by reason.

    reset: count from 0 again.
    """
    return _switch.counts.report(reset)


_NAME = layers.gated_delta_net.__name__


def _find_layers() -> list[Layer]:
    """The layer, with the method that holds all from ``in_proj`` to ``out_proj``.

    Where that is not ``forward`` itself, ``forward`` calls it, or has it recomputed in the backward pass.
    """
    try:
        kind = importlib.import_module("megatron.core.ssm.gated_delta_net").GatedDeltaNet
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"wyvern.megatron needs megatron-core 0.16 or later: pip install -U megatron-core ({error})"
        ) from error
    method = "_forward_compute" if hasattr(kind, "_forward_compute") else "forward"
    if not has_own_forward(kind, method):
        return []
    original = getattr(kind, method)
    function = functools.partial(_layer, kind, inspect.signature(original))
    return [Layer(kind, original, serving_layer(original, function, is_enabled), method)]


_switch = Switch(list, find_layers=_find_layers)


def _waits(hook: Callable[..., Any]) -> bool:
    """Whether a hook waits for parameters that are gathered meanwhile (``overlap_param_gather``)."""
    return getattr(hook, "__module__", None) == "megatron.core.distributed.distributed_data_parallel"


def _norms() -> list[type]:
    """The modules whose norm ``wyvern.layers`` computes."""
    engine = sys.modules.get("transformer_engine.pytorch")
    return [nn.RMSNorm, *([engine.RMSNorm] if hasattr(engine, "RMSNorm") else [])]


def _context_ranks(layer: Any, given: Mapping[str, Any]) -> int:
    """How many ranks the tokens of a sequence lie on."""
    if "cp_size_headwise" in given:
        return given["cp_size_headwise"] * given["cp_size_chunkwise"]
    groups = (getattr(x, name, None) for x, name in (
        (layer.pg_collection, "cp"), (given.get("packed_seq_params"), "cp_group"),
    ))  # fmt: skip
    return max([1, *(group.size() for group in groups if group is not None)])


def _why_declined(kind: type, layer: Any, given: Mapping[str, Any]) -> str | None:
    """Why the library's own code computes this call, or None."""
    if type(layer) is not kind:
        return f"the layer is a {type(layer).__qualname__}, a subclass of GatedDeltaNet"
    if given.get("inference_context") is not None or given.get("inference_params") is not None:
        return "an inference context is given"
    if (ranks := _context_ranks(layer, given)) > 1:
        return f"sequences lie on {ranks} ranks of context parallelism"
    if getattr(layer, "recompute_norm_out", False) and torch.is_grad_enabled():
        return "recompute_modules has gdn_norm_out: the norm's output alone is to be recomputed"
    if layer.act_fn is not F.silu:
        return f"the activation is {layer.activation}; it must be torch.nn.functional.silu"
    if not layer.use_qk_l2norm:
        return "use_qk_l2norm is False"
    if not is_plain(layer.conv1d, nn.Conv1d, _waits):
        return f"conv1d is a {type(layer.conv1d).__qualname__} or has hooks; it must be a plain Conv1d"
    if not any(is_plain(layer.out_norm, norm, _waits) for norm in _norms()):
        return f"out_norm is a {type(layer.out_norm).__qualname__} or has hooks; it must be a plain RMSNorm"
    return None


_copies = WeakTensorKeyDictionary()  # by boundaries on a device: their version, and the copy


def _on_cpu(boundaries: Tensor) -> Tensor:
    """The values of boundaries. The device is waited for once, not by every layer of a step."""
    if boundaries.is_cpu:
        return boundaries
    version = None if boundaries.is_inference() else boundaries._version
    known = _copies.get(boundaries)
    if known is None or version is None or known[0] != version:
        known = _copies[boundaries] = version, boundaries.cpu()
    return known[1]


def _boundaries(given: Mapping[str, Any], tokens: int, batch: int) -> tuple[dict[str, Tensor], str | None]:
    """The boundaries of a pack as arguments of wyvern.layers, none without one; and why it is declined, or None."""
    pack = given.get("packed_seq_params")
    if pack is None or pack.qkv_format != "thd":
        return {}, None
    ends, others = (
        getattr(pack, f"{name}_padded") if getattr(pack, f"{name}_padded") is not None else getattr(pack, name)
        for name in ("cu_seqlens_q", "cu_seqlens_kv")
    )
    if batch != 1:
        return {}, f"a pack has a batch of {batch}; it must be 1"
    if ends is None or others is None:
        return {}, "a pack has no cu_seqlens_q or no cu_seqlens_kv"
    copy = _on_cpu(ends)
    if others is not ends and not torch.equal(_on_cpu(others), copy):
        return {}, "cu_seqlens_q and cu_seqlens_kv differ"
    if copy.numel() < 2 or copy[-1] != tokens:
        return {}, "cu_seqlens_q does not end at the number of tokens"
    return {"cu_seqlens": ends, "cu_seqlens_cpu": copy}, None


def _layer(
    kind: type, signature: inspect.Signature, layer: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None] | None:
    """What the layer's method gives, or None where wyvern.layers does not compute it."""
    given = signature.bind(layer, *args, **kwargs).arguments
    hidden_states = given["hidden_states"]
    tokens, batch = hidden_states.shape[0], hidden_states.shape[1]
    reason = _why_declined(kind, layer, given)
    boundaries: dict[str, Tensor] = {}
    if reason is None:  # what boundaries are of depends on sequence parallelism
        boundaries, reason = _boundaries(given, tokens * layer.sp_size, batch)
    if reason is not None:
        _switch.counts.declined(_NAME, reason)
        if around() is not None:  # the library would take a rank's tokens for whole sequences
            raise ValueError(reason)
        return None
    projected, _ = layer.in_proj(hidden_states)
    rows = projected.transpose(0, 1)
    if batch > 1:
        rows = rows.contiguous()  # once, in place of q, k, v and z each in either pass
    for module in (layer.conv1d, layer.out_norm):
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
    norm = layer.out_norm
    weight = norm.weight.float() + 1 if getattr(norm, "zero_centered_gamma", False) else norm.weight
    output, declined = _switch.counts.attempt(
        layers.gated_delta_net, rows,
        heads=(layer.num_key_heads // layer.tp_size, layer.num_value_heads // layer.tp_size),
        dims=(layer.key_head_dim, layer.value_head_dim), conv_weight=layer.conv1d.weight,
        conv_bias=layer.conv1d.bias, A_log=layer.A_log, dt_bias=layer.dt_bias, norm_weight=weight,
        norm_eps=norm.eps, recurrent=False, batch_invariant=getattr(layer.config, "batch_invariant_mode", False),
        **boundaries,
    )  # fmt: skip
    if declined is not None:
        return None
    out, bias = layer.out_proj(output.o.flatten(2).transpose(0, 1).contiguous())
    return out, bias
