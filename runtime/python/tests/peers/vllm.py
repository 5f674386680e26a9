"""vLLM's own functions, through wyvern.vllm.enable(): vLLM, installed or as its sources on the path."""

from __future__ import annotations

import contextlib
import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from .adapters import FOLDER, on_the_cpu

# Where vLLM has its delta rules, and modules that ask its CUDA library for more when they find a GPU.
_FIRST = (
    "vllm.model_executor.layers.quantization.utils.w8a8_utils",
    "vllm.models.kimi_k3.nvidia.kda",
    "vllm.models.glm5next.common.kda",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn",
)


class Peer:
    WANTS_REFUSALS = False
    DIFFERS = {
        "test_flashinfer_gdn_prefill_uses_int64_cu_seqlens": "wants FlashInfer's function to be called",
    }

    def __init__(self, report: Any, device: str) -> None:
        self._report = report
        self._device = device

    def around_a_test(self) -> AbstractContextManager[None]:
        return on_the_cpu() if self._device == "cpu" else contextlib.nullcontext()

    def take_counts(self) -> tuple[int, list[str], list[str]]:
        told = self._report(reset=True)
        reasons = [f"{name}: {why}" for name, whys in told.declined.items() for why in whys]
        return sum(told.served.values()), reasons, []


def start(mode: str, device: str) -> Peer:
    for name in _FIRST:
        importlib.import_module(name)
    if device == "cpu":
        _pass_for_a_gpu()
    sys.path.append(str(FOLDER))  # behind vLLM: a test imports FlashInfer, whose calls vLLM's function makes
    import wyvern.vllm

    wyvern.vllm.enable()
    return Peer(wyvern.vllm.report, device)


def _pass_for_a_gpu() -> None:
    """Has vLLM's platform say that the CPU is a Hopper GPU, for tests that ask it."""
    platform: Any = type(importlib.import_module("vllm.platforms").current_platform)
    platform.device_type = "cpu"
    for name in ("is_cuda", "is_cuda_alike"):
        setattr(platform, name, lambda self: True)
    for name in ("is_cpu", "is_rocm", "is_xpu"):
        setattr(platform, name, lambda self: False)
    platform.is_device_capability = classmethod(lambda cls, asked, **_: asked in (90, (9, 0)))
    platform.has_device_capability = classmethod(lambda cls, *_, **__: True)
    platform.current_device = classmethod(lambda cls: 0)
    platform.manual_seed_all = classmethod(lambda cls, seed: torch.manual_seed(seed))
