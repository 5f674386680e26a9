"""The delta rules of transformers' models, computed by Wyvern where it can.

    import wyvern.transformers
    wyvern.transformers.enable()
    model.generate(...)                  # Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid, ...
    print(wyvern.transformers.report())  # what was served, and what was not and why

Ling 3 (Bailing hybrid), GLM-5.3-Flash and Qwen4-Exp have the same functions and are served too. Needs
transformers with one of these models; one whose module is missing is left out. Their modules' functions are
replaced, so models that exist are served too. What Wyvern declines goes to the model's own function, which
calls flash-linear-attention where that is installed, else PyTorch.

The linear layers of Qwen3-Next, Qwen3.5 and Kimi Linear are computed by :mod:`wyvern.layers` between their
projections: convolution, operator and norm in one call, in training, prompts and steps of decoding, but where
the cache records its past. Else, with ``enable(layers=False)``, and where another library has put a ``forward``
of its own in the class, their operators alone are served. Caches are theirs: a step of decoding updates the
recurrent state where it lies, and the rows of the convolution, all W of them, by the cache's own method.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ._torch import torch  # before what imports it by its own name
from torch import Tensor, nn

from . import layers, ops
from ._serving import Enabled, Layer, Pairs, Report, Switch, has_own_forward, is_plain, serving_layer

__all__ = ["Report", "disable", "enable", "is_enabled", "report"]

_MODELS = (
    "bailing_hybrid",
    "glm5_next",
    "kimi_linear",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)
# What the models' modules call the functions.
_FUNCTIONS = {
    "chunk_kimi_delta_attention": ops.chunk_kda,
    "recurrent_kimi_delta_attention": ops.fused_recurrent_kda,
    "torch_chunk_gated_delta_rule": ops.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
}
# The linear layers' classes, by the module of their model.
_LAYERS = {
    "kimi_linear": "KimiLinearDeltaAttention",
    "qwen3_5": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
}


def enable(layers: bool = True) -> Enabled:
    """Serves the models' delta rules from now on, for all threads of the process.

    As a context manager it disables at the end what it enabled::

        with wyvern.transformers.enable():
            tokens = model.generate(prompt)

    layers: serve layers as a whole too; False: their operators alone.

    Raises:
        ImportError: transformers is not installed, or none of the models is in it.
    """
    return _switch.enable(layers)


def disable() -> None:
    """Gives the models their own functions back; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served."""
    return _switch.is_enabled()


def report(reset: bool = False) -> Report:
    """Counts of served calls by function of wyvern.ops (of wyvern.layers for whole layers), of declined ones by
    function and reason, and of calls that were traced, so that the model's own function computes.

    reset: count from 0 again.
    """
    return _switch.counts.report(reset)


def _find() -> Pairs:
    """Every model's functions and their replacements."""
    found = []
    missing: ImportError | None = None
    for model in _MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ImportError as error:
            missing = error
            continue
        for name, function in _FUNCTIONS.items():
            original = getattr(module, name, None)
            if original is not None:
                found.append((original, _serving(original, function)))
    if not found:
        raise ImportError(
            "wyvern.transformers needs transformers with Qwen3-Next, Qwen3.5, Kimi Linear, OLMo "
            f"hybrid or another model of its list: pip install -U transformers ({missing})"
        ) from missing
    return found


def _find_layers() -> list[Layer]:
    """The layers that are served as a whole; of a model that is missing none."""
    found = []
    for model, name in _LAYERS.items():
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
            kind = getattr(module, name)
        except (ImportError, AttributeError):
            continue
        if not has_own_forward(kind):
            continue
        function = functools.partial(_layer, module, _kimi_delta if "Kimi" in name else _gated_delta_net)
        found.append(Layer(kind, kind.forward, serving_layer(kind.forward, function, is_enabled)))
    return found


_switch = Switch(_find, find_layers=_find_layers)


Own = tuple[Callable[..., layers.LayerOutput], Tensor, dict[str, Any]]
"""A function of wyvern.layers, the projection of q, k and v, and the arguments that it has beside those of all."""

def _gated_delta_net(module: Any, layer: Any, x: Tensor) -> Own:
    if hasattr(layer, "in_proj_qkvz"):  # heads of keys, each with what belongs to it
        *rows, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        qkv = torch.cat([part.flatten(2) for part in rows], -1)
    else:
        qkv, z, b, a = (
            projection(x)
            for projection in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a)
        )
    return layers.gated_delta_net, qkv, {
        "heads": (layer.num_k_heads, layer.num_v_heads), "dims": (layer.head_k_dim, layer.head_v_dim),
        "z": z, "b": b, "a": a, "A_log": layer.A_log, "dt_bias": layer.dt_bias,
    }  # fmt: skip


def _kimi_delta(module: Any, layer: Any, x: Tensor) -> Own | None:
    gate = layer.forget_gate
    if not is_plain(gate, module.KimiLinearForgetGate):
        return None
    qkv = torch.cat([projection(x) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
    return layers.kimi_delta, qkv, {
        "heads": (layer.num_heads,) * 2, "dims": (layer.head_dim,) * 2, "z": layer.g_b_proj(layer.g_a_proj(x)),
        "b": layer.b_proj(x), "g": gate.f_b_proj(gate.f_a_proj(x)), "A_log": gate.A_log.flatten(),
        "dt_bias": gate.dt_bias,
    }  # fmt: skip


def _layer(
    module: Any,
    own: Callable[[Any, Any, Tensor], Own | None],
    layer: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What the forward of a layer of module gives, or None where wyvern.layers does not compute it."""
    bounds, at, is_kimi = kwargs.get("cu_seq_lens_q"), layer.layer_idx, own is _kimi_delta
    # Their convolution knows a pack by seq_idx; Kimi Linear's layers know none.
    if (bounds is None) != (kwargs.get("seq_idx") is None) or (
        bounds is not None and (is_kimi or cache_params is not None)
    ):
        return None
    norm = layer.o_norm if is_kimi else layer.norm
    kinds = (getattr(module, name) for name in vars(module) if name.endswith("RMSNormGated"))
    if not is_plain(layer.conv1d, nn.Conv1d) or not any(is_plain(norm, kind) for kind in kinds):
        return None
    states: dict[str, Any] = {"recurrent": False}  # of short prompts too, as presets have these calls
    if cache_params is not None:
        window = cache_params.get_conv_state(at, state_idx=0)
        state = cache_params.get_recurrent_state(at, state_idx=0)
        if cache_params.is_recording_past(at) or (window is None) != (state is None):
            return None
        states["output_final_state"] = True
        if window is not None:
            window = window[..., 1 - layer.conv_kernel_size :].clone()  # of what is updated in place below
            if hidden_states.shape[1] == 1 and state.is_contiguous() and not torch.is_grad_enabled():
                states = {"recurrent": True, "state": state, "conv_state": window}  # decoding, in place
            else:
                states |= {"initial_state": state, "initial_conv_state": window}
    chosen = own(module, layer, module.apply_mask_to_padding_states(hidden_states, attention_mask))
    if chosen is None:
        return None
    function, qkv, arguments = chosen
    output, declined = _switch.counts.attempt(
        function, qkv, order="qkv", **arguments, conv_weight=layer.conv1d.weight, conv_bias=layer.conv1d.bias,
        conv_activation=layer.activation, norm_weight=norm.weight, norm_eps=norm.variance_epsilon,
        norm_activation=norm.activation, cu_seqlens=bounds, **states,
    )  # fmt: skip
    if declined is not None:
        return None
    if cache_params is not None:
        W = layer.conv_kernel_size
        cache_params.update_conv_state(qkv[:, -W:].mT, at, conv_kernel_size=W)
        if output.final_state is not None:
            cache_params.update_recurrent_state(output.final_state, at)
    return (layer.o_proj if is_kimi else layer.out_proj)(output.o.flatten(2))


# What parameters of theirs are called here.
_NAMES = {"query": "q", "key": "k", "value": "v"}


def _serving(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """original, whose calls function serves where it can.

    Arguments go by the names that original has for them: the order is another, so that the place of its
    chunk size is that of function's scale. Models pass on every keyword argument of their own; as
    transformers does for other libraries, those that function does not name are left out. A traced model
    keeps its own function, and a call that is wrong gets its error from there.
    """
    accepted = frozenset(inspect.signature(function).parameters)
    places = [
        name
        for name, parameter in inspect.signature(original).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]

    @torch.compiler.assume_constant_result  # called while a call is traced, and no part of the trace
    def count_traced() -> None:
        _switch.counts.traced(function.__name__)

    @functools.wraps(original)
    def serve(*args: Any, **kwargs: Any) -> Any:
        by_place = dict(zip(places, args, strict=False))
        if torch.compiler.is_compiling():
            count_traced()
            return original(*args, **kwargs)
        if len(args) > len(places) or by_place.keys() & kwargs.keys():
            return original(*args, **kwargs)
        given = {_NAMES.get(name, name): value for name, value in (by_place | kwargs).items()}
        given = {name: value for name, value in given.items() if name in accepted}
        result, declined = _switch.counts.attempt(function, **given)
        return result if declined is None else original(*args, **kwargs)

    return serve
