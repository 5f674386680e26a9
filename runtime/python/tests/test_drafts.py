"""Drafts to verify: a slot for each token's state, states of each token in a buffer, trees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call, make
from reference import error, recurrence
from wyvern import ops

FUNCTIONS = [ops.fused_recurrent_delta_rule, ops.fused_recurrent_gated_delta_rule, ops.fused_recurrent_kda]
N, T, SLOTS = 4, 5, 24
ACCEPTED = [1, 3, 0, 6]  # the last two are none
PARENTS = [
    [-1, 0, 0, 1, 2],
    [-1, -1, 0, 3, 3],  # its fourth token is null, and so is the last one, which goes on from it
    [-1, 0, 1, 2, 3],
    [-1, -1, 1, -2, 0],
]
ROWS = [2, 0, 5, 1]  # the third is none


def batch(function: Callable[..., Any], device: str, dtype: torch.dtype = torch.float32) -> Call:
    """Without states."""
    call = make(function, dtype, device, T=T, B=N, states=False)
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    call.options.pop("output_final_state", None)
    return call


def pool_like(call: Call, v_first: bool) -> torch.Tensor:
    q, v = call.tensors["q"], call.tensors["v"]
    sides = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    pool = torch.randn(SLOTS, v.shape[2], *sides, generator=torch.Generator().manual_seed(5))
    return pool.to(q.device)


def along(call: Call, n: int, path: list[int], start: torch.Tensor, v_first: bool) -> Any:
    """The last row of o and the state after so many tokens of sequence n, by the recurrence."""
    rows = {name: x[n : n + 1, path].double().cpu() for name, x in call.tensors.items()}
    o, state = recurrence(**rows, initial_state=start[None].double().cpu(), v_first=v_first)
    return o[0, -1], state[0]


def columns(device: str, dtype: torch.dtype) -> torch.Tensor:
    """A slot for each token; one of the first sequence's has none."""
    index = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(6))[: N * T].reshape(N, T)
    index[0, 3], index[1, 4] = -1, SLOTS
    return index.to(device, dtype)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_token_has_a_slot(function: Any, v_first: bool, device: str) -> None:
    call = batch(function, device)
    pool = pool_like(call, v_first)
    before = pool.clone()
    dtype = torch.int64 if v_first else torch.int32
    index = columns(device, dtype)
    o, final = function(
        **call.tensors, state=pool, state_v_first=v_first, state_index=index,
        num_accepted=torch.tensor(ACCEPTED, dtype=dtype, device=device),
    )  # fmt: skip
    assert final is None
    wanted = before.double().cpu()
    for n in range(N):
        if not 1 <= ACCEPTED[n] <= T:
            assert not o[n].any()
            continue
        start = before[index[n, ACCEPTED[n] - 1]]
        for t in range(T):
            row, state = along(call, n, list(range(t + 1)), start, v_first)
            assert error(o[n, t], row) < 1e-5
            if 0 <= (slot := int(index[n, t])) < SLOTS:
                wanted[slot] = state
    assert error(pool, wanted) < 1e-5
    same = (wanted == before.double().cpu()).flatten(1).all(1)
    assert torch.equal(pool.cpu()[same], before.cpu()[same])


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_trees(function: Any, v_first: bool, device: str) -> None:
    """The pool stays as it was; null tokens and sequences have rows of zeros, and write no state."""
    call = batch(function, device)
    pool = pool_like(call, v_first)
    before = pool.clone()
    kept = torch.full((4, T, *pool.shape[1:]), 7.0, device=device)
    o, final = function(
        **call.tensors, state=pool, state_v_first=v_first,
        state_index=torch.tensor([3, 1, 2, 9], dtype=torch.int32, device=device),
        intermediate_states=kept,
        intermediate_index=torch.tensor(ROWS, dtype=torch.int32, device=device),
        parent=torch.tensor(PARENTS, dtype=torch.int32, device=device), disable_state_update=True,
    )  # fmt: skip
    assert final is None and torch.equal(pool, before)
    wanted = torch.full(kept.shape, 7.0, dtype=torch.float64)
    for n, slot in enumerate([3, 1, 2, 9]):
        paths: dict[int, list[int]] = {-1: []}
        for t in range(T):
            parent = PARENTS[n][t]
            if ROWS[n] >= len(kept) or parent >= t or parent not in paths:
                assert not o[n, t].any()
                continue
            paths[t] = [*paths[parent], t]
            row, wanted[ROWS[n], t] = along(call, n, paths[t], before[slot], v_first)
            assert error(o[n, t], row) < 1e-5
    assert error(kept, wanted) < 1e-5
    assert torch.equal(kept.cpu()[wanted == 7.0], torch.full_like(kept.cpu()[wanted == 7.0], 7.0))
    assert torch.equal(kept[3], torch.full_like(kept[3], 7.0))  # nobody's row


@pytest.mark.parametrize("function", FUNCTIONS)
def test_packed(function: Any, device: str) -> None:
    """Columns count within sequences; states of tokens past the buffer's are not written."""
    lengths = [2, 0, 5, 1]
    call = make(function, torch.float32, device, T=sum(lengths), N=len(lengths), states=False)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    ends = torch.tensor([0, *lengths]).cumsum(0).to(device)
    pool = pool_like(call, False)
    index = columns(device, torch.int32)
    accepted = torch.ones(4, dtype=torch.int32, device=device)
    kept = torch.full((4, 3, *pool.shape[1:]), 7.0, device=device)
    single = pool.clone()
    o, _ = function(
        **tensors, cu_seqlens=ends, state=pool, state_index=index, num_accepted=accepted,
        intermediate_states=kept, intermediate_index=torch.arange(4, dtype=torch.int32, device=device),
    )  # fmt: skip
    for n, length in enumerate(lengths):
        for t in range(length):
            rows = {name: x[:, ends[n] : ends[n] + t + 1].double().cpu() for name, x in tensors.items()}
            start = single[index[n, 0]][None].double().cpu()
            row, state = recurrence(**rows, initial_state=start)
            assert error(o[0, ends[n] + t], row[0, -1]) < 1e-5
            if 0 <= (slot := int(index[n, t])) < SLOTS:
                assert error(pool[slot], state[0]) < 1e-5
            if t < 3:
                assert error(kept[n, t], state[0]) < 1e-5
        assert torch.equal(kept[n, length:], torch.full_like(kept[n, length:], 7.0))


def test_wrong_arguments(device: str) -> None:
    call = batch(ops.fused_recurrent_kda, device)
    pool = pool_like(call, False)
    index = columns(device, torch.int32)
    one = index[:, 0].contiguous()
    kept = torch.zeros(4, T, *pool.shape[1:], device=device)
    parent = torch.tensor(PARENTS, dtype=torch.int32, device=device)
    for words, given in (
        ("num_accepted is missing", {"state": pool, "state_index": index}),
        ("num_accepted is given without", {"state": pool, "state_index": one, "num_accepted": one}),
        ("state_index is given without state", {"state_index": index, "num_accepted": one}),
        ("index_columns is 4", {"state": pool, "state_index": index[:, :4], "num_accepted": one}),
        ("intermediate_index is missing", {"state": pool, "intermediate_states": kept}),
        ("intermediate_states is missing", {"state": pool, "intermediate_index": one}),
        ("parent is given without", {"state": pool, "parent": parent}),
        ("disable_state_update is true", {"disable_state_update": True}),
        (
            "parent is true",
            {"state": pool, "intermediate_states": kept, "intermediate_index": one, "parent": parent},
        ),
        (
            "parent has shape",
            {"intermediate_states": kept, "intermediate_index": one, "parent": parent[:, :3]},
        ),
        ("intermediate_states has 4", {"intermediate_states": kept[0], "intermediate_index": one}),
        ("num_accepted has shape", {"state": pool, "state_index": index, "num_accepted": one[:2]}),
    ):
        with pytest.raises(ValueError, match=words):
            ops.fused_recurrent_kda(**call.tensors, **given)
    with pytest.raises(TypeError, match="num_accepted"):
        ops.fused_recurrent_kda(**call.tensors, state=pool, state_index=index, num_accepted=one.long())
    with pytest.raises(TypeError, match="intermediate_states is torch.float64"):
        ops.fused_recurrent_kda(
            **call.tensors, intermediate_states=kept.double(), intermediate_index=one
        )
    with pytest.raises(ValueError, match="overlap"):
        ops.fused_recurrent_kda(
            **call.tensors, state=pool[:4], intermediate_states=pool[: 4 * T].unflatten(0, (4, T)),
            intermediate_index=one,
        )  # fmt: skip
