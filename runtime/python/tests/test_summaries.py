"""wyvern::summary, ::backward_summary and ::fold, which context parallelism is made of, beside the recurrence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import make
from reference import error, recurrence

from wyvern import _call, ops, tuning
from wyvern._call import INPUTS, Inputs

# Of runtime/SPECIFICATION.md, section 5: of states, and of their gradients.
BOUNDS = {torch.float32: (1e-5, 2e-5), torch.bfloat16: (5e-3, 8e-3), torch.float16: (5e-3, 8e-3)}
ENDS = [0, 30, 30, 131]  # of a pack's sequences, one of which is empty
OPERATORS = {
    "delta_rule": (ops.chunk_delta_rule, {}),
    "gated_delta_rule": (ops.chunk_gated_delta_rule, {"has_g": 1}),
    "kda": (ops.chunk_kda, {"has_g": 1}),
    "gdn2": (ops.chunk_gdn2, {"has_g": 1}),
    "gated_delta_product": (ops.chunk_gated_delta_product, {"has_g": 1, "num_householder": 2}),
}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"B": 2},
    "states": {"B": 2, "states": True},
    "packed": {"packed": True, "states": True},
    "grouped heads": {"H": 2, "HV": 6, "K": 24, "V": 40},
    "bfloat16": {"dtype": torch.bfloat16, "T": 200, "states": True},
    "float16": {"dtype": torch.float16, "packed": True},
    "norms": {"states": True, "options": {"use_qk_l2norm": 1, "scale": 0.3}},
    "V first": {"states": True, "options": {"state_v_first": 1}},
}


def call_of(op: str, case: dict[str, Any]) -> tuple[dict[str, Any], Inputs, torch.Tensor, torch.Tensor]:
    """A problem, its inputs, and gradients of o and of the final states, of K first."""
    function, fields = OPERATORS[op]
    packed, dtype = case.get("packed", False), case.get("dtype", torch.float32)
    sizes = {"T": ENDS[-1] if packed else 70, "H": 1, "HV": 2, "K": 32, "V": 16}
    sizes |= {name: x for name, x in case.items() if name in (*sizes, "B")}
    N = len(ENDS) - 1 if packed else sizes.get("B", 1)
    made = make(function, dtype, **sizes, N=N, steps=fields.get("num_householder", 1), states=case.get("states", False))
    tensors = {{"b": "erase", "w": "write"}.get(name, name): x.detach() for name, x in made.tensors.items()}
    if packed:
        tensors["cu_seqlens"] = tensors["cu_seqlens_cpu"] = torch.tensor(ENDS)
    options = case.get("options", {})
    if "state_v_first" in options:
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    random = torch.Generator().manual_seed(1)
    do = torch.randn(sizes.get("B", 1), sizes["T"], sizes["HV"], sizes["V"], generator=random).to(dtype)
    dht = torch.randn(N, sizes["HV"], sizes["K"], sizes["V"], generator=random)
    problem = {"op": op, **fields, **options}
    return problem, Inputs(**tensors), do, dht


def walk(problem: dict[str, Any], x: Inputs, **others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the final states, of K first, in float64; others in the place of inputs."""
    given = x._asdict() | others
    if "state_v_first" in problem and "initial_state" not in others:
        given["initial_state"] = given["initial_state"].mT
    exact = {
        name: y if name == "cu_seqlens" else y.double()
        for name, y in given.items()
        if y is not None and name != "cu_seqlens_cpu"
    }
    return recurrence(
        **exact, scale=problem.get("scale"), steps=problem.get("num_householder", 1), l2norm="use_qk_l2norm" in problem
    )


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("what", CASES)
def test_forward(what: str, op: str) -> None:
    """R and M, each within the bound of states; R has the same bound alone; and the same bits a second time."""
    problem, x, _, _ = call_of(op, CASES[what])
    V, (HV, K) = x.v.shape[3], (x.v.shape[2], x.k.shape[3])
    R = walk(problem, x)[1]
    identity = torch.eye(K, dtype=torch.float64).repeat(R.shape[0], HV, 1, 1)
    nothing = torch.zeros(*x.v.shape[:3], K)
    no_values = {"v": nothing} | ({} if x.write is None else {"write": nothing})
    M = walk(problem, x, initial_state=identity, **no_values)[1]
    of_states = BOUNDS[x.q.dtype][0]
    found = _call.summary_op(_call.text_of(problem | {"transition": 1}), *x)
    assert found.dtype is torch.float32 and found.shape == (*R.shape[:3], V + K)
    assert error(found[..., :V], R) < of_states and error(found[..., V:], M) < of_states
    if what == "packed":
        assert torch.equal(found[1, ..., V:], torch.eye(K).expand(HV, K, K))
        assert torch.equal(found[1, ..., :V], x.initial_state[1])
    assert torch.equal(_call.summary_op(_call.text_of(problem | {"transition": 1}), *x), found)
    alone = _call.summary_op(_call.text_of(problem), *x)
    assert alone.shape == R.shape and error(alone, R) < of_states


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("what", CASES)
def test_backward(what: str, op: str) -> None:
    problem, x, do, dht = call_of(op, CASES[what])
    state = torch.zeros(dht.shape, dtype=torch.float64, requires_grad=True)
    o, last = walk(problem, x, initial_state=state)
    x = x._replace(initial_state=None)
    theirs = dht.mT.contiguous() if "state_v_first" in problem else dht
    text = _call.text_of(problem)
    for given, pairs in ((theirs, ([o, last], [do.double(), dht.double()])), (None, ([o], [do.double()]))):
        (wanted,) = torch.autograd.grad(pairs[0], state, pairs[1], retain_graph=True)
        found = _call.backward_summary_op(text, *x, do, given)
        assert found.dtype is torch.float32 and found.shape == wanted.shape
        assert error(found, wanted) < BOUNDS[x.q.dtype][1]
        assert torch.equal(_call.backward_summary_op(text, *x, do, given), found)


def test_what_is_not_read() -> None:
    """Of q forwards and v backwards the sizes alone, whatever their strides."""
    problem, x, do, dht = call_of("kda", CASES["dense"])
    nowhere = {name: torch.full((*getattr(x, name).shape, 3), math.nan)[..., 0] for name in ("q", "v")}
    text = _call.text_of(problem)
    assert not nowhere["q"].is_contiguous()
    assert torch.equal(_call.summary_op(text, *x._replace(q=nowhere["q"])), _call.summary_op(text, *x))
    found = _call.backward_summary_op(text, *x._replace(v=nowhere["v"]), do, dht)
    assert torch.equal(found, _call.backward_summary_op(text, *x, do, dht))


@pytest.mark.parametrize("op", OPERATORS)
def test_segments(op: str) -> None:
    """The pass from a summary's segments is within the bounds of the whole, with the same bits a second time."""
    problem, x, _, _ = call_of(op, {"B": 2, "T": 300, "states": True})
    fields = problem | {"chunk_size": 16, "segment_chunks": 8}
    text = _call.text_of(fields | {"output_final_state": 1})
    summary, M, R = _call.shared_summary_op(_call.text_of(fields), *x)
    found = _call.resume_op(text, *x, M, R)
    for one, wanted in zip((*found, summary), (*walk(problem, x), walk(problem, x)[1]), strict=True):
        assert error(one, wanted) < BOUNDS[x.q.dtype][0]
    for one, other in zip(_call.resume_op(text, *x, M, R), found, strict=True):
        assert torch.equal(one, other)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_call.shared_summary_op, (_call.text_of(fields), *x), test_utils=checks)
    torch.library.opcheck(_call.resume_op, (text, *x, M, R), test_utils=checks)
    with pytest.raises(RuntimeError, match=r"segment_M has shape \[0, 2, 32, 32\]; it must be fp32 "):
        _call.resume_op(text, *x, M[:0], R)


@pytest.mark.parametrize("op", OPERATORS)
def test_of_an_operator_of_pytorch(op: str) -> None:
    """Schemas, and shapes of traces."""
    problem, x, do, dht = call_of(op, {"packed": True, "states": True})
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(_call.summary_op, (_call.text_of(problem), *x), test_utils=checks)
    with_M = _call.text_of(problem | {"transition": 1})
    torch.library.opcheck(_call.summary_op, (with_M, *x), test_utils=checks)
    x = x._replace(initial_state=None)
    torch.library.opcheck(_call.backward_summary_op, (_call.text_of(problem), *x, do, dht), test_utils=checks)
    summaries = torch.randn(3, 2, 2, 8, 12)
    torch.library.opcheck(_call.fold_op, (summaries, [2, 0, 1], 4, False), test_utils=checks)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a norm": ({"norm_weight": torch.ones(16)}, "norm_weight is given; this problem has no use for it"),
    "no rates": ({"beta": None}, r"beta is missing"),
    "tokens of k": ({"k": torch.zeros(2, 69, 1, 32)}, r"k has shape \[2, 69, 1, 32\]; it must be fp32 \[2, 70"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    others, message = REFUSED[what]
    problem, x, do, _ = call_of("kda", CASES["dense"])
    x, text = x._replace(**others), _call.text_of(problem)
    for call in (lambda: _call.summary_op(text, *x), lambda: _call.backward_summary_op(text, *x, do, None)):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_names() -> None:
    for op, more in ((_call.summary_op, []), (_call.backward_summary_op, ["do", "dht"])):
        assert [one.name for one in op._schema.arguments] == ["problem", *INPUTS, *more]
        assert str(op._schema).endswith("-> Tensor")


def test_a_tuner_meets_them() -> None:
    """Of either pass, as what they are."""
    problem, x, do, dht = call_of("kda", {"packed": True, "states": True})
    with tuning._Recorder() as met:
        _call.summary_op(_call.text_of(problem | {"transition": 1}), *x)
        _call.backward_summary_op(_call.text_of(problem), *x._replace(initial_state=None), do, dht)
    assert [(op, device) for op, device, _ in met.calls] == [("kda", "cpu")] * 2
    forward, backward = (fields.split(",") for _, _, fields in met.calls)
    assert {"transition=1", "summary=1", "initial_state=1", "packed=1", "N=3"} <= {*forward}
    assert {"pass=backward", "summary=1", "initial_state=0", "output_final_state=1"} <= {*backward}
    problem, x, _, _ = call_of("kda", {"states": True})
    text = _call.text_of(problem | {"chunk_size": 16, "segment_chunks": 8})
    with tuning._Recorder() as met:
        _, M, R = _call.shared_summary_op(text, *x)
        _call.resume_op(text, *x, M, R)
    summary, taking = (fields.split(",") for _, _, fields in met.calls)
    assert {"summary=1", "segment_chunks=8", "packed=0"} <= {*summary}
    assert "segment_chunks=8" in taking and "summary=1" not in taking


def folded(summaries: torch.Tensor, order: list[int], V: int, reverse: bool) -> torch.Tensor:
    """In float64."""
    exact = summaries.double()
    states = torch.full((*summaries.shape[:-1], V), math.nan, dtype=torch.float64)
    S = torch.zeros_like(states[0])
    for i in reversed(order) if reverse else order:
        states[i] = S
        M = exact[i, ..., V:]
        S = exact[i, ..., :V] + ((M.mT if reverse else M) @ S if M.shape[-1] else 0)
    return states


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("K, V", [(32, 16), (24, 40), (8, 8)])
def test_fold(K: int, V: int, reverse: bool) -> None:
    """In any order, of rows that are not dense, and of a part of the heads with the bits of all."""
    order = torch.randperm(6).tolist()
    for columns in (V, V + K):
        summaries = torch.randn(6, 2, 3, K, columns)
        summaries[..., V:] /= 2 * K**0.5
        states = _call.fold_op(summaries, order, V, reverse)
        assert states.shape == (6, 2, 3, K, V) and error(states, folded(summaries, order, V, reverse)) < 1e-6
        strided = summaries.mT.contiguous().mT
        assert torch.equal(_call.fold_op(strided, order, V, reverse), states)
        part = _call.fold_op(summaries[:, 1:, 1:].contiguous(), order, V, reverse)
        assert torch.equal(part, states[:, 1:, 1:])


WRONG_FOLDS = {
    "too few": ((torch.zeros(3, 2, 8, 12), [0, 1], 4), "ValueError: order must name each of the 3 ranges"),
    "twice": ((torch.zeros(3, 2, 8, 12), [0, 1, 1], 4), "ValueError: order must name each of the 3 ranges"),
    "beyond": ((torch.zeros(3, 2, 8, 12), [0, 1, 3], 4), "ValueError: order must name each of the 3 ranges"),
    "columns": ((torch.zeros(3, 2, 8, 12), [0, 1, 2], 5), r"ValueError: summaries has shape \[3, 2, 8, 12\]"),
    "dtype": ((torch.zeros(3, 2, 8, 12).half(), [0, 1, 2], 4), "TypeError: summaries is torch.float16"),
    "dimensions": ((torch.zeros(3, 8, 12), [0, 1, 2], 4), "ValueError: summaries has 3 dimensions"),
}


@pytest.mark.parametrize("what", WRONG_FOLDS)
def test_wrong_folds(what: str) -> None:
    given, message = WRONG_FOLDS[what]
    with pytest.raises(RuntimeError, match=f"^wyvern.{message}"):
        _call.fold_op(*given, False)
