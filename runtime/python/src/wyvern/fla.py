"""flash-linear-attention's operators, computed by Wyvern where it can.

    import wyvern.fla
    wyvern.fla.enable()
    ...                         # models and layers of flash-linear-attention, as they are
    print(wyvern.fla.report())  # what was served, and what was not and why

Needs flash-linear-attention (fla-core) 0.6 or later. ``chunk_gated_delta_rule`` and ``chunk_kda`` are reached
through its backends, where Wyvern's is "wyvern" (switched off by FLA_WYVERN=0); the other functions have no
backends and are replaced by name in all modules that are imported. So are the short convolution
(``causal_conv1d``) and the gated norm (``rms_norm_gated``) of the library's layers, by :mod:`wyvern.stages`. What they
decline PyTorch computes where tensors are on the CPU: layers run there as they are.

``GatedDeltaNet``, ``KimiDeltaAttention``, ``DeltaNet``, ``GatedDeltaProduct`` and ``GatedDeltaNet2`` are
computed by :mod:`wyvern.layers` between their projections: convolution, operator and norm in one call, in
training, prompts and steps of decoding, where they have short convolutions and a ``FusedRMSNormGated``. Else, with
``enable(layers=False)``, and where another library has put a ``forward`` of its own in the class, their
operators alone are served. Caches are theirs, of new tensors after each call: the first column of a convolution's,
which nothing reads, is 0.

Calls with the library's ``cp_context`` are served too, forwards and backwards by Wyvern's exchange. Whether a call
is declined then depends on nothing that may differ between ranks and shows before they exchange; an error
afterwards is a ``wyvern.distributed.ContextError``, and no rank falls back.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

from ._torch import torch  # before what imports it by its own name
import torch.nn.functional as F
from torch import Tensor

from . import _fla_context, _fla_modules, layers, ops
from ._serving import (
    Enabled,
    Layer,
    Pairs,
    Report,
    Switch,
    declined_on_cpu,
    has_own_forward,
    is_plain,
    on_cpu,
    replacement,
    serving_layer,
)

__all__ = ["Report", "disable", "enable", "is_enabled", "report"]

_MODULES = {
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_product": "fla.ops.gated_delta_product",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_gdn2": "fla.ops.gdn2",
    "chunk_kda": "fla.ops.kda",
    "fused_recurrent_delta_rule": "fla.ops.delta_rule",
    "fused_recurrent_gated_delta_rule": "fla.ops.gated_delta_rule",
    "fused_recurrent_gdn2": "fla.ops.gdn2",
    "fused_recurrent_kda": "fla.ops.kda",
}
_DISPATCHED = ("chunk_gated_delta_rule", "chunk_kda")
_SWITCH = "FLA_WYVERN"


_LAYERS = {
    "DeltaNet": "fla.layers.delta_net",
    "GatedDeltaNet": "fla.layers.gated_deltanet",
    "GatedDeltaNet2": "fla.layers.gdn2",
    "GatedDeltaProduct": "fla.layers.gated_deltaproduct",
    "KimiDeltaAttention": "fla.layers.kda",
}


def enable(layers: bool = True) -> Enabled:
    """Serves flash-linear-attention's operators from now on, for all threads of the process.

    Modules that imported the functions before have them replaced too. As a context manager it disables at
    the end what it enabled::

        with wyvern.fla.enable():
            loss = model(tokens).loss

    layers: serve layers as a whole too; False: their operators, convolutions and norms one by one.

    Raises:
        ImportError: flash-linear-attention 0.6 or later is not installed.
    """
    return _switch.enable(layers)


def disable() -> None:
    """Gives flash-linear-attention its own functions back, in every module; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served: enabled, and not switched off by FLA_WYVERN=0."""
    return _switch.is_enabled() and os.environ.get(_SWITCH, "1") != "0"


def report(reset: bool = False) -> Report:
    """Counts of served calls by function (of wyvern.layers for whole layers), and of declined ones by function and
    reason.

    reset: count from 0 again.
    """
    return _switch.counts.report(reset)


def _find() -> Pairs:
    """The functions and their replacements; registers the backend."""
    try:
        backends = importlib.import_module("fla.backends")
        originals = {
            name: getattr(importlib.import_module(module), name) for name, module in _MODULES.items()
        }
        functions = {name: _fla_context.taking_theirs(getattr(ops, name)) for name in _MODULES}
        others = _fla_modules.pairs(is_enabled, _switch.counts) + _fla_context.pairs()
    except (ImportError, AttributeError) as error:
        raise ImportError(
            "wyvern.fla needs flash-linear-attention 0.6 or later: "
            f"pip install -U flash-linear-attention ({error})"
        ) from error
    # FLA's own switch: then its backends are asked for nothing, and names are all there is.
    dispatched = () if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1" else _DISPATCHED
    pairs = [
        (original, replacement(original, functions[name], _switch.counts, is_enabled))
        for name, original in originals.items()
        if name not in dispatched
    ]
    if dispatched:
        backend = _backend(backends.BaseBackend, functions)
        backends.register("gated_delta_rule", env_var=_SWITCH)(backend)
        backends.register(originals["chunk_kda"], env_var=_SWITCH)(backend)
    return pairs + others


def _find_layers() -> list[Layer]:
    """The layers that are served as a whole."""
    try:
        kinds = [getattr(importlib.import_module(module), name) for name, module in _LAYERS.items()]
        importlib.import_module("fla.layers.utils")
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"wyvern.fla needs flash-linear-attention 0.6 or later: pip install -U flash-linear-attention ({error})"
        ) from error
    return [
        Layer(kind, kind.forward, serving_layer(kind.forward, functools.partial(_layer, own), is_enabled))
        for kind, own in zip(kinds, (_OWN[name] for name in _LAYERS), strict=True)
        if has_own_forward(kind)
    ]


_switch = Switch(_find, find_layers=_find_layers)


Own = tuple[Callable[..., layers.LayerOutput], dict[str, Any]]
"""A function of wyvern.layers, and the arguments that it has beside those of all."""

_CHUNKED = {"recurrent": False}  # of short prompts too, as presets have these calls


def _gated_delta_net(layer: Any, x: Tensor) -> Own:
    rates = {"a": layer.a_proj(x), "A_log": layer.A_log, "dt_bias": layer.dt_bias}
    return layers.gated_delta_net, {**rates, **_CHUNKED, "b": layer.b_proj(x), "state_v_first": True}


def _kimi_delta(layer: Any, x: Tensor) -> Own:
    rates = {"g": layer.f_proj(x), "A_log": layer.A_log, "dt_bias": layer.dt_bias, "b": layer.b_proj(x)}
    return layers.kimi_delta, {**rates, **_CHUNKED, "lower_bound": layer.lower_bound, "state_v_first": True}


def _delta_net(layer: Any, x: Tensor) -> Own | None:
    if layer.qk_activation != "silu" or layer.qk_norm != "l2" or not layer.use_beta:
        return None
    return layers.delta_net, {**_CHUNKED, "b": layer.b_proj(x)}


def _gated_delta_product(layer: Any, x: Tensor) -> Own:
    names = ("a", "A_log", "dt_bias")
    rates: dict[str, Any] = dict.fromkeys(names)
    if layer.use_forget_gate:
        rates = dict(zip(names, (layer.a_proj(x), layer.A_log, layer.dt_bias), strict=True))
    return layers.gated_delta_product, {
        **rates, "b": layer.b_proj(x), "num_householder": layer.num_householder,
    }  # fmt: skip


def _gdn2(layer: Any, x: Tensor) -> Own | None:
    if layer.num_v_heads != layer.num_heads:  # whose rates are of heads of keys
        return None
    return layers.gdn2, {
        "g": layer.f_proj(x), "b": layer.b_proj(x), "w": layer.w_proj(x), "A_log": layer.A_log,
        "dt_bias": layer.dt_bias, **_CHUNKED,
    }  # fmt: skip


_OWN: dict[str, Callable[[Any, Tensor], Own | None]] = {
    "DeltaNet": _delta_net,
    "GatedDeltaNet": _gated_delta_net,
    "GatedDeltaNet2": _gdn2,
    "GatedDeltaProduct": _gated_delta_product,
    "KimiDeltaAttention": _kimi_delta,
}


def _is_whole(layer: Any) -> bool:
    """Whether a layer has a convolution and a norm as wyvern.layers has them, and its modules do nothing else."""
    modules = importlib.import_module("fla.modules")
    if not layer.use_short_conv or (layer.training and layer.mode != "chunk"):
        return False
    convs = [layer.q_conv1d, layer.k_conv1d, layer.v_conv1d]
    return (
        is_plain(layer.o_norm, modules.FusedRMSNormGated)
        and layer.o_norm.weight is not None
        and all(is_plain(conv, modules.ShortConvolution) for conv in convs)
        and all(conv.activation == convs[0].activation for conv in convs)
        and all((conv.bias is None) == (convs[0].bias is None) for conv in convs)
    )


def _layer(
    own: Callable[[Any, Tensor], Own | None],
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[Tensor, None, Any] | None:
    """What the layer's forward gives, or None where wyvern.layers does not compute it."""
    utils = importlib.import_module("fla.layers.utils")
    if not _is_whole(layer) or (attention_mask is not None and attention_mask.dim() != 2):
        return None
    batch_size, q_len, _ = hidden_states.shape
    last_state = utils.get_layer_cache(layer, past_key_values)
    if last_state is not None and any(part is None for part in last_state["conv_state"] or [None]):
        return None
    x, indices, cu_seqlens = utils.unpad_hidden_states(
        hidden_states, kwargs.get("cu_seqlens"), attention_mask, q_len
    )
    if q_len == 1 and indices is not None and x.shape[1] == batch_size:
        x, indices, cu_seqlens = hidden_states, None, None  # none is masked: no pack
    chosen = own(layer, x)
    if chosen is None:
        return None
    function, arguments = chosen
    projected = (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    convs = [layer.q_conv1d, layer.k_conv1d, layer.v_conv1d]
    if last_state is not None:
        window = torch.cat([part[..., 1:] for part in last_state["conv_state"]], 1)
        arguments["initial_conv_state"] = window.to(projected[0].dtype)
        arguments["initial_state"] = last_state["recurrent_state"]
        if q_len == 1 and "recurrent" in arguments:
            arguments["recurrent"] = not torch.is_grad_enabled()
    output, declined = _switch.counts.attempt(
        function, projected, order="qkv", z=layer.g_proj(x),
        heads=(layer.num_heads, getattr(layer, "num_v_heads", layer.num_heads)),
        dims=(layer.head_k_dim, layer.head_v_dim), conv_weight=[conv.weight for conv in convs],
        conv_bias=None if convs[0].bias is None else [conv.bias for conv in convs],
        conv_activation=convs[0].activation, norm_weight=layer.o_norm.weight, norm_eps=layer.o_norm.eps,
        norm_activation=layer.o_norm.activation, allow_neg_eigval=layer.allow_neg_eigval,
        cu_seqlens=cu_seqlens, output_final_state=bool(use_cache), **arguments,
    )  # fmt: skip
    if declined is not None:
        return None
    conv_state: tuple[Tensor | None, ...] = (None, None, None)
    if use_cache:
        parts = output.final_conv_state.split([conv.weight.shape[0] for conv in convs], 1)
        conv_state = tuple(F.pad(part, (1, 0)) for part in parts)
    utils.update_layer_cache(
        layer, past_key_values, recurrent_state=output.final_state, conv_state=conv_state, offset=q_len
    )
    o = utils.repad_hidden_states(layer.o_proj(output.o.flatten(2)), indices, batch_size, q_len)
    return o, None, past_key_values


def _backend(base: Any, functions: dict[str, Callable[..., Any]]) -> Any:
    """The class of Wyvern's backend, derived from FLA's.

    FLA asks a backend first whether it takes a call. Only the call itself tells all that Wyvern may have
    against it, so it is made then, and its result handed over when FLA asks for the implementation.
    """

    class WyvernBackend(base):
        backend_type = "wyvern"
        priority = -1  # before FLA's own

        def __init__(self) -> None:
            super().__init__(env_var=_SWITCH)
            self._made = threading.local()

        @classmethod
        def is_available(cls) -> bool:
            return is_enabled()

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            if function_name not in _DISPATCHED:
                return False, "it is a part of an operator"
            result, declined = _switch.counts.attempt(functions[function_name], *args, **kwargs)
            self._made.result = result
            if declined is None:
                return True, None
            # FLA's kernels take CPU tensors in Triton's interpreter only.
            if on_cpu(*args, **kwargs) and os.environ.get("TRITON_INTERPRET") != "1":
                raise declined_on_cpu(declined)
            return False, str(declined)

        def get_implementation(self, function_name: str) -> Callable[..., Any]:
            result, self._made.result = self._made.result, None
            return lambda *args, **kwargs: result

    return WyvernBackend
