"""Four processes over gloo, some with plans of their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wyvern
from conftest import make
from context_ranks import Ranks

from wyvern import ops

Start = Callable[[int], Ranks]


@pytest.fixture
def start() -> Iterator[Start]:
    """So many ranks that have called nothing: what a process has prepared is a part of these tests."""
    started: list[Ranks] = []

    def ranks(count: int) -> Ranks:
        started.append(Ranks(count))
        return started[-1]

    yield ranks
    for one in started:
        one.close()


def call_of() -> Any:
    torch.manual_seed(0)
    return make(ops.chunk_delta_rule, T=70, dtype=torch.float32)


def everybodys(x: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, x)
    return gathered


def use_another_plan() -> None:
    from wyvern._extension import extension

    (one,) = wyvern.prepared()
    plan = json.dumps(one["plan"])
    own = re.search(r"BT=\d+", plan)[0]
    other = plan.replace(own, "BT=64" if own == "BT=32" else "BT=32")
    extension().wyvern_extension_use_plan(one["problem"].encode(), other.encode())
    extension().wyvern_extension_forget()


@torch.no_grad()
def take_the_plan_of_rank_0(group: Any, rank: int, device: torch.device, given: Any) -> None:
    call = call_of()
    call()
    if rank in (1, 3):
        use_another_plan()
        call()
    digests = everybodys(wyvern.plan_digest())
    assert digests[0] == digests[2] != digests[1] == digests[3], digests
    outputs = everybodys(call()[0].tolist())
    assert outputs[0] != outputs[1]  # another order of sums

    found = wyvern.distributed.agree()
    (one,) = found
    assert one["ranks"] == [1, 3] and one["plan_of"] == 0, one
    assert "1, 3" in str(found).splitlines()[1]
    assert wyvern.prepared() == []
    with wyvern.policy("off"):  # whatever the policy
        outputs = everybodys(call()[0].tolist())
    assert outputs[1:] == outputs[:-1]
    assert [one["origin"] for one in wyvern.prepared()] == ["given"]
    (plan,) = (one["plan"] for one in wyvern.prepared())
    assert plan == one["plan"]
    assert len(set(everybodys(wyvern.plan_digest()))) == 1
    assert wyvern.distributed.agree() == []


def test_ranks_take_the_plan_of_rank_0(start: Start) -> None:
    start(4)(4, take_the_plan_of_rank_0, [None] * 4)


@torch.no_grad()
def take_the_plan_of_the_first(group: Any, rank: int, device: torch.device, given: Any) -> None:
    call = call_of()
    pair = dist.new_group([1, 2])
    if rank == 2:
        call()
        use_another_plan()
        call()
    if rank in (1, 2):
        assert wyvern.distributed.agree(pair) == []  # nobody had another
    call()
    digests = everybodys(wyvern.plan_digest())
    assert digests[0] == digests[3] != digests[1] == digests[2], digests


def test_a_problem_has_the_plan_of_the_first_rank_that_met_it(start: Start) -> None:
    start(4)(4, take_the_plan_of_the_first, [None] * 4)


def test_a_digest_is_of_problems_and_plans(device: str) -> None:
    from wyvern._extension import extension

    extension().wyvern_extension_forget()
    empty = wyvern.plan_digest()
    with torch.no_grad():
        make(ops.chunk_delta_rule, T=70, device=device)()
        one = wyvern.plan_digest()
        assert one != empty
        make(ops.chunk_delta_rule, T=71, device=device)()  # the same key
        assert wyvern.plan_digest() == one
        make(ops.chunk_kda, T=70, device=device)()
    assert wyvern.plan_digest() != one
    assert len(one) == 64


@torch.no_grad()
def tune(group: Any, rank: int, device: torch.device, cache: Path) -> None:
    from wyvern._extension import extension

    os.environ["WYVERN_CACHE_DIR"] = str(cache)
    call = call_of()
    wyvern.tune(call, budget=1)
    call()
    assert [one["origin"] for one in wyvern.prepared()] == ["exact"]
    extension().wyvern_extension_forget()
    with wyvern.policy("fixed"):
        call()
    assert [one["origin"] for one in wyvern.prepared()] == ["default"]


def test_fixed_plans_ignore_what_was_tuned_here(start: Start, tmp_path: Path) -> None:
    """A tuned plan that "cached" takes."""
    start(1)(1, tune, [tmp_path])
    assert (tmp_path / "wyvern.db").exists()


def test_agree_wants_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        wyvern.distributed.agree()
