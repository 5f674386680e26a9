"""The cases of test_context_gloo.py in bfloat16 on GPUs over NCCL, of more tokens; skipped without two GPUs.

NCCL_NVLS_ENABLE=0 where NVLink multicast is not to be used; OMP_NUM_THREADS=1 where there are many processors, on
which recurrences of small float64 matrices are slower.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from context_ranks import BOUNDS, OPERATORS, Case, Ranks, check, context_of, oracle, run, same
from reference import error

from wyvern import ops

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs")
SIZES = {"dtype": torch.bfloat16, "H": 2, "HV": 4, "K": 64, "V": 64}


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks(min(GPUS, 4), "nccl")
    yield processes
    processes.close()


def cases() -> dict[str, dict[str, Any]]:
    P = min(GPUS, 4)
    share, rest = divmod(1024 + 37, P)
    even = [share + (rank < rest) for rank in range(P)]
    return {
        "dense": {"P": P, "tokens": even},
        "pack": {"P": P, "tokens": even, "lengths": [100, 0, 900, 61]},
        "zigzag": {"P": P, "tokens": even, "layout": "zigzag"},
        "uneven, two ranks": {"P": 2, "tokens": [700, 361], "B": 2},
        "empty rank": {"P": 2, "tokens": [0, 300]},
    }


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("layout", ["dense", "pack", "zigzag", "uneven, two ranks", "empty rank"])
def test_layouts(ranks: Ranks, layout: str, op: str) -> None:
    case = Case(op, steps=2 if "product" in op else 1, **SIZES, **cases()[layout])
    check(case, run(ranks, case))


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("layout", ["dense", "pack", "zigzag", "empty rank"])
def test_layers(ranks: Ranks, layout: str, op: str) -> None:
    """With a convolution in front and a norm behind."""
    case = Case(op, taps=4, norm="silu", **SIZES, **cases()[layout])
    check(case, run(ranks, case))


def test_exchanges_have_the_same_bits(ranks: Ranks) -> None:
    for layout in ("dense", "zigzag"):
        found = [
            run(ranks, Case("chunk_kda", exchange=exchange, **SIZES | {"HV": 2 * min(GPUS, 4)}, **cases()[layout]))
            for exchange in ("gather", "heads", "heads")
        ]
        for answers in zip(*found, strict=True):
            assert same(answers[0], answers[1]) and same(answers[1], answers[2])


def captured(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> list[torch.Tensor]:
    """A forward pass in a CUDA graph, replayed, beside one that was not captured."""
    with torch.no_grad():
        tensors = {name: x.to(device) for name, x in given["tensors"].items()}
        call = functools.partial(getattr(ops, given["case"].op), **tensors, **given["options"], cp_context=group)
        wanted = call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, state = call()
        o.fill_(float("nan"))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
    return [x.cpu() for x in (*wanted, o, state)]


def test_a_graph(ranks: Ranks) -> None:
    case = Case("chunk_gated_delta_rule", group_alone=True, **SIZES, **cases()["dense"])
    for o, state, replayed, state_replayed in run(ranks, case, captured):
        assert torch.equal(replayed, o) and torch.equal(state_replayed, state)


def captured_step(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> list[list[torch.Tensor]]:
    """A forward and a backward pass in one CUDA graph, replayed with other values, beside eager ones."""
    case: Case = given["case"]
    leaves = {name: x.to(device).requires_grad_() for name, x in given["tensors"].items()}
    seeds = [x.to(device) for x in given["seeds"]]
    seeds[0] = seeds[0].to(case.dtype)
    context = context_of(case, group, device)

    def step() -> list[torch.Tensor]:
        o, state = getattr(ops, case.op)(**leaves, **given["options"], cp_context=context)
        return [o.detach(), state.detach(), *torch.autograd.grad((o, state), list(leaves.values()), seeds)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for name in ("q", "k", "v"):
            leaves[name].mul_(0.75)
    wanted = step()
    for x in found:
        x.fill_(float("nan"))
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return [[x.cpu() for x in found], [x.cpu() for x in wanted]]


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("layout", ["dense", "pack", "zigzag"])
def test_a_training_step_in_a_graph(ranks: Ranks, layout: str, op: str) -> None:
    """Capture raises where a call waits for the device or takes pinned memory."""
    for found, wanted in run(ranks, Case(op, **SIZES, **cases()[layout]), captured_step):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("exchange", ["gather", "heads"])
def test_compiled(ranks: Ranks, exchange: str) -> None:
    """By Inductor, in one graph, with the bits of eager mode."""
    case = Case("chunk_kda", exchange=exchange, **SIZES | {"HV": 2 * min(GPUS, 4)}, **cases()["pack"])
    for whole, eager in zip(run(ranks, case, compiled_by_inductor), run(ranks, case), strict=True):
        assert same(whole, eager)


def compiled_by_inductor(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    case: Case = given["case"]
    torch._dynamo.reset()
    context = context_of(case, group, device)

    def call(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(ops, case.op)(**tensors, **given["options"], cp_context=context)

    leaves = {name: x.to(device).requires_grad_() for name, x in given["tensors"].items()}
    o, state = torch.compile(call, fullgraph=True)(leaves)
    seeds = [x.to(device, y.dtype) for x, y in zip(given["seeds"], (o, state), strict=True)]
    gradients = torch.autograd.grad((o, state), list(leaves.values()), seeds)
    return {
        "o": o.detach().cpu(),
        "state": state.detach().cpu(),
        "gradients": {name: x.cpu() for name, x in zip(leaves, gradients, strict=True)},
    }


def declined(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> torch.Tensor:
    """A call of flash-linear-attention that Wyvern declines for an option it does not know."""
    import fla.ops.cp
    import fla.ops.gated_delta_rule
    import wyvern.fla

    case: Case = given["case"]
    tensors = {name: x.to(device) for name, x in given["tensors"].items()}
    with wyvern.fla.enable(), torch.no_grad():
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0).to(device)
        context = fla.ops.cp.build_cp_context(cu_seqlens, group)
        o, _ = fla.ops.gated_delta_rule.chunk_gated_delta_rule(**tensors, colour=1, cp_context=context)
    counted = wyvern.fla.report(reset=True)
    assert not counted.served and sum(counted.declined["chunk_gated_delta_rule"].values()) == 1
    return o.cpu()


def test_what_all_ranks_decline_goes_to_flash_linear_attention(ranks: Ranks) -> None:
    """Its own exchange follows in all, and gives the whole's o."""
    pytest.importorskip("fla.ops.cp", reason="pip install flash-linear-attention")
    case = Case("chunk_gated_delta_rule", 2, tokens=[128, 128], lengths=[100, 156], states=False, **SIZES)
    o, _, _ = oracle(case)
    assert error(torch.cat(run(ranks, case, declined), 1), o) < BOUNDS[case.dtype][0]
