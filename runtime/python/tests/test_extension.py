"""The declarations of torch_abi.hpp against the headers of the PyTorch that is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

EXTENSION = Path(__file__).resolve().parents[1] / "extension"
HEADERS = Path(torch.__file__).parent / "include"
COMPILER = shutil.which("c++") or shutil.which("g++")

SOURCE = """
#define USE_CUDA
#include <torch/csrc/stable/c/shim.h>
#include "torch_abi.hpp"
#include <type_traits>
#define SAME(result, name, parameters) \\
  static_assert(std::is_same_v<decltype(&::name), result(*) parameters>, #name);
WYVERN_TORCH_FUNCTIONS(SAME)
WYVERN_TORCH_CUDA_FUNCTIONS(SAME)
static_assert(std::is_same_v<StableIValue, uint64_t>);
"""


def compiles(source: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "declarations.cpp"
    file.write_text(source)
    return subprocess.run(
        [COMPILER, "-std=c++20", "-fsyntax-only", f"-I{EXTENSION}", f"-I{HEADERS}", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(
    COMPILER is None or not (HEADERS / "torch/csrc/stable/c/shim.h").exists(),
    reason="there is no compiler, or this PyTorch has no headers",
)
def test_declarations_are_those_of_torch(tmp_path: Path) -> None:
    done = compiles(SOURCE, tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = SOURCE + "static_assert(std::is_same_v<decltype(&::torch_delete_list), int(*)(int)>);"
    assert compiles(wrong, tmp_path).returncode != 0


def test_one_build_is_for_this_torch() -> None:
    """Every function is there, and the operators are registered once however often they are loaded."""
    from wyvern import _call, _extension

    _extension.load.cache_clear()
    _extension.load()
    forward = torch.ops.wyvern.forward.default._schema
    assert str(forward).endswith("-> Tensor[]")
    assert [argument.name for argument in forward.arguments] == ["problem", *_call.INPUTS]
    schema = torch.ops.wyvern.update.default._schema
    written = [
        "state", "checkpoints", "intermediate_states", "o", "final_state", "final_conv_state", "conv_state",
        "intermediate_conv_states", "o_scale",
    ]  # fmt: skip
    assert schema.is_mutable and [x.name for x in schema.arguments if x.is_write] == written
