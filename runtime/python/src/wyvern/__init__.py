"""Wyvern: JIT kernels and an autotuner for the chunked delta rule.

    import wyvern
    o, state = wyvern.ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

``wyvern.ops`` has the operators for PyTorch, under the names that flash-linear-attention gives them;
``layers`` has them with the short convolution in front and the gated norm behind.
``policy`` says where their plans come from and when they are tuned (``wait_for_tuning`` waits for that),
``tune`` finds faster ones, ``prepared`` tells which are in use and ``cache`` looks after what is stored.
``plan_digest`` and ``distributed`` see to it that the ranks of a job have the same.
``fla``, ``transformers``, ``megatron``, ``vllm``, ``sglang`` and ``flashinfer`` have those libraries compute with
them;
``stages`` has parts of a forward pass.
Nothing here imports PyTorch before it is used. The distribution is ``wyvern-kernels``: ``wyvern`` on PyPI is
another project's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

DISTRIBUTION = "wyvern-kernels"  # by which _files.py knows this file from that of another package

from ._extension import prepared, version
from ._policy import policy, wait_for_tuning

if TYPE_CHECKING:
    from . import cache, distributed, fla, flashinfer, layers, megatron, ops, stages, transformers
    from .distributed import plan_digest
    from .tuning import tune

__all__ = [
    "__version__",
    "cache",
    "distributed",
    "fla",
    "flashinfer",
    "layers",
    "megatron",
    "ops",
    "plan_digest",
    "policy",
    "prepared",
    "sglang",
    "stages",
    "transformers",
    "tune",
    "vllm",
    "wait_for_tuning",
]

_MODULES = (
    "cache", "distributed", "fla", "flashinfer", "layers", "megatron", "ops", "sglang", "stages", "transformers",
    "vllm",
)  # fmt: skip
_FUNCTIONS = {"tune": "tuning", "plan_digest": "distributed"}  # by the module that has them


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f".{_FUNCTIONS[name]}", __name__), name)
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'wyvern' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
