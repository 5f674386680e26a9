"""The cases of test_context_gloo.py in bfloat16 on GPUs over NCCL, of more tokens; skipped without two GPUs.

NCCL_NVLS_ENABLE=0 where NVLink multicast is not to be used.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from context_ranks import OPERATORS, Case, Ranks, check, run, same

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
