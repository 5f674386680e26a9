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


# Tokens that each step of a sequence has, and how many of them are accepted: 14 in all.
STEPS = [
    [(4, 2), (2, 2), (5, 5)],
    [(5, 1), (0, 0), (3, 1)],
    [(0, 0), (5, 4), (4, 3)],
    [(5, 5), (1, 1), (2, 1)],
    [(3, 3), (5, 2), (5, 3)],
    [(4, 3), (5, 5), (1, 1)],
]


def windows_like(rows: torch.Tensor, slots: int, columns: int, layout: str) -> torch.Tensor:
    """A pool [slots, C, columns] of NaN, in a layout, for rows of C channels."""
    C = rows.shape[1]
    if layout == "tokens first":
        return rows.new_full([slots, columns, C], float("nan")).mT
    return rows.new_full([slots, C * columns + 64], float("nan"))[:, 64:].unflatten(1, (C, columns))


@pytest.mark.parametrize("kept", ["slots", "buffer"])
@pytest.mark.parametrize("layout", ["tokens first", "channels first"])
@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_convolved_drafts_go_on(
    function: Any, dtype: torch.dtype, W: int, layout: str, kept: str, device: str
) -> None:
    """Behind what is accepted of each step, others' rows being noise, with the bits of running through."""
    M, count, end = 5, 3, 14
    call = make(function, dtype, device, T=end, B=count, states=False)
    x = {name: part.detach() for name, part in call.tensors.items()}
    C = 2 * x["q"][0, 0].numel() + x["v"][0, 0].numel()
    weights = {"conv_weight": torch.randn(C, W, device=device) / 8, "conv_bias": torch.randn(C, device=device) / 8}
    states = torch.randn(count, *x["v"].shape[2:3], x["q"].shape[3], x["v"].shape[3], device=device)
    first = torch.randn(count, C, W - 1, device=device).to(dtype)
    wanted, after, last = function(
        **x, **weights, initial_state=states, initial_conv_state=first, output_final_state=True, output_conv_state=True
    )
    index = torch.randperm(count * M + 1, generator=torch.Generator().manual_seed(8))[: count * M].reshape(count, M)
    index = index.to(device, torch.int32)
    slots = index[:, 0].long()
    pool = states.new_full([count * M + 1, *states.shape[1:]], float("nan"))
    rows = windows_like(first, len(pool), W - 2 + M + (3 if W == 3 else 0), layout)
    pool[slots], rows[slots, :, : W - 1] = states, first
    buffer = pool[: count * M].unflatten(0, (count, M)).clone().fill_(float("nan"))
    windows = windows_like(first, count * M, W - 1, layout)
    windows = windows.contiguous() if layout == "channels first" else windows
    windows = windows.unflatten(0, (count, M))
    begin, accepted = [0] * count, [1] * count
    for step in STEPS:
        parts = []
        for n, (tokens, good) in enumerate(step):
            part = {name: given[n, begin[n] : begin[n] + good] for name, given in x.items()}
            noise = {name: given[n, : tokens - good].flip(0) for name, given in x.items()}
            parts.append({name: torch.cat([part[name], noise[name]]) for name in x})
        ends = torch.tensor([0, *(tokens for tokens, _ in step)], device=device).cumsum(0)
        drafts: dict[str, Any] = {
            "state_index": index, "num_accepted": torch.tensor(accepted, dtype=torch.int32, device=device),
        }  # fmt: skip
        before = [pool.clone(), rows.clone()]
        if kept == "buffer":
            drafts = {
                "state_index": index[:, 0].contiguous(), "intermediate_states": buffer, "disable_state_update": True,
                "intermediate_conv_states": windows,
                "intermediate_index": torch.arange(count, dtype=torch.int32, device=device),
            }  # fmt: skip
        o, none = function(
            **{name: torch.cat([part[name] for part in parts])[None] for name in x}, **weights, cu_seqlens=ends,
            state=pool, conv_state=rows, **drafts,
        )  # fmt: skip
        assert none is None
        if kept == "buffer":
            for x_before, x_after in zip(before, (pool, rows), strict=True):
                assert torch.equal(x_before.nan_to_num(9e4), x_after.nan_to_num(9e4))
        for n, (tokens, good) in enumerate(step):
            assert torch.equal(o[0, ends[n] : ends[n] + good], wanted[n, begin[n] : begin[n] + good])
            begin[n] += good
            if tokens and kept == "buffer":
                assert windows[n, tokens:].isnan().all() and not windows[n, :tokens].isnan().any()
                pool[slots[n]], rows[slots[n], :, : W - 1] = buffer[n, good - 1], windows[n, good - 1]
                windows[n] = float("nan")
            elif tokens:
                accepted[n] = good
    assert begin == [end] * count
    for n, column in enumerate(accepted):
        assert torch.equal(pool[index[n, column - 1]], after[n])
        assert torch.equal(rows[index[n, 0], :, column - 1 : column + W - 2], last[n])
    others = [slot for slot in range(len(pool)) if slot not in slots.tolist()]
    assert rows[others].isnan().all() and rows[:, :, W - 2 + M :].isnan().all()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_convolved_trees(function: Any, dtype: torch.dtype, pooled: bool, device: str) -> None:
    """Each token has the bits of the path to it, and so has the window behind it."""
    call = batch(function, device, dtype)
    C = 2 * call.tensors["q"][0, 0].numel() + call.tensors["v"][0, 0].numel()
    weights = {"conv_weight": torch.randn(C, 4, device=device) / 8}
    states, first = pool_like(call, False)[:N], torch.randn(N, C, 3, device=device).to(dtype)
    kept = torch.full((4, T, *states.shape[1:]), 7.0, device=device)
    windows = torch.full((4, T, 3, C), 7.0, device=device).to(dtype).mT
    rows = windows_like(first, SLOTS, 5, "tokens first")
    slots = torch.tensor([3, 1, 2, 9], device=device)
    given: dict[str, Any] = {"initial_state": states, "initial_conv_state": first}
    if pooled:
        pool = states.new_full([SLOTS, *states.shape[1:]], float("nan"))
        pool[slots], rows[slots, :, :3] = states, first
        given = {"state": pool, "conv_state": rows, "disable_state_update": True, "state_index": slots}
    else:
        windows = windows.contiguous()
    o, _ = function(
        **call.tensors, **weights, **given, intermediate_states=kept, intermediate_conv_states=windows,
        intermediate_index=torch.tensor(ROWS, dtype=slots.dtype, device=device),
        parent=torch.tensor(PARENTS, dtype=slots.dtype, device=device),
    )
    untouched = torch.ones(4, T, dtype=torch.bool)
    for n in range(N):
        paths: dict[int, list[int]] = {-1: []}
        for t in range(T):
            parent = PARENTS[n][t]
            if ROWS[n] >= len(kept) or parent >= t or parent not in paths:
                assert not o[n, t].any()
                continue
            paths[t] = [*paths[parent], t]
            part = {name: x[n : n + 1, paths[t]] for name, x in call.tensors.items()}
            line, state, last = function(
                **part, **weights, initial_state=states[n : n + 1], initial_conv_state=first[n : n + 1],
                output_final_state=True, output_conv_state=True,
            )
            assert torch.equal(o[n, t], line[0, -1]) and torch.equal(kept[ROWS[n], t], state[0])
            assert torch.equal(windows[ROWS[n], t], last[0])
            untouched[ROWS[n], t] = False
    assert untouched.any() and (windows.cpu()[untouched] == 7).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_convolved_drafts_without_slots(function: Any, device: str) -> None:
    """Null sequences read and write no rows; one without a slot in column 0 starts from zeros."""
    call = batch(function, device)
    C = 2 * call.tensors["q"][0, 0].numel() + call.tensors["v"][0, 0].numel()
    weight = torch.randn(C, 4, device=device) / 8
    pool = pool_like(call, False)
    index = columns(device, torch.int64)
    index[2], index[1, 0], index[3, 2] = -1, SLOTS, -1
    accepted = torch.tensor([6, 3, 1, 3], device=device)  # but the second all are null
    rows = windows_like(weight[None], SLOTS, T + 2, "tokens first")
    o, _ = function(
        **call.tensors, state=pool.clone(), state_index=index, num_accepted=accepted, conv_weight=weight,
        conv_state=rows,
    )  # fmt: skip
    assert rows.isnan().all() and not o[[0, 2, 3]].any()
    wanted, _ = function(**call.tensors, initial_state=pool[index[:, 2].clamp(min=0)], conv_weight=weight)
    assert torch.equal(o[1], wanted[1])


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
