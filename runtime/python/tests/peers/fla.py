"""flash-linear-attention's operators by import swap, or through wyvern.fla.enable()."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import wyvern
import wyvern.fla
from wyvern._serving import Counts, exchange

from .adapters import counted

# The own autograd functions of operators and of the convolution; others, of the gates, are no operators.
_OPERATOR = re.compile(r"(Chunk|FusedRecurrent|CausalConv1d)\w*Function")
# References in the library's tests that call operators, backward too; where the library can run those,
# they stay its own.
_REFERENCES = ("fla.ops.gated_delta_product.chunk_ref",)


class Peer:
    WANTS_REFUSALS = False
    # Tests that want a refusal of what Wyvern computes.
    DIFFERS = {
        "test_chunk_invalid_chunk_size": "wants an error for chunk sizes that Wyvern has",
    }

    def __init__(self, report: Callable[..., wyvern.fla.Report], own: list[str]) -> None:
        self._report = report
        self._own = own

    def around_a_test(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def take_counts(self) -> tuple[int, list[str], list[str]]:
        """Since the last time: calls served, a reason for each declined, the library's own that ran."""
        told = self._report(reset=True)
        own = list(self._own)
        self._own.clear()
        reasons = [
            f"{name}: {why}"
            for name, whys in told.declined.items()
            for why, count in whys.items()
            for _ in range(count)
        ]
        return sum(told.served.values()), reasons, own


def start(mode: str, device: str) -> Peer:
    """Puts Wyvern in the place of the library's operators; on the CPU its tests get tensors there."""
    for name in ("fla.layers", "fla.models", *_REFERENCES):  # they hold the functions by name too
        importlib.import_module(name)
    if device == "cpu":
        for name in ("fla.utils", "fla.utils.hardware"):
            module = importlib.import_module(name)
            module.device, module.device_torch_lib = "cpu", torch.cpu
    own = _watch(("fla.modules.causal_conv1d",) if mode == "enable" else ())
    if mode == "enable":
        wyvern.fla.enable()
        return Peer(wyvern.fla.report, own)
    counts = Counts()
    pairs = []
    for name, module in wyvern.fla._MODULES.items():
        original = getattr(importlib.import_module(module), name)
        pairs.append((original, counted(getattr(wyvern.ops, name), counts)))
    kept = {name: dict(vars(sys.modules[name])) for name in _REFERENCES}
    exchange(pairs)
    if device != "cpu" and not _refuses_its_backward():
        for name, names in kept.items():
            vars(sys.modules[name]).update(names)
        own = []  # the references' are meant
    return Peer(counts.report, own)


def _refuses_its_backward() -> bool:
    """Whether the library refuses its gated backward pass here: on Hopper, with Triton 3.4 to 3.7.0.

    That is the first thing that this inner function does, before it looks at the other tensors.
    """
    backward = importlib.import_module("fla.ops.common.chunk_o").chunk_bwd_dqkwg
    try:
        backward(None, None, None, None, None, None, g=torch.zeros(1))
    except RuntimeError:
        return True
    except AttributeError:
        return False
    return False


def _watch(others: tuple[str, ...]) -> list[str]:
    """The names of the library's own operators, one for each time that one runs from now on.

    others: packages beside those of the operators.
    """
    ran: list[str] = []
    packages = tuple(f"{module}." for module in {*wyvern.fla._MODULES.values(), *others})
    for name, module in list(sys.modules.items()):
        if name.startswith(packages):
            _watch_module(module, ran)
    return ran


def _watch_module(module: Any, ran: list[str]) -> None:
    for name, value in list(vars(module).items()):
        if (
            _OPERATOR.fullmatch(name)
            and isinstance(value, type)
            and issubclass(value, torch.autograd.Function)
            and value.__module__ == module.__name__
        ):
            value.forward = staticmethod(_noted(value.forward, f"{module.__name__}.{name}", ran))


def _noted(forward: Callable[..., Any], name: str, ran: list[str]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def note(*args: Any, **kwargs: Any) -> Any:
        ran.append(name)
        return forward(*args, **kwargs)

    return note
