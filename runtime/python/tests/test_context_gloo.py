"""Operators whose sequences lie on two, three, four and eight processes over gloo, beside the float64 recurrence.

flash-linear-attention's #1115 (kda's gradients but on the last rank) is among :func:`test_layouts`, #1180 (the fold)
in test_context.py, #774 and #1140 (convolutions of ranks with few tokens) in test_context_tokens.py.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import wyvern
from context_ranks import (  # noqa: F401 (ranks and eight_ranks are fixtures)
    LAYOUTS,
    OPERATORS,
    Case,
    Ranks,
    check,
    compute,
    eight_ranks,
    ranks,
    run,
    same,
    shard,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from wyvern import ops
from wyvern.distributed import _parallel, build_cp_context, context_parallel


def steps_of(op: str) -> int:
    return 2 if "product" in op else 1


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ranks: Ranks, layout: str, op: str) -> None:
    case = Case(op, steps=steps_of(op), **LAYOUTS[layout])
    check(case, run(ranks, case))


@pytest.mark.parametrize("op", OPERATORS)
def test_float64(ranks: Ranks, op: str) -> None:
    """To rounding: the maps and the fold are exact."""
    for layout in ("uneven, B = 2", "empty ranks", "zigzag pack"):
        case = Case(op, dtype=torch.float64, steps=steps_of(op), **LAYOUTS[layout])
        check(case, run(ranks, case))


@pytest.mark.parametrize("op", OPERATORS)
def test_bfloat16(ranks: Ranks, op: str) -> None:
    for tokens, lengths in (([70, 33, 90], None), ([64, 100, 29], [30, 150, 13])):
        case = Case(op, 3, torch.bfloat16, tokens=tokens, lengths=lengths, steps=steps_of(op))
        check(case, run(ranks, case))


EIGHT = {
    "uneven": {"tokens": [13, 0, 21, 1, 16, 9, 0, 20]},
    "zigzag": {"tokens": [9, 2, 8, 7, 4, 10, 6, 5], "layout": "zigzag"},
    "pack": {"tokens": [10] * 8, "lengths": [3, 40, 0, 17, 20]},
    "zigzag pack": {"tokens": [10] * 8, "lengths": [33, 1, 46], "layout": "zigzag"},
}


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
@pytest.mark.parametrize("layout", EIGHT)
def test_eight_ranks(eight_ranks: Ranks, layout: str, op: str) -> None:
    case = Case(op, P=8, **EIGHT[layout])
    check(case, run(eight_ranks, case))


L2NORM = {"use_qk_l2norm_in_kernel": True}
GATE = {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "float16": {"op": "chunk_gated_delta_rule", "dtype": torch.float16},
    "norms, rates, scale": {
        "op": "chunk_gated_delta_rule", "options": L2NORM | SIGMOID | {"allow_neg_eigval": True, "scale": 0.3},
    },
    "gate": {"op": "chunk_gated_delta_rule", "options": GATE, "gate": ("A_log", "dt_bias")},
    "gate of channels": {"op": "chunk_kda", "options": GATE, "gate": ("A_log", "dt_bias")},
    "bound": {"op": "chunk_kda", "options": GATE | {"lower_bound": -3.0}, "gate": ("A_log",)},
    "V first": {"op": "chunk_gdn2", "options": {"state_v_first": True}},
    "grouped heads": {"op": "chunk_kda", "H": 2, "HV": 6, "K": 24, "V": 8},
    "no states": {"op": "chunk_delta_rule", "states": False},
    "chunk size": {"op": "chunk_gated_delta_rule", "options": {"chunk_size": 16, "disable_recompute": True}},
}  # fmt: skip


@pytest.mark.parametrize("what", OPTIONS)
def test_options(ranks: Ranks, what: str) -> None:
    case = Case(**{"P": 3, "tokens": [14, 13, 16], "lengths": [9, 34]} | OPTIONS[what])
    if case.options.get("state_v_first"):
        case = dataclasses.replace(case, states=False)
    check(case, run(ranks, case))


def compute_late(group: Any, rank: int, device: torch.device, given: Any) -> dict[str, Any]:
    """The ranks arrive one after the other, the last first."""
    time.sleep(0.1 * (dist.get_world_size(group) - rank))
    return compute(group, rank, device, given)


@pytest.mark.parametrize("layout", ["uneven, B = 2", "zigzag pack"])
def test_every_exchange_and_order_of_arrival_has_the_same_bits(ranks: Ranks, layout: str) -> None:
    case = Case("chunk_kda", exchange="gather", HV=6, **LAYOUTS[layout])
    gathered = run(ranks, case)
    check(case, gathered)
    by_heads = dataclasses.replace(case, exchange="heads")
    for function, other in ((compute_late, case), (compute, by_heads), (compute_late, by_heads)):
        for one, wanted in zip(run(ranks, other, function), gathered, strict=True):
            assert same(one, wanted)


@pytest.mark.parametrize("P", [1, 2, 3])
def test_a_group_alone(ranks: Ranks, P: int) -> None:
    """No rank knows how many tokens the others have."""
    case = Case("chunk_kda", P, tokens=[20, 5, 17][:P], B=2, group_alone=True)
    check(case, run(ranks, case))


class Launched(TorchDispatchMode):
    """The operators that compute or send anything, in their order: those that give no view and no bare memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.name() not in ("aten::detach", "aten::empty_like", "aten::new_empty"):
            self.names.append(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def launches(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a call launches that is not the first of its problem, and what its backward pass does."""
    tensors, context = call_of(group, given)
    call = getattr(ops, given["case"].op)
    options = given["options"] | {"output_final_state": False}
    call(**tensors, **options, cp_context=context)
    do = given["seeds"][0].to(given["case"].dtype)
    with Launched() as forward:
        o, _ = call(**tensors, **options, cp_context=context)
    with Launched() as backward:
        torch.autograd.grad(o, list(tensors.values()), do)
    return forward.names, backward.names


def compute_sharing(group: Any, rank: int, device: torch.device, given: Any) -> dict[str, Any]:
    """By segments of 128 rows, whatever the cost model says of this processor."""
    with mock.patch.object(_parallel, "shared_segments", return_value=(16, 8)), Launched() as seen:
        found = compute(group, rank, device, given)
    whole = given["case"].lengths is None or len(given["case"].lengths) == 1
    last = rank == dist.get_world_size(group) - 1 and given["case"].layout == "contiguous"
    assert seen.names.count("resume") == int(whole and not last)
    return found


SHARED: dict[str, dict[str, Any]] = {
    "dense": {"P": 3, "tokens": [300, 140, 70], "B": 2},
    "one sequence": {"P": 3, "tokens": [128, 0, 150], "lengths": [278]},
    "pack": {"P": 2, "tokens": [150, 150], "lengths": [140, 130, 30]},
    "float16 and norms": {"P": 2, "tokens": [260, 30], "dtype": torch.float16, "options": L2NORM},
}


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("what", SHARED)
def test_passes_take_the_segments_of_summaries(ranks: Ranks, what: str, op: str) -> None:
    """Within the bounds, the same bits run after run; and so without them."""
    case = Case(op, steps=steps_of(op), **SHARED[what])
    shared = run(ranks, case, compute_sharing)
    check(case, shared)
    for one, other in zip(run(ranks, case, compute_sharing), shared, strict=True):
        assert same(one, other)
    check(case, run(ranks, case))


@pytest.mark.parametrize("exchange", ["gather", "heads", "two ranks"])
def test_what_a_dense_call_launches(ranks: Ranks, exchange: str) -> None:
    """Nothing beside summary, collectives, fold and pass in a rank inside but the join of dR and M, and with the
    all-gather the copy of its state; nothing at all between two ranks."""
    P = 2 if exchange == "two ranks" else 4
    case = Case(
        "chunk_kda", P, torch.bfloat16, tokens=[20] * P, HV=4, states=False,
        exchange="auto" if P == 2 else exchange,
    )  # fmt: skip
    found = run(ranks, case, launches)
    a2a, gather = ["alltoall_base_"], ["_allgather_base_"]
    if exchange == "heads":
        forward, backward = [*a2a, "fold", *a2a], [*a2a, "cat", "fold", *a2a]
    elif exchange == "gather":
        forward, backward = [*gather, "fold", "clone"], ["cat", *gather, "fold", "clone"]
    else:
        forward = backward = a2a
    if P == 4:
        for one in found[1:3]:
            assert one == (["summary", *forward, "forward"], ["backward_summary", *backward, "backward"])
    else:
        assert found[0][0] == ["summary", *forward, "forward"]
        assert found[1][1] == ["backward_summary", *backward, "backward"]


def call_of(group: Any, given: dict[str, Any], gradients: bool = True) -> tuple[dict[str, Any], Any]:
    """The tensors of a shard, and its context."""
    case: Case = given["case"]
    tensors = {name: x.clone().requires_grad_(gradients) for name, x in given["tensors"].items()}
    cu_seqlens = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0)
    return tensors, build_cp_context(
        cu_seqlens, group, tokens=case.tokens, layout=case.layout, exchange=case.exchange
    )


def ring(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    tensors, context = call_of(group, given, gradients=False)
    o, state, *_ = getattr(ops, given["case"].op)(
        **tensors, **given["options"], batch_invariant=True, cp_context=context
    )
    return {"o": o, "state": state}


@pytest.mark.parametrize("around", [{}, {"taps": 4, "norm": "silu"}], ids=["operator", "layer"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_has_the_bits_of_one_call(ranks: Ranks, layout: str, around: dict[str, Any]) -> None:
    tokens = [64, 128, 37] if layout == "contiguous" else [128, 128, 64 + 64]
    case = Case("chunk_gated_delta_rule", 3, torch.bfloat16, tokens=tokens, layout=layout, exchange="ring", **around)
    given = shard(dataclasses.replace(case, P=1, tokens=[sum(tokens)], layout="contiguous"), 0)
    with torch.no_grad():
        o, state, *_ = ops.chunk_gated_delta_rule(**given["tensors"], **given["options"], batch_invariant=True)
    answers = run(ranks, case, ring)
    found = torch.cat([answer["o"] for answer in answers], 1)
    if layout == "zigzag":
        pieces = [answer["o"].chunk(2, 1) for answer in answers]
        found = torch.cat([piece[0] for piece in pieces] + [piece[1] for piece in reversed(pieces)], 1)
    assert torch.equal(found, o)
    assert torch.equal(answers[0 if layout == "zigzag" else 2]["state"], state)


def around(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """By a block around a model that is computed anew in the backward pass, and by a mesh."""
    tensors, context = call_of(group, given)

    def model(*leaves: torch.Tensor) -> Any:
        return ops.chunk_kda(**dict(zip(tensors, leaves, strict=True)), **given["options"])

    with context_parallel(context):
        o, state = checkpoint(model, *tensors.values(), use_reentrant=False)
        gradients = torch.autograd.grad((o, state), list(tensors.values()), given["seeds"])
        try:
            ops.fused_recurrent_kda(**tensors)
        except ValueError as error:
            message = str(error)
    assert wyvern.distributed._context.around() is None
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    by_mesh = ops.chunk_kda(**tensors, **given["options"], cp_context=mesh)
    assert torch.equal(by_mesh[0], o) and torch.equal(by_mesh[1], state)
    named = dict(zip(tensors, gradients, strict=True))
    return {"o": o.detach(), "state": state.detach(), "gradients": named, "message": message}


def test_a_block_around_a_model(ranks: Ranks) -> None:
    case = Case("chunk_kda", **LAYOUTS["uneven, B = 2"])
    answers = run(ranks, case, around)
    check(case, answers)
    assert "inside wyvern.distributed.context_parallel()" in answers[0]["message"]


def derivatives(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> list[str]:
    tensors, context = call_of(group, given)
    found = []

    def o(q: torch.Tensor) -> torch.Tensor:
        return ops.chunk_kda(**tensors | {"q": q}, cp_context=context)[0]

    (once,) = torch.autograd.grad(o(tensors["q"]).square().sum(), tensors["q"], create_graph=True)
    for call in (
        lambda: once.sum().backward(),
        lambda: torch.func.grad(lambda q: o(q).sum())(tensors["q"]),
    ):
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            found.append(str(error))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors["q"].detach(), torch.ones_like(tensors["q"]))
        try:
            o(dual)
        except NotImplementedError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_derivatives_that_there_are_not(ranks: Ranks, dtype: torch.dtype) -> None:
    case = Case("chunk_kda", 2, dtype, tokens=[5, 6])
    for messages in run(ranks, case, derivatives):
        second, func, forwards = messages
        assert "has no second derivatives" in second
        assert func.startswith("cp_context is given; torch.func cannot transform")
        assert "has no forward-mode derivative" in forwards
