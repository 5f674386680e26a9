"""FlashInfer's and vLLM's names for the operators: packages of theirs that stand beside this file.

The packages have only what the tests import: FlashInfer's is wyvern.flashinfer, vLLM's changes names and
layouts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import wyvern
from wyvern._serving import Counts

FOLDER = Path(__file__).resolve().parent / "packages"
counts = Counts()


class Peer:
    WANTS_REFUSALS = True  # a test that passes with a refusal looked for its words
    # Tests of FlashInfer's kernels themselves.
    DIFFERS = {
        "test_decode_kernel_bf16_padding_indices": "wants padding to overwrite slot 0",
        "test_mtp_fp32_state_pool_non_contiguous": "wants slots that are not contiguous",
        "test_gdn_decode_bf16_state_fla_scatter_validation": "wants FlashInfer's checks of arguments",
        "test_gdn_decode_fp16_inputs_are_converted_not_reinterpreted": "wants float16 cut to bfloat16",
        "test_verify_kernel_mtp_reuses_compile_across_cache_modes": "counts compilations of a kernel",
    }

    def __init__(self, device: str) -> None:
        self._device = device

    def around_a_test(self) -> AbstractContextManager[None]:
        return on_the_cpu() if self._device == "cpu" else contextlib.nullcontext()

    def take_counts(self) -> tuple[int, list[str], list[str]]:
        told = counts.report(reset=True)
        reasons = [f"{name}: {why}" for name, whys in told.declined.items() for why in whys]
        return sum(told.served.values()), reasons, []


def start(mode: str, device: str) -> Peer:
    sys.path.insert(0, str(FOLDER))
    return Peer(device)


class Declined(Exception):
    """What the library's function does and no operator of Wyvern: the test cannot be."""


def decline(name: str, why: str) -> None:
    counts.declined(name, why)
    raise Declined(why)


def counted(function: Callable[..., Any], counts: Counts = counts) -> Callable[..., Any]:
    """The function, whose calls and refusals are counted; a refusal goes to the test."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            counts.declined(function.__name__, str(error))
            raise
        counts.served(function.__name__)
        return result

    return call


def served(name: str, *args: Any, **kwargs: Any) -> Any:
    """What wyvern.ops makes of a call, counted."""
    return counted(getattr(wyvern.ops, name))(*args, **kwargs)


class _CudaIsCpu(TorchFunctionMode):
    """Gives CPU tensors where CUDA's are asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {name: _cpu_for(value) for name, value in (kwargs or {}).items()}
        return func(*map(_cpu_for, args), **kwargs)


def _cpu_for(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Runs tests that are written for CUDA on the CPU."""
    with (
        _CudaIsCpu(),
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
        mock.patch("torch.cuda.manual_seed", lambda *_: None),
        mock.patch("torch.cuda.manual_seed_all", lambda *_: None),
        mock.patch("torch.cuda.empty_cache", lambda: None),
        mock.patch("torch.cuda.mem_get_info", lambda *_: (0, 0)),
    ):
        yield


def missing_from(module: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: what it lacks can be imported, and declines when called."""

    def lacks(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        class Missing:
            def __call__(self, *args: Any, **kwargs: Any) -> None:
                decline(f"{module}.{name}", "no operator of Wyvern")

            __getitem__ = __call__

            def __getattr__(self, part: str) -> Any:
                return missing_from(f"{module}.{name}")(part)

        return Missing()

    return lacks
