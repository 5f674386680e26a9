"""How sequences lie on ranks, beside cuts made another way, and the fold, in one process."""

from __future__ import annotations

import random

import pytest
import torch
from context_ranks import Case, stretches
from reference import error

from wyvern import _serving
from wyvern.distributed import _context, _exchange, build_cp_context, context_parallel


def random_case(layout: str, seed: int) -> Case:
    choose = random.Random(seed)
    P = choose.choice((1, 2, 3, 4, 7))
    tokens = [choose.choice((0, 0, 1, 2, 5, 9)) for _ in range(P)]
    cuts = sorted(choose.randint(0, sum(tokens)) for _ in range(choose.randint(0, 4)))
    ends = [0, *cuts, sum(tokens)]
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    return Case("chunk_kda", P, tokens=tokens, lengths=lengths, layout=layout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_random_packs(layout: str) -> None:
    for seed in range(200):
        case = random_case(layout, seed)
        cu_seqlens = torch.tensor([0, *case.lengths]).cumsum(0)
        contexts = [
            _context.lay_out(None, rank, case.P, cu_seqlens, tokens=case.tokens, layout=layout)
            for rank in range(case.P)
        ]
        by_place = {}
        for rank, context in enumerate(contexts):
            mine = [one for one in stretches(case) if one.rank == rank]
            assert len(mine) == len(context.ranges) == (1 if layout == "contiguous" else 2)
            at, runs = 0, [0]
            for number, (one, wanted) in enumerate(zip(context.ranges, mine, strict=True)):
                by_place[rank * len(mine) + number] = wanted, one
                assert (one.start, one.stop) == (at, at + wanted.stop - wanted.start)
                assert list(one.boundaries) == [0, *(run.stop - wanted.start for run in wanted.runs)]
                assert one.enters == (bool(wanted.runs) and not wanted.runs[0].begins)
                assert one.leaves == (bool(wanted.runs) and not wanted.runs[-1].ends)
                assert one.spans == (one.enters and one.leaves and len(wanted.runs) == 1)
                assert one.cu_seqlens.tolist() == one.cu_seqlens_cpu.tolist() == list(one.boundaries)
                runs += [at + x for x in one.boundaries[1:]]
                at = one.stop
            assert context.cu_seqlens.tolist() == runs and context.num_seqs == len(runs) - 1
            assert context.order == contexts[0].order and context.spanning == contexts[0].spanning
        in_order = [by_place[place] for place in contexts[0].order]
        assert [wanted for wanted, _ in in_order] == stretches(case)
        assert contexts[0].spanning == {place for place, (_, one) in by_place.items() if one.spans}
        for (_, one), (_, behind) in zip(in_order, in_order[1:], strict=False):
            assert one.leaves == behind.enters
        assert not in_order[0][1].enters and not in_order[-1][1].leaves


def test_a_declined_call_does_not_go_to_a_library() -> None:
    """Its own function would take a rank's tokens for whole sequences."""
    counts = _serving.Counts()

    def declines() -> None:
        raise ValueError("K is 1000")

    result, error = counts.attempt(declines)
    assert result is None and str(error) == "K is 1000"
    with context_parallel(_context.lay_out(None, 0, 1, torch.tensor([0, 5]), tokens=[5], layout="contiguous")):
        with pytest.raises(ValueError, match="K is 1000"):
            counts.attempt(declines)


def test_attributes_are_those_of_flash_linear_attention() -> None:
    cp = pytest.importorskip("fla.ops.cp.context")
    for seed in range(60):
        choose = random.Random(seed)
        P, tokens = choose.choice((1, 2, 3, 4)), choose.choice((1, 4, 6))
        cuts = sorted(choose.sample(range(1, P * tokens), choose.randint(0, min(3, P * tokens - 1))))
        cu_seqlens = torch.tensor([0, *cuts, P * tokens])
        for rank in range(P):
            theirs = cp.get_cp_cu_seqlens(cu_seqlens, world_size=P, rank=rank, conv1d_kernel_size=4)
            ours = _context.lay_out(None, rank, P, cu_seqlens, 4)
            assert ours.cu_seqlens.tolist() == theirs.cu_seqlens.tolist()
            for name in (
                "is_first_rank", "is_last_rank", "pre_num_ranks", "post_num_ranks", "pre_num_conv_tokens",
                "conv1d_kernel_size", "num_seqs",
            ):  # fmt: skip
                assert getattr(ours, name) == getattr(theirs, name), (name, seed, rank)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_fold_of_64_ranges_keeps_float32(reverse: bool) -> None:
    """Maps that forget little, so that products of all 64 count (flash-linear-attention's #1180)."""
    P, K, V = 64, 32, 24
    context = _context.lay_out(None, 0, P)
    M = torch.linalg.qr(torch.randn(P, 1, 2, K, K))[0] * torch.rand(P, 1, 2, 1, 1).mul(0.1).add(0.9)
    R = torch.randn(P, 1, 2, K, V)
    states = _exchange.fold(context, torch.cat([R, M], -1), V, reverse)
    S = torch.zeros(1, 2, K, V, dtype=torch.float64)
    for i in reversed(range(P)) if reverse else range(P):
        assert error(states[i], S) < 1e-6
        step = M[i].double().mT if reverse else M[i].double()
        S = R[i].double() + (step @ S if 0 < i < P - 1 else 0)


def test_a_sequence_that_diverged_stays_alone() -> None:
    """Zeros of a map that nobody has would make NaN of another sequence's infinite state."""
    context = _context.lay_out(None, 0, 4, torch.tensor([0, 6, 16]))
    summaries = torch.zeros(4, 1, 1, 2, 4)
    summaries[0, ..., :2], summaries[1, ..., :2], summaries[2] = float("inf"), 1, 2  # range 2 alone has M
    states = _exchange.fold(context, summaries, 2)
    assert states[1].isinf().all() and (states[2] == 1).all() and states[3].isfinite().all()


CU = torch.tensor([0, 5, 12])
WRONG = {
    "layout": ({"layout": "striped"}, ValueError, "layout is 'striped'"),
    "exchange": ({"exchange": "tree"}, ValueError, "exchange is 'tree'; it must be one of 'auto', 'gather'"),
    "no beginning": ({"cu_seqlens": torch.tensor([1, 12])}, ValueError, r"cu_seqlens is \[1, 12\]"),
    "decreasing": ({"cu_seqlens": torch.tensor([0, 9, 5])}, ValueError, r"cu_seqlens is \[0, 9, 5\]"),
    "dtype": ({"cu_seqlens": CU.float()}, TypeError, "cu_seqlens is torch.float32"),
    "copy": ({"cu_seqlens": CU, "cu_seqlens_cpu": CU[:2]}, ValueError, "cu_seqlens_cpu has 2 entries"),
    "uneven": ({"cu_seqlens": CU[:2]}, ValueError, r"cu_seqlens ends at 5, .* by 3; pass tokens="),
    "tokens of too few": ({"cu_seqlens": CU, "tokens": [6, 6]}, ValueError, r"tokens is \[6, 6\]"),
    "sum": ({"cu_seqlens": CU, "tokens": [6, 6, 1]}, ValueError, ".* its sum must be that of cu_seqlens, 12"),
    "negative": ({"tokens": [6, -6, 1]}, ValueError, "tokens is"),
    "fractions": ({"tokens": [6, 0.5, 1]}, TypeError, "tokens is float"),
    "zigzag": ({"layout": "zigzag"}, ValueError, "tokens is None; a dense batch in zigzag needs it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_layouts(what: str) -> None:
    given, kind, message = WRONG[what]
    with pytest.raises(kind, match=f"^{message}"):
        _context.lay_out(None, 0, 3, **given)


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="torch.distributed is not initialized"):
        build_cp_context()
    with pytest.raises(ValueError, match="^cp_context is given as str"), context_parallel("cp"):
        pass
