"""The delta rules of transformers' models, computed by Wyvern where it can.

    import wyvern.transformers
    wyvern.transformers.enable()
    model.generate(...)                  # Qwen3-Next, Qwen3.5, Kimi Linear, OLMo hybrid, ...
    print(wyvern.transformers.report())  # what was served, and what was not and why

Ling 3 (Bailing hybrid), GLM-5.3-Flash and Qwen4-Exp have the same functions and are served too. Needs
transformers with one of these models; one whose module is missing is left out. Their modules' functions are
replaced, so models that exist are served too. What Wyvern declines goes to the model's own function, which
calls flash-linear-attention where that is installed, else PyTorch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ._torch import torch

from . import ops
from ._serving import Enabled, Pairs, Report, Switch

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


def enable() -> Enabled:
    """Serves the models' delta rules from now on, for all threads of the process.

    As a context manager it disables at the end what it enabled::

        with wyvern.transformers.enable():
            tokens = model.generate(prompt)

    Raises:
        ImportError: transformers is not installed, or none of the models is in it.
    """
    return _switch.enable()


def disable() -> None:
    """Gives the models their own functions back; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served."""
    return _switch.is_enabled()


def report(reset: bool = False) -> Report:
    """Counts of served calls by function of wyvern.ops, of declined ones by function and reason, and of calls
    that were traced, so that the model's own function computes.

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


_switch = Switch(_find)

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
