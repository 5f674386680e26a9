"""Where plans come from: a setting of the whole process."""

from __future__ import annotations

import math
import os
from types import TracebackType

from ._extension import extension

_NUMBERS = {"cached": 0, "off": 1, "on-miss": 2, "background": 3, "fixed": 4}
_VARIABLE = "WYVERN_POLICY"
_BUDGET = 60.0
_GLANCE = 0.1  # seconds between two looks for ^C


def _number(name: str, source: str) -> int:
    if name not in _NUMBERS:
        raise ValueError(f"{source} is {name!r}; it must be one of {', '.join(sorted(_NUMBERS))}")
    return _NUMBERS[name]


class policy:  # noqa: N801 (called as a function)
    """Sets where operators get their plans from, for all threads of the process, from now on.

    * ``"cached"`` (the default): plans that ``wyvern.tune``, ``wyvern tune`` or one of the policies below
      stored, the default plan where nothing is stored.
    * ``"off"``: always the default plan.
    * ``"fixed"``: the plan of a pack (those shipped, and of WYVERN_PACKS), the default plan where no pack
      has one, whatever was tuned on this machine: the ranks of a job have the same plans where they have
      the same packs and devices. ``wyvern.distributed.agree()`` makes sure of it.
    * ``"on-miss"``: a problem that was never tuned is tuned at its first call, which takes about ``budget``
      seconds longer; progress goes to stderr.
    * ``"background"``: the plan of ``"cached"`` at first, and a problem that was never tuned is tuned
      meanwhile, in another process and one after the other; the first call after that is by the tuned
      plan, in every thread. A CUDA graph keeps the plan it was captured with.

    A problem is one operator and pass with its dtypes, options, heads and dimensions, and a power of two
    of tokens and of sequences. It is tuned once at most by a process, also where that fails, which a line
    on stderr says. A tuning in progress is stopped when the process ends, and its measurements are kept. A
    child of ``fork()`` leaves to its parent what that has begun.

    The environment variable WYVERN_POLICY sets the policy of a process that does not. As a context manager
    it is set back at the end, which does not stop what is being tuned::

        with wyvern.policy("off"):
            o, _ = wyvern.ops.chunk_kda(q, k, v, g, beta)

    It is one setting for the process since the backward pass runs in threads of PyTorch's own.
    """

    def __init__(self, name: str, *, budget: float = _BUDGET) -> None:
        number = _number(name, "policy")
        if not 1e-3 <= budget <= 1e6:
            raise ValueError(f"budget is {budget}; it must be from 0.001 to 1000000 seconds")
        self._budget = extension().wyvern_extension_tuning_budget(budget)
        self._before = extension().wyvern_extension_policy(number)

    def __enter__(self) -> policy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        extension().wyvern_extension_policy(self._before)
        extension().wyvern_extension_tuning_budget(self._budget)


def wait_for_tuning(timeout: float | None = None) -> bool:
    """Waits until all that the policy ``"background"`` wanted tuned has been, or ``timeout`` seconds.

    Returns whether nothing is left to tune. ^C ends the wait.
    """
    seconds = math.inf if timeout is None else max(timeout, 0.0)
    while (left := extension().wyvern_extension_wait_for_tuning(min(seconds, _GLANCE))) != 0:
        if left < 0:
            raise RuntimeError("libwyvern cannot be started, so nothing is tuned")
        seconds -= _GLANCE
        if seconds <= 0:
            return False
    return True


def apply_environment() -> None:
    """Sets what WYVERN_POLICY says; ValueError for a name that is none."""
    if name := os.environ.get(_VARIABLE):
        extension().wyvern_extension_policy(_number(name, _VARIABLE))
