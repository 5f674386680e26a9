"""The recurrence in float64, token by token, differentiable by PyTorch, and the measure of errors."""

from __future__ import annotations

from torch import Tensor

from wyvern._recurrence import recurrence

__all__ = ["error", "recurrence"]


def error(value: Tensor, wanted: Tensor) -> float:
    """rms(value - wanted) / rms(wanted), the measure of runtime/SPECIFICATION.md."""
    wanted = wanted.detach().double().cpu()
    difference = value.detach().double().cpu() - wanted
    return float(difference.norm() / wanted.norm().clamp_min(1e-30))
