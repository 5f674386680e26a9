"""flash-linear-attention's operators, computed by Wyvern where it can.

    import wyvern.fla
    wyvern.fla.enable()
    ...                         # models and layers of flash-linear-attention, as they are
    print(wyvern.fla.report())  # what was served, and what was not and why

Needs flash-linear-attention (fla-core) 0.6 or later. ``chunk_gated_delta_rule`` and ``chunk_kda`` are reached
through its backends, where Wyvern's is "wyvern" (switched off by FLA_WYVERN=0); the other functions have no
backends and are replaced by name in all modules that are imported. So are the short convolution and the
norms of the library's layers, which PyTorch computes where their tensors are on the CPU: layers run there as
they are.

Calls with the library's ``cp_context`` are served too, forwards and backwards by Wyvern's exchange. Whether a call
is declined then depends on nothing that may differ between ranks and shows before they exchange; an error
afterwards is a ``wyvern.distributed.ContextError``, and no rank falls back.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

from . import _fla_context, _fla_modules, ops
from ._serving import Enabled, Pairs, Report, Switch, declined_on_cpu, on_cpu, replacement

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


def enable() -> Enabled:
    """Serves flash-linear-attention's operators from now on, for all threads of the process.

    Modules that imported the functions before have them replaced too. As a context manager it disables at
    the end what it enabled::

        with wyvern.fla.enable():
            loss = model(tokens).loss

    Raises:
        ImportError: flash-linear-attention 0.6 or later is not installed.
    """
    return _switch.enable()


def disable() -> None:
    """Gives flash-linear-attention its own functions back, in every module; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls are served: enabled, and not switched off by FLA_WYVERN=0."""
    return _switch.is_enabled() and os.environ.get(_SWITCH, "1") != "0"


def report(reset: bool = False) -> Report:
    """Counts of served calls by function, and of declined ones by function and reason.

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
        others = _fla_modules.pairs(is_enabled) + _fla_context.pairs()
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


_switch = Switch(_find)


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
