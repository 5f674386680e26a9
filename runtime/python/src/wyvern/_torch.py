"""PyTorch, or a sentence that says what to install. Modules that need it import it from here first."""

from __future__ import annotations

from . import _files  # noqa: F401 (another package in this one's place is told of first)

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "wyvern's operators need PyTorch 2.10 or later, which is not installed: pip install 'torch>=2.10'"
    ) from None

__all__ = ["torch"]
