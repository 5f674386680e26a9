"""Operators whose sequences lie on two, three and four processes over gloo, beside the float64 recurrence."""

from __future__ import annotations

import pytest
import torch
from context_ranks import Case, Ranks, check, compute, shard

OPERATORS = ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "chunk_gated_delta_product")
LAYOUTS = {
    "even": {"P": 3, "tokens": [16, 16, 16]},
    "uneven, B = 2": {"P": 3, "tokens": [37, 3, 20], "B": 2},
    "empty ranks": {"P": 4, "tokens": [0, 20, 0, 21]},
    "two ranks": {"P": 2, "tokens": [20, 23], "B": 2},
    "pack across borders": {"P": 3, "tokens": [16, 16, 16], "lengths": [7, 2, 29, 10]},
    "pack, border on a boundary": {"P": 4, "tokens": [10, 10, 10, 13], "lengths": [10, 10, 13, 10]},
    "pack, empty sequences": {"P": 3, "tokens": [20, 7, 16], "lengths": [0, 15, 0, 28, 0]},
    "pack, empty ranks": {"P": 4, "tokens": [12, 0, 0, 23], "lengths": [12, 23]},
    "pack, empty rank inside": {"P": 3, "tokens": [12, 0, 23], "lengths": [5, 30]},
    "zigzag": {"P": 2, "tokens": [21, 20], "B": 2, "layout": "zigzag"},
    "zigzag, four ranks": {"P": 4, "tokens": [9, 2, 8, 7], "layout": "zigzag"},
    "zigzag pack": {"P": 3, "tokens": [14, 13, 15], "lengths": [13, 25, 0, 4], "layout": "zigzag"},
}


@pytest.fixture(scope="module")
def ranks():
    processes = Ranks(4)
    yield processes
    processes.close()


def run(ranks: Ranks, case: Case) -> list[dict]:
    return ranks(case.P, compute, [shard(case, rank) for rank in range(case.P)])


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: Ranks, layout: str, op: str) -> None:
    case = Case(op, steps=2 if "product" in op else 1, **LAYOUTS[layout])
    check(case, run(ranks, case))
