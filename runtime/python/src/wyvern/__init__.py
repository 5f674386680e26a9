"""Wyvern: JIT kernels and an autotuner for the chunked delta rule.

    import wyvern
    o, state = wyvern.ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

``wyvern.ops`` has the operators for PyTorch, under the names that flash-linear-attention gives them.
``policy`` says where their plans come from and when they are tuned (``wait_for_tuning`` waits for that),
``tune`` finds faster ones, ``prepared`` tells which are in use and ``cache`` looks after what is stored.
``fla`` and ``transformers`` have those libraries compute with them; ``stages`` has parts of a forward pass.
Nothing here imports PyTorch before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._extension import prepared, version
from ._policy import policy, wait_for_tuning

if TYPE_CHECKING:
    from . import cache, fla, ops, stages, transformers
    from .tuning import tune

__all__ = [
    "__version__",
    "cache",
    "fla",
    "ops",
    "policy",
    "prepared",
    "stages",
    "transformers",
    "tune",
    "wait_for_tuning",
]

_MODULES = ("cache", "fla", "ops", "stages", "transformers")


def __getattr__(name: str):
    if name in _MODULES:
        return _imported(name)
    if name == "tune":
        return _imported("tuning").tune
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'wyvern' has no attribute '{name}'")


def _imported(name: str):
    try:
        return importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"wyvern.{name} needs PyTorch 2.10 or later: pip install torch") from None


def __dir__() -> list[str]:
    return sorted(__all__)
