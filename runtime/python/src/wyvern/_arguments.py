"""Checks of arguments, each with an error that names the argument."""

from __future__ import annotations

import operator

import torch
from torch import Tensor


def tensor(name: str, x: object) -> Tensor:
    """x, which must be a dense tensor."""
    if not isinstance(x, Tensor):
        is_what = "None" if x is None else type(x).__name__
        raise TypeError(f"{name} is {is_what}; it must be a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {x.layout}; it must be torch.strided")
    return x


def floating(name: str, x: Tensor) -> Tensor:
    """x, which must hold real numbers: what others are turned into would be a guess, or lose a half."""
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} is {x.dtype}; it must be of a floating-point dtype")
    return x


def integer(name: str, value: object) -> int:
    """value, which must be a whole number, not text or a fraction that would be cut."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}; it must be an integer") from None


def real(name: str, value: object) -> float:
    """value, which must be a number, not text that spells one."""
    if type(value) is float:
        return value
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {type(value).__name__}; it must be a number") from None
