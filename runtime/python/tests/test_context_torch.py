"""Context parallelism beside PyTorch's own: torch.compile, activation checkpointing, meshes; and in the example, FSDP2."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_ranks import (  # noqa: F401 (ranks is a fixture)
    LAYOUTS,
    Case,
    Ranks,
    answer,
    check,
    context_of,
    ranks,
    run,
    same,
    shard,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from wyvern import ops

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))  # in the ranks too, which import this file


def call_of(group: Any, given: dict[str, Any]) -> Any:
    """A rank's call as a function of its tensors alone, and these."""
    case: Case = given["case"]
    names = list(given["tensors"])
    context = context_of(case, group, torch.device("cpu"))

    def call(*leaves: torch.Tensor) -> Any:
        tensors = dict(zip(names, leaves, strict=True))
        o, *others = getattr(ops, case.op)(**tensors, **given["options"], cp_context=context)
        return o * 1, *others

    return call, [x.clone().requires_grad_() for x in given["tensors"].values()]


def gradients_of(given: dict[str, Any], call: Any, leaves: list[torch.Tensor]) -> dict[str, Any]:
    """By backward(), which checkpointing in its older form has alone."""
    for x in leaves:
        x.grad = None
    outputs = call(*leaves)
    torch.autograd.backward(outputs, [x.to(y.dtype) for x, y in zip(given["seeds"], outputs, strict=True)])
    return answer(outputs, {name: x.grad for name, x in zip(given["tensors"], leaves, strict=True)})


COMPILED: dict[str, dict[str, Any]] = {
    "gather": {"op": "chunk_kda", "exchange": "gather", **LAYOUTS["uneven, B = 2"]},
    "heads": {"op": "chunk_gated_delta_rule", "exchange": "heads", "HV": 3, **LAYOUTS["pack across borders"]},
    "zigzag": {"op": "chunk_gdn2", **LAYOUTS["zigzag"]},
    "no maps": {"op": "chunk_kda", **LAYOUTS["zigzag pack, short sequences"]},
    "empty ranks": {"op": "chunk_delta_rule", **LAYOUTS["empty ranks"]},
    "steps": {"op": "chunk_gated_delta_product", "steps": 2, **LAYOUTS["pack across borders"]},
    "a group": {"op": "chunk_kda", "group_alone": True, **LAYOUTS["two ranks"]},
    "bfloat16": {"op": "chunk_kda", "dtype": torch.bfloat16, "P": 2, "tokens": [40, 33]},
    "a layer": {"op": "chunk_kda", "taps": 4, "norm": "sigmoid", **LAYOUTS["pack across borders"]},
    "a layer, zigzag": {"op": "chunk_gated_delta_product", "steps": 2, "taps": 3, "norm": "silu", **LAYOUTS["zigzag"]},
}


def compiled(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    torch._dynamo.reset()
    call, leaves = call_of(group, given)
    traced = torch.compile(call, fullgraph=True, backend=given["backend"])
    return gradients_of(given, traced, leaves)


@pytest.mark.parametrize("what", COMPILED)
def test_compiled(ranks: Ranks, what: str) -> None:
    """In one graph, with the bits of the same calls in eager mode."""
    case = Case(**COMPILED[what])
    backend = "inductor" if what in ("gather", "heads") else "aot_eager"
    answers = ranks(case.P, compiled, [shard(case, rank) | {"backend": backend} for rank in range(case.P)])
    check(case, answers)
    for answer, eager in zip(answers, run(ranks, case), strict=True):
        assert same(answer, eager)


def compiled_once(group: Any, rank: int, device: torch.device, given: list[dict[str, Any]]) -> list[Any]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
        return ops.chunk_kda(**tensors, **options, cp_context=group)

    traced = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    found = []
    for one in given:
        tensors = {name: x.clone().requires_grad_() for name, x in one["tensors"].items()}
        o, state = traced(tensors, one["options"])
        gradients = torch.autograd.grad((o, state), list(tensors.values()), one["seeds"])
        named = dict(zip(tensors, gradients, strict=True))
        found.append({"o": o.detach(), "state": state.detach(), "gradients": named})
    return [counter.frame_count, *found]


def test_compiled_once_for_all_lengths(ranks: Ranks) -> None:
    cases = [Case("chunk_kda", 3, tokens=tokens, group_alone=True) for tokens in ([20, 17, 9], [30, 12, 25])]
    given = [[shard(case, rank) for case in cases] for rank in range(3)]
    answers = ranks(3, compiled_once, given)
    assert [answer[0] for answer in answers] == [1, 1, 1]
    for i, case in enumerate(cases):
        check(case, [answer[1 + i] for answer in answers])


def checkpointed(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    call, leaves = call_of(group, given)
    return gradients_of(given, lambda *x: checkpoint(call, *x, use_reentrant=given["reentrant"]), leaves)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layout", ["uneven, B = 2", "zigzag pack"])
def test_checkpointed(ranks: Ranks, layout: str, reentrant: bool) -> None:
    """The exchange of the forward pass comes again in the backward pass, and gives the same bits."""
    case = Case("chunk_kda", **LAYOUTS[layout])
    given = [shard(case, rank) | {"reentrant": reentrant} for rank in range(case.P)]
    answers = ranks(case.P, checkpointed, given)
    check(case, answers)
    for answer, plain in zip(answers, run(ranks, case), strict=True):
        assert same(answer, plain)


def by_mesh(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """A dimension of a mesh as the context; the other one has other sequences."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    assert mesh["cp"].get_local_rank() == rank % 2
    names = list(given["tensors"])

    def call(*leaves: torch.Tensor) -> Any:
        tensors = dict(zip(names, leaves, strict=True))
        return ops.chunk_gated_delta_rule(**tensors, **given["options"], cp_context=mesh["cp"])

    leaves = [x.clone().requires_grad_() for x in given["tensors"].values()]
    if given["compiled"]:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    return gradients_of(given, call, leaves)


@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
def test_a_mesh(ranks: Ranks, whole: bool) -> None:
    cases = [Case("chunk_gated_delta_rule", group_alone=True, seed=seed, **LAYOUTS["two ranks"]) for seed in (1, 2)]
    given = [shard(cases[rank // 2], rank % 2) | {"compiled": whole} for rank in range(4)]
    answers = ranks(4, by_mesh, given)
    for i, case in enumerate(cases):
        check(case, answers[2 * i : 2 * i + 2])
        for answer, plain in zip(answers[2 * i : 2 * i + 2], run(ranks, case), strict=True):
            assert same(answer, plain)


def a_mesh_of_two_dimensions(group: Any, rank: int, device: torch.device, given: Any) -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    try:
        ops.chunk_kda(**given["tensors"], cp_context=mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_of_two_dimensions_is_refused(ranks: Ranks) -> None:
    given = shard(Case("chunk_kda", 1, tokens=[5]), 0)
    for message in ranks(4, a_mesh_of_two_dimensions, [given] * 4):
        assert message.startswith("group is a DeviceMesh of 2 dimensions")


def example(group: Any, rank: int, device: torch.device, given: Any) -> Any:
    return importlib.import_module("context_parallel").train(given, device, group)


@pytest.mark.parametrize("P", [2, 4])
def test_the_example(ranks: Ranks, P: int) -> None:
    """FSDP2, activation checkpointing and context parallelism, in float64: the loss and every gradient of the first
    step are those of one process, to rounding."""
    sizes = importlib.import_module("context_parallel").Sizes(
        tokens=16 * P, width=16, head_dim=4, layers=3, steps=3, dtype=torch.float64
    )
    found = ranks(P, example, [sizes] * P)
    assert all(one.losses == found[0].losses for one in found)
    assert found[0].loss_apart < 1e-12 and found[0].gradients_apart < 1e-10
    assert len(found[0].losses) == 3 and all(0 < loss < 2 * math.log(256) for loss in found[0].losses)
    if P == 2:
        module = importlib.import_module("context_parallel")
        for losses in module.compare(sizes, torch.device("cpu"), found[0].losses):
            assert max(losses) - min(losses) < 1e-12  # float64 has no chunks
