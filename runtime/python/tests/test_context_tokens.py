"""The tokens before a rank's own, convolutions that read them, and calls by heads, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_ranks import (  # noqa: F401 (ranks is a fixture)
    LAYOUTS,
    OPERATORS,
    Case,
    Ranks,
    check,
    ranks,
    run,
    shard,
    stretches,
)

from reference import error
from test_layers import FUNCTIONS, Layer
from test_layers import make as make_layer

from wyvern import ops
from wyvern.distributed import build_cp_context, by_heads, halo

HALOS = {
    "dense": Case("", 3, tokens=[4, 3, 6], B=2, group_alone=True),
    "ranks of 1, 2 and 3 tokens": Case("", 4, tokens=[1, 2, 3, 1], B=2),  # flash-linear-attention's #774
    "empty ranks": Case("", 4, tokens=[2, 0, 1, 4]),
    "pack": Case("", 3, tokens=[3, 2, 5], lengths=[2, 6, 0, 2]),
    "pack, empty ranks": Case("", 4, tokens=[3, 0, 2, 5], lengths=[2, 8]),
    "zigzag": Case("", 2, tokens=[5, 4], B=2, layout="zigzag"),
    "zigzag pack": Case("", 3, tokens=[5, 2, 4], lengths=[1, 7, 3], layout="zigzag"),
}


def halo_of(group: Any, rank: int, device: torch.device, given: Any) -> list[torch.Tensor]:
    case, x, seed, width = given
    cu_seqlens = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0)
    context = group
    if not case.group_alone:
        context = build_cp_context(cu_seqlens, group, tokens=case.tokens, layout=case.layout)
    x = x.clone().requires_grad_()
    found = halo(x, context, width)
    return [found.detach(), *torch.autograd.grad(found, x, seed)]


@pytest.mark.parametrize("what", HALOS)
def test_halo(ranks: Ranks, what: str) -> None:
    """Bit for bit what a gather of the whole sequence gives, and its gradient."""
    case, width, D = HALOS[what], 3, 2
    T = sum(case.tokens)
    x = torch.randn(case.B, T, D, dtype=torch.float64, requires_grad=True)
    ranges = stretches(case)
    wanted, seeds = [], []
    for one in ranges:
        begin = 0
        if case.lengths is not None:
            ends = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
            begin = max(end for end in ends if end <= one.start)
        before = x[:, max(begin, one.start - width) : one.start]
        wanted.append(torch.cat([x.new_zeros(case.B, width - before.shape[1], D), before], 1))
        seeds.append(torch.randn_like(wanted[-1]))
    (gradient,) = torch.autograd.grad(wanted, x, seeds)
    index = [[t for one in ranges if one.rank == rank for t in range(one.start, one.stop)] for rank in range(case.P)]

    def of(rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part for one, part in zip(ranges, parts, strict=True) if one.rank == rank])

    given = [(case, x.detach()[:, index[rank]], of(rank, seeds), width) for rank in range(case.P)]
    for rank, (found, own) in enumerate(ranks(case.P, halo_of, given)):
        assert torch.equal(found, of(rank, wanted))
        assert torch.allclose(own, gradient[:, index[rank]], rtol=0, atol=1e-14)


def wrong_halos(group: Any, rank: int, device: torch.device, given: Any) -> list[str]:
    messages = []
    packed = build_cp_context(torch.tensor([0, 4, 8]), group)
    for x, context, width in (
        (torch.zeros(1, 2, 3), group, 3),
        (torch.zeros(1, 5, 3), packed, 3),
        (torch.zeros(2, 4, 3), packed, 3),
        (torch.zeros(1, 4, 3), packed, 0),
    ):
        with pytest.raises(ValueError) as raised:
            halo(x, context, width)
        messages.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        by_heads(ops.chunk_kda, torch.zeros(1, 4, 3, 2), group=group)
    return [*messages, str(raised.value)]


def test_what_is_refused(ranks: Ranks) -> None:
    for messages in ranks(2, wrong_halos, [None, None]):
        assert messages[0].startswith("x has 2 tokens; without tokens= ")
        assert messages[1] == "x has 5 tokens; cp_context has 4 for this rank"
        assert messages[2] == "B is 2; it must be 1 with a cp_context of cu_seqlens"
        assert messages[3] == "width is 0; it must be at least 1"
        assert messages[4] == "tensor 0 of by_heads() has 3 heads, which 2 ranks do not divide"


# Some ranks have fewer tokens than a convolution reads before its own.
LAYERS = LAYOUTS | {
    "ranks of 1 and 2 tokens": {"P": 4, "tokens": [1, 2, 1, 9], "B": 2},
    "pack of short sequences": {"P": 4, "tokens": [3, 2, 1, 6], "lengths": [2, 6, 1, 3]},
    "zigzag, short pieces": {"P": 3, "tokens": [3, 2, 4], "lengths": [1, 7, 1], "layout": "zigzag"},
}


@pytest.mark.parametrize("layout", LAYERS)
@pytest.mark.parametrize("op", OPERATORS)
def test_convolutions_and_norms(ranks: Ranks, op: str, layout: str) -> None:
    """With every operator, in float64: to rounding, with the gradients of all tensors and of the rows at borders."""
    steps = 2 if "product" in op else 1
    case = Case(op, dtype=torch.float64, steps=steps, taps=4, norm="silu", K=8, V=4, **LAYERS[layout])
    check(case, run(ranks, case))


@pytest.mark.parametrize("layout", LAYERS)
def test_convolutions_and_norms_by_kernels(ranks: Ranks, layout: str) -> None:
    case = Case("chunk_gated_delta_rule", taps=4, norm="silu", **LAYERS[layout])
    check(case, run(ranks, case))


LAYER_OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {
        "op": "chunk_kda", "dtype": torch.bfloat16, "norm": "sigmoid", "tokens": [70, 33, 90], "lengths": None,
    },
    "float16": {"op": "chunk_gdn2", "dtype": torch.float16, "norm": "silu"},
    "two taps": {"op": "chunk_kda", "taps": 2},
    "three taps, steps": {"op": "chunk_gated_delta_product", "steps": 2, "taps": 3, "norm": "sigmoid"},
    "no activation": {"op": "chunk_delta_rule", "options": {"conv_activation": None}},
    "no states": {"op": "chunk_gdn2", "states": False, "norm": "silu"},
    "a norm alone": {"op": "chunk_kda", "taps": 0, "norm": "silu"},
    "a group": {"op": "chunk_kda", "lengths": None, "B": 2, "group_alone": True},
    "heads": {"op": "chunk_gated_delta_rule", "HV": 3, "exchange": "heads", "norm": "silu"},
    "zigzag in bfloat16": {
        "op": "chunk_gated_delta_rule", "dtype": torch.bfloat16, "norm": "silu", "B": 2, "lengths": None,
        "layout": "zigzag",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", LAYER_OPTIONS)
def test_options_of_convolutions_and_norms(ranks: Ranks, what: str) -> None:
    case = Case(**{"P": 3, "tokens": [14, 13, 16], "lengths": [9, 34], "taps": 4} | LAYER_OPTIONS[what])
    check(case, run(ranks, case))


def layer_of(group: Any, rank: int, device: torch.device, given: Any) -> list[torch.Tensor]:
    """What a layer gives of a rank's tokens, and the gradients of its parts."""
    layer, seed, tokens = given
    layer.parts = {letter: x.clone().requires_grad_() for letter, x in layer.parts.items()}
    found = layer(cp_context=build_cp_context(group=group, tokens=tokens))
    gradients = torch.autograd.grad(found.o, list(layer.parts.values()), seed)
    return [*(x.detach() for x in found), *gradients]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_layers(ranks: Ranks, function: Any) -> None:
    """As one process computes them; states and rows behind all tokens are those of the last rank."""
    tokens = [5, 1, 11]
    whole = make_layer(function, torch.float64, T=sum(tokens), K=8, V=4)
    seed = torch.randn(2, sum(tokens), 4, 4, dtype=torch.float64)
    given, start = [], 0
    for count in tokens:
        mine = slice(start, start + count)
        parts = {letter: x[:, mine].clone() for letter, x in whole.parts.items()}
        tensors = {name: x[:, mine] if name in ("g", "b", "w") else x for name, x in whole.tensors.items()}
        layer = Layer(function, parts, tensors, whole.options)
        given.append((layer, seed[:, mine], tokens))
        start += count
    whole.parts = {letter: x.requires_grad_() for letter, x in whole.parts.items()}
    wanted = whole()
    gradients = torch.autograd.grad(wanted.o, list(whole.parts.values()), seed)
    answers = ranks(len(tokens), layer_of, given)
    for i, one in enumerate((wanted.o, None, None, *gradients)):
        if one is not None:
            assert error(torch.cat([answer[i] for answer in answers], 1), one) < 1e-12
    assert error(answers[-1][1], wanted.final_state) < 1e-12
    assert torch.equal(answers[-1][2], wanted.final_conv_state)


def compute_by_heads(group: Any, rank: int, device: torch.device, given: Any) -> dict[str, Any]:
    case, tensors = given["case"], {name: x.clone().requires_grad_() for name, x in given["tensors"].items()}
    names = [name for name in tensors if name != "initial_state"]
    heads = slice(rank * case.HV // case.P, (rank + 1) * case.HV // case.P)
    S = given["initial_state"][:, heads].clone().requires_grad_()
    o, state = by_heads(
        getattr(ops, case.op), *(tensors[name] for name in names), group=group, initial_state=S,
        output_final_state=True,
    )  # fmt: skip
    seeds = [given["seeds"][0].to(o.dtype), given["dht"][:, heads]]
    *found, dS = torch.autograd.grad((o, state), [*(tensors[name] for name in names), S], seeds)
    return {"o": o.detach(), "state": state.detach(), "dS": dS, "gradients": dict(zip(names, found, strict=True))}


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_gdn2"])
def test_by_heads_has_the_bits_of_one_process(ranks: Ranks, op: str) -> None:
    P, HV = 2, 4
    case = Case(op, P, tokens=[10, 10], B=2, H=2, HV=HV)
    shards = [shard(case, rank) for rank in range(P)]
    whole = shard(Case(op, 1, tokens=[20], B=2, H=2, HV=HV), 0)
    S = whole["tensors"]["initial_state"]
    dht = torch.randn_like(S)
    answers = ranks(P, compute_by_heads, [one | {"initial_state": S, "dht": dht} for one in shards])
    tensors = {name: x.clone().requires_grad_() for name, x in whole["tensors"].items()}
    o, state = getattr(ops, op)(**tensors, output_final_state=True)
    seed = torch.cat([one["seeds"][0] for one in shards], 1).to(o.dtype)
    gradients = dict(zip(tensors, torch.autograd.grad((o, state), list(tensors.values()), [seed, dht]), strict=True))
    assert torch.equal(torch.cat([one["o"] for one in answers], 1), o)
    assert torch.equal(torch.cat([one["state"] for one in answers], 1), state)
    assert torch.equal(torch.cat([one["dS"] for one in answers], 1), gradients.pop("initial_state"))
    for name, wanted in gradients.items():
        assert torch.equal(torch.cat([one["gradients"][name] for one in answers], 1), wanted), name
