"""flash-linear-attention's functions with its own contexts, served over gloo: what they compute, that none falls
back alone, and contexts that are read by their attributes."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_ranks import Case, Ranks, check, compute, ranks, run, same, shard  # noqa: F401 (ranks is a fixture)

pytest.importorskip("fla.ops.cp", reason="flash-linear-attention is not installed: pip install flash-linear-attention")
import wyvern.distributed
import wyvern.fla
from wyvern import _fla_context
from wyvern.distributed import ContextError, _context, _exchange

SERVED = ("chunk_gated_delta_rule", "chunk_kda", "chunk_gated_delta_product", "chunk_gdn2")
PACKS: dict[str, dict[str, Any]] = {
    "contiguous": {"P": 3, "tokens": [16, 16, 16], "lengths": [7, 2, 29, 10]},
    "one sequence": {"P": 4, "tokens": [10, 10, 10, 10], "lengths": [40]},
    "borders on boundaries": {"P": 3, "tokens": [12, 12, 12], "lengths": [12, 24]},
    "zigzag": {"P": 2, "tokens": [20, 20], "lengths": [13, 22, 5], "layout": "zigzag"},
}


def of_fla(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(wyvern.fla._MODULES[name]), name)


def context_of(case: Case, group: Any, how: str) -> Any:
    """As FLA's build_cp_context() gives it while Wyvern serves, or without what Wyvern adds to it."""
    cp = importlib.import_module("fla.ops.cp")
    theirs = cp.build_cp_context(torch.tensor([0, *case.lengths]).cumsum(0), group, layout=case.layout)
    return theirs if how == "built" else theirs.copy_for_backward()


def served(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """:func:`context_ranks.compute` by FLA's function and context."""
    case: Case = given["case"]
    leaves = {name: x.clone().requires_grad_() for name, x in given["tensors"].items()}
    wyvern.fla.report(reset=True)
    with wyvern.fla.enable():
        context = context_of(case, group, given["how"])
        assert hasattr(context, "_wyvern") == (given["how"] == "built")
        # FLA has its context's boundaries stand in for those that are given.
        beside = {"cu_seqlens": context.cu_seqlens} if case.op != "chunk_gated_delta_product" else {}
        o, state = of_fla(case.op)(**leaves, **given["options"], cp_context=context, **beside)
    gradients = torch.autograd.grad((o, state), list(leaves.values()), given["seeds"])
    counted = wyvern.fla.report()
    assert counted.served == {case.op: 1} and not counted.declined
    return {"o": o.detach(), "state": state.detach(), "gradients": dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("how", ["built", "copied"])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("op", SERVED)
def test_served(ranks: Ranks, op: str, pack: str, how: str) -> None:
    """With the bits of wyvern.ops and its context. FLA itself takes and gives no states here."""
    case = Case(op, states=False, steps=2 if "product" in op else 1, exchange="gather", **PACKS[pack])
    answers = ranks(case.P, served, [shard(case, rank) | {"how": how} for rank in range(case.P)])
    check(case, answers)
    for answer, ours in zip(answers, run(ranks, case), strict=True):
        assert same(answer, ours)


CASE = Case("chunk_kda", states=False, **PACKS["contiguous"])


def refused(group: Any, rank: int, device: torch.device, given: Any) -> tuple[str, dict[str, Any]]:
    """What a call raises, changed in the ranks of ``where``, and what FLA's functions were called for."""
    part, what, where = given
    tensors, options = dict(part["tensors"]), dict(part["options"])
    case: Case = part["case"]
    wyvern.fla.report(reset=True)
    with wyvern.fla.enable():
        context = context_of(case, group, "built" if what != "copies" else "copied")
        if rank in where:
            if what == "K":
                for name in ("q", "k", "g"):
                    tensors[name] = tensors[name].repeat_interleave(10, 3)
            elif what == "graph":
                options["use_graph"] = True
            elif what == "dtype":
                tensors["v"] = tensors["v"].half()
            elif what == "option":
                options["colour"] = 1
            elif what == "scale":
                options["scale"] = 0.25
            elif what == "tokens":
                tensors = {name: x[:, 1:] for name, x in tensors.items()}
            elif what == "copies":
                tensors["g"] = tensors["g"][:, :, :1]
            elif what == "context":
                context = context.copy_for_backward()
        try:
            of_fla(case.op)(**tensors, **options, cp_context=context)
        except Exception as error:
            return f"{type(error).__name__}: {error}", wyvern.fla.report().declined
    return "", wyvern.fla.report().declined


DECLINED = {
    "K": "ValueError: .*K is 320",
    "graph": "ValueError: .*cp_context is given with use_graph",
    "dtype": "TypeError: .*v is torch.float16; it must be torch.float32",
    "option": "TypeError: .*colour",
}


@pytest.mark.parametrize("what", DECLINED)
def test_all_ranks_decline(ranks: Ranks, what: str) -> None:
    """Before they exchange anything, so that FLA's own exchange follows in all (which here has no GPU)."""
    for message, declined in ranks(3, refused, [(shard(CASE, rank), what, (0, 1, 2)) for rank in range(3)]):
        assert sum(declined["chunk_kda"].values()) == 1
        assert "Wyvern declines this call, and the library itself computes on GPUs only" in message
        assert re.search(DECLINED[what], message), message
    check(CASE, run(ranks, CASE))


FAILED = {
    "scale": "scale differs between the ranks of cp_context: not given in ranks 0, 2; 0.25 in rank 1",
    "tokens": "q has 15 tokens; cp_context has 16 for this rank (in rank 1 of cp_context)",
    "copies": "g differs between the ranks of cp_context",
    "context": "differs between the ranks of cp_context",
}


@pytest.mark.parametrize("what", FAILED)
def test_no_rank_falls_back_alone(ranks: Ranks, what: str) -> None:
    """What only the ranks together find, or one rank alone, is raised in all and never a decline."""
    for message, declined in ranks(3, refused, [(shard(CASE, rank), what, (1,)) for rank in range(3)]):
        assert message.startswith("ContextError: ") and FAILED[what] in message
        assert not declined
    check(CASE, run(ranks, CASE))


def alone(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> list[torch.Tensor]:
    case: Case = given["case"]
    cp = importlib.import_module("fla.ops.cp.context")
    with wyvern.fla.enable(), torch.no_grad():
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
        whole = cp.get_cp_cu_seqlens(cu_seqlens, world_size=1, rank=0)
        o, _ = of_fla(case.op)(**given["tensors"], cp_context=whole)
    return [o, wyvern.ops.chunk_kda(**given["tensors"], cu_seqlens=cu_seqlens)[0]]


def test_a_context_without_a_group_is_one_rank(ranks: Ranks) -> None:
    case = Case("chunk_kda", 1, tokens=[30], lengths=[11, 19], states=False)
    for o, wanted in run(ranks, case, alone):
        assert torch.equal(o, wanted)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_contexts_read_by_their_attributes(layout: str) -> None:
    """Each rank gets the states that it gets by the whole pack's boundaries, bit for bit."""
    cp = importlib.import_module("fla.ops.cp.context")
    K, V, n = 3, 2, 1 if layout == "contiguous" else 2
    for seed in range(60):
        choose = random.Random(seed)
        P, share = choose.choice((1, 2, 3, 5)), n * choose.choice((1, 2, 5))
        cuts = sorted(choose.sample(range(1, P * share), choose.randint(0, min(4, P * share - 1))))
        cu_seqlens = torch.tensor([0, *cuts, P * share])
        wholes = [_context.lay_out(None, rank, P, cu_seqlens, layout=layout) for rank in range(P)]
        summaries = torch.randn(n * P, 1, 2, K, V + K)
        for rank, whole in enumerate(wholes):
            for number, one in enumerate(whole.ranges):
                i = rank * n + number
                summaries[i, ..., V:] *= i in whole.spanning  # as ranks send them
        for rank, whole in enumerate(wholes):
            ours = _fla_context.read(cp.get_cp_cu_seqlens(cu_seqlens, world_size=P, rank=rank, layout=layout), rank, P)
            assert ours.order == whole.order and ours.transition == (n * P > 2)
            for one, wanted in zip(ours.ranges, whole.ranges, strict=True):
                assert (one.start, one.stop, one.boundaries) == (wanted.start, wanted.stop, wanted.boundaries)
                assert one.cu_seqlens.tolist() == one.cu_seqlens_cpu.tolist() == list(one.boundaries)
                assert (one.enters, one.leaves, one.spans) == (wanted.enters, wanted.leaves, wanted.spans)
            for reverse in (False, True):
                states, wanted = (
                    _exchange.fold(context, summaries, V, reverse)[rank * n : (rank + 1) * n]
                    for context in (ours, whole)
                )
                for one, state, other in zip(ours.ranges, states, wanted, strict=True):
                    if one.leaves if reverse else one.enters:
                        assert torch.equal(state, other)


def layer_over_ranks(group: Any, rank: int, device: torch.device, given: Any) -> dict[str, torch.Tensor]:
    """A layer of FLA as a whole inside of context_parallel(), with the gradients of this rank's part of a loss."""
    layer, x, do, tokens = given
    context = wyvern.distributed.build_cp_context(group=group, tokens=tokens)
    wyvern.fla.report(reset=True)
    with wyvern.fla.enable(), wyvern.distributed.context_parallel(context):
        o = layer(x)[0]
    assert len(wyvern.fla.report().served) == 1 and not wyvern.fla.report().declined
    o.backward(do)
    return {"o": o.detach(), **{name: weight.grad for name, weight in layer.named_parameters()}}


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_whole_layers_over_ranks(ranks: Ranks, kind: str) -> None:
    """Their convolutions go on from the ranks before; two of these have fewer rows than a convolution takes."""
    torch.manual_seed(3)
    kinds = importlib.import_module("fla.layers")
    layer = getattr(kinds, kind)(hidden_size=24, num_heads=2, head_dim=16, expand_v=1.0, mode="chunk")
    tokens = [20, 1, 2, 17]
    x, do = torch.randn(2, 2, sum(tokens), 24).unbind()
    shares = zip(x.split(tokens, 1), do.split(tokens, 1), strict=True)
    answers = ranks(4, layer_over_ranks, [(layer, *share, tokens) for share in shares])
    with wyvern.fla.enable():
        o = layer(x)[0]
    o.backward(do)
    assert torch.allclose(torch.cat([one["o"] for one in answers], 1), o, rtol=1e-4, atol=1e-5)
    for name, weight in layer.named_parameters():
        total = sum(one[name] for one in answers)
        assert (total - weight.grad).norm() < 1e-4 * weight.grad.norm(), name
