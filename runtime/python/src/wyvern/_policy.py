"""Where plans come from: a setting of the whole process."""

from __future__ import annotations

import os
from types import TracebackType

_NUMBERS = {"cached": 0, "off": 1}
_VARIABLE = "WYVERN_POLICY"


def _number(name: str, source: str) -> int:
    if name not in _NUMBERS:
        raise ValueError(f"{source} is {name!r}; it must be one of {', '.join(sorted(_NUMBERS))}")
    return _NUMBERS[name]


class policy:  # noqa: N801 (called as a function)
    """Sets where operators get their plans from, for all threads of the process, from now on.

    ``"cached"`` (the default): plans that ``wyvern.tune`` or ``wyvern tune`` stored, the default plan
    where nothing is stored. ``"off"``: always the default plan. The environment variable WYVERN_POLICY
    sets it for a process that does not. As a context manager it is set back at the end::

        with wyvern.policy("off"):
            o, _ = wyvern.ops.chunk_kda(q, k, v, g, beta)

    It is one setting for the process since the backward pass runs in threads of PyTorch's own.
    """

    def __init__(self, name: str) -> None:
        from ._extension import extension

        self._before = extension().wyvern_extension_policy(_number(name, "policy"))

    def __enter__(self) -> policy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from ._extension import extension

        extension().wyvern_extension_policy(self._before)


def apply_environment() -> None:
    """Sets what WYVERN_POLICY says; ValueError for a name that is none."""
    if name := os.environ.get(_VARIABLE):
        from ._extension import extension

        extension().wyvern_extension_policy(_number(name, _VARIABLE))
