"""Calls of another library that Wyvern serves where it can; what it served and declined is counted."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _report
from ._report import Report as Report
from .distributed._context import around
from .distributed._exchange import ContextError

# What an operator raises before anything ran. A device that failed or has no memory left is not among
# them: the library's own kernels would fail there too, and say less.
DECLINED = (TypeError, ValueError, RuntimeError)
_FAILED = (torch.OutOfMemoryError, torch.AcceleratorError, ContextError)


class Counts(_report.Counts):
    """The same, and calls that are tried."""

    def attempt(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, Exception | None]:
        """What function makes of a call and None, or None and the error with which it declines.

        Inside of ``wyvern.distributed.context_parallel()`` the error is raised: the library's own function
        would take a rank's tokens for whole sequences. So is, as a ContextError, one of a call with a
        ``cp_context`` after ranks began to exchange: none may fall back alone.
        """
        try:
            result = function(*args, **kwargs)
        except _FAILED:
            raise
        except DECLINED as error:
            if getattr(error, "while_exchanging", False):
                raise ContextError(str(error)) from error
            self.declined(function.__name__, str(error))
            if around() is not None:
                raise
            return None, error
        self.served(function.__name__)
        return result, None

    def fall_back(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the library's own function makes of a call; the calls that it makes are not tried again."""
        self.falls_back = True
        try:
            return original(*args, **kwargs)
        finally:
            self.falls_back = False


def on_cpu(*args: Any, **kwargs: Any) -> bool:
    """Whether a tensor of a call is on the CPU."""
    return any(isinstance(x, torch.Tensor) and x.is_cpu for x in (*args, *kwargs.values()))


def declined_on_cpu(error: Exception) -> Exception:
    """The error with which Wyvern declined, where the library itself computes on GPUs only."""
    return type(error)(f"Wyvern declines this call, and the library itself computes on GPUs only: {error}")


def _failed_too(error: Exception, declined: Exception, cpu: bool) -> tuple[Exception, Exception]:
    """What to raise where the library's own function fails after Wyvern declined, and its cause.

    On CPU tensors the error with which Wyvern declined: what Triton says of such tensors helps nobody.
    Elsewhere the library's, with a note.
    """
    if cpu:
        return declined_on_cpu(declined), error
    if sys.version_info >= (3, 11):
        error.add_note(f"Wyvern had declined this call: {declined}")
        return error, error.__cause__ or declined
    return error, declined


def replacement(
    original: Callable[..., Any],
    function: Callable[..., Any],
    counts: Counts,
    is_on: Callable[[], bool],
    may_decline: Callable[[], str | None] = lambda: None,
) -> Callable[..., Any]:
    """original, with its name and signature, whose calls function serves where it can.

    may_decline: None, or why no other function may compute; then a call that is declined is an error.

    It is not traced by torch.compile: whether a call is served shows when it is made.
    """

    @torch.compiler.disable
    @functools.wraps(original)
    def serve(*args: Any, **kwargs: Any) -> Any:
        if is_on() and not counts.falls_back:
            result, declined = counts.attempt(function, *args, **kwargs)
            if declined is None:
                return result
            if (why := may_decline()) is not None:
                raise type(declined)(
                    f"Wyvern declines this call of {function.__name__}, and {why}: {declined}"
                )
            try:
                return counts.fall_back(original, *args, **kwargs)
            except Exception as error:
                raised, cause = _failed_too(error, declined, on_cpu(*args, **kwargs))
                raise raised from cause
        return original(*args, **kwargs)

    return serve


def serving_layer(
    original: Callable[..., Any],
    function: Callable[..., Any],
    is_on: Callable[[], bool],
) -> Callable[..., Any]:
    """original, a layer's ``forward`` or another method of it, which function computes as a whole where it can.

    function: with original's parameters; its result, or None where it computes no such layer or a call in it was
    declined. original computes then, whose calls of operators are served as ever. So it does where it is traced.
    """

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not is_on():
            return original(*args, **kwargs)
        output = function(*args, **kwargs)
        return original(*args, **kwargs) if output is None else output

    return forward


def is_plain(module: object, kind: type, known: Callable[[Any], bool] = lambda hook: False) -> bool:
    """Whether a module is of this class and no other, and calling it runs the forward method of the class alone.

    known: of a hook in front of that method, whether the caller runs it.
    """
    return (
        type(module) is kind
        and isinstance(module, nn.Module)
        and "forward" not in module.__dict__
        and not hasattr(module, "_hf_hook")
        and not (module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)
        and all(known(hook) for hook in module._forward_pre_hooks.values())
    )


def has_own_forward(kind: type, method: str = "forward") -> bool:
    """Whether the ``forward`` of a class, and what wraps it, is of the library that the class is of.

    What another library puts in its place may do more, such as exchange tokens between ranks.
    """
    function: Any = getattr(kind, method)
    while function is not None:
        name = getattr(function, "__globals__", {}).get("__name__", "")
        if name.split(".")[0] != kind.__module__.split(".")[0]:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def exchange(pairs: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Puts the second of each pair wherever a global of an imported module is the first."""
    other = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict):
            continue
        for name, value in list(names.items()):
            new = other.get(id(value))
            if new is not None:
                names[name] = new


Pairs = list[tuple[Callable[..., Any], Callable[..., Any]]]


class Layer(NamedTuple):
    """A class of layers, its ``forward`` or another method, and what stands in its place."""

    kind: type
    original: Callable[..., Any]
    serving: Callable[..., Any]
    method: str = "forward"


class Enabled:
    """What enable() gives: nothing to hold on to, or a context manager that disables at its end."""

    def __init__(self, switch: Switch, first: bool, first_layers: bool) -> None:
        self._switch = switch
        self._first = first
        self._first_layers = first_layers

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._first:
            self._switch.disable()
        elif self._first_layers:
            self._switch.disable_layers()


class Switch:
    """Whether calls of a library are served. Safe for threads.

    pairs: the library's functions and what stands in their places while enabled; found by find at the
    first enable(), None before; more of them by add(). engine: the library's name, where it runs in several
    processes that share their counts. find_layers: the library's layers, found by enable(layers=True).
    """

    def __init__(
        self,
        find: Callable[[], Pairs],
        engine: str | None = None,
        find_layers: Callable[[], list[Layer]] = list,
    ) -> None:
        self.counts = Counts(engine)
        self.pairs: Pairs | None = None
        self._find = find
        self._find_layers = find_layers
        self._layers: list[Layer] = []  # those that are served as a whole
        self._lock = threading.RLock()  # find may add
        self._enabled = False

    def enable(self, layers: bool = False) -> Enabled:
        """Raises what find and find_layers raise, and leaves everything as it was then."""
        with self._lock:
            first = not self._enabled
            found_layers = self._find_layers() if layers and not self._layers else []
            if first:
                if self.pairs is None:
                    self.pairs = []
                    try:
                        found = self._find()
                    except BaseException:
                        self.pairs = None
                        raise
                    self.pairs += found
                exchange(self.pairs)
                self.counts.share()
                self._enabled = True
            for layer in found_layers:
                setattr(layer.kind, layer.method, layer.serving)
            self._layers += found_layers
        return Enabled(self, first, bool(found_layers))

    def add(self, pairs: Pairs) -> None:
        """Further functions, of modules that were imported meanwhile."""
        with self._lock:
            if self.pairs is not None:
                self.pairs += pairs
            if self._enabled:
                exchange(pairs)

    def disable(self) -> None:
        with self._lock:
            if self._enabled:
                exchange([(new, old) for old, new in self.pairs or []])
                self.disable_layers()
                self._enabled = False

    def disable_layers(self) -> None:
        """Gives layers their own methods back."""
        with self._lock:
            for layer in self._layers:
                setattr(layer.kind, layer.method, layer.original)
            self._layers = []

    def is_enabled(self) -> bool:
        return self._enabled
