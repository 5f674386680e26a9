"""Wyvern: JIT kernels and an autotuner for the chunked delta rule.

    import wyvern
    o, state = wyvern.ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

``wyvern.ops`` has the operators for PyTorch, under the names that flash-linear-attention gives them.
``policy`` says where their plans come from, ``tune`` finds faster ones and ``cache`` looks after what
is stored. Nothing here imports PyTorch before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._policy import policy

if TYPE_CHECKING:
    from . import cache, ops
    from .tuning import tune

__all__ = ["__version__", "cache", "ops", "policy", "tune"]

_MODULES = ("cache", "ops")


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "tune":
        from .tuning import tune

        return tune
    if name == "__version__":
        from ._extension import version

        return version()
    raise AttributeError(f"module 'wyvern' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
