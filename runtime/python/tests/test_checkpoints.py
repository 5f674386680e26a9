"""States inside sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call, make
from reference import error, recurrence
from wyvern import ops

FUNCTIONS = [ops.chunk_delta_rule, ops.chunk_gated_delta_rule, ops.chunk_kda]
LENGTHS = [130, 0, 63, 64, 17, 200]
OFFSETS = [80, 16, 16, 64, 8, -16]  # the second is past an empty sequence's end, the last two are none


def pack(function: Callable[..., Any], device: str, dtype: torch.dtype = torch.float32) -> Call:
    call = make(function, dtype, device, T=sum(LENGTHS), N=len(LENGTHS))
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    call.fixed["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0).to(device)
    return call


def wanted(call: Call, n: int, tokens: int, v_first: bool = False) -> torch.Tensor:
    """The state after so many tokens of sequence n, by the recurrence."""
    exact = {name: x.double().cpu() for name, x in call.tensors.items()}
    start = exact.pop("initial_state")[n : n + 1]
    first = sum(LENGTHS[:n])
    rows = {name: x[:, first : first + tokens] for name, x in exact.items()}
    return recurrence(**rows, initial_state=start, v_first=v_first)[1][0]


def rows_like(call: Call, rows: int) -> torch.Tensor:
    """Memory for so many states, of the call's layout."""
    return torch.full_like(call.tensors["initial_state"][:1].expand(rows, -1, -1, -1), 7.0)


def v_first_of(call: Call) -> None:
    start = call.tensors["initial_state"]
    call.tensors["initial_state"] = start.transpose(2, 3).contiguous()
    call.options["state_v_first"] = True


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_after_every_64_tokens(function: Any, v_first: bool, device: str) -> None:
    """The final state is as without; a row that is no checkpoint, and those past the last, are left alone."""
    call = pack(function, device)
    if v_first:
        v_first_of(call)
    o, final = call()
    places = [(n, at) for n, length in enumerate(LENGTHS) for at in range(64, length + 1, 64)]
    for rows in (len(places) + 1, 3):
        kept = rows_like(call, rows)
        version = kept._version
        got = function(
            **call.tensors, **call.fixed, **call.options, checkpoint_every=64, checkpoints=kept,
        )  # fmt: skip
        assert kept._version > version
        assert error(got[0], o) < 1e-5 and error(got[1], final) < 1e-5
        for state, (n, at) in zip(kept, places, strict=False):
            assert error(state, wanted(call, n, at, v_first)) < 1e-5
        assert (kept[len(places) :] == 7).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_after_offsets(function: Any, index: torch.dtype, device: str) -> None:
    call = pack(function, device)
    kept = rows_like(call, len(LENGTHS))
    offsets = torch.tensor(OFFSETS, dtype=index, device=device)
    o, final = call()
    got = function(
        **call.tensors, **call.fixed, **call.options, checkpoint_offsets=offsets, checkpoints=kept
    )
    assert error(got[0], o) < 1e-5 and error(got[1], final) < 1e-5
    for n in (0, 2, 3):
        assert error(kept[n], wanted(call, n, OFFSETS[n])) < 1e-5
    assert (kept[[1, 4, 5]] == 7).all()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_of_a_pool(function: Any, device: str) -> None:
    """A null sequence has no checkpoint, and counts its rows all the same."""
    call = pack(function, device)
    start = call.tensors["initial_state"]
    slots = torch.tensor([5, 1, -1, 2, 0, 3], device=device)
    pool = torch.zeros_like(start)
    pool[slots.clamp_min(0)] = start
    pool[0] = start[4]
    tensors = {name: x for name, x in call.tensors.items() if name != "initial_state"}
    kept = rows_like(call, 6)
    offsets = torch.tensor([80, 0, 16, 64, 16, 192], device=device)
    assert (
        function(
            **tensors, **call.fixed, state=pool.clone(), state_index=slots, checkpoint_offsets=offsets,
            checkpoints=kept,
        )[1]
        is None
    )  # fmt: skip
    for n in (0, 3, 4, 5):
        assert error(kept[n], wanted(call, n, int(offsets[n]))) < 1e-5
    assert (kept[1:3] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_fp32_of_narrow_states(function: Any, dtype: torch.dtype, device: str) -> None:
    """Checkpoints are not rounded to the dtype of the states, given ones or a pool's."""
    call = pack(function, device)
    start = call.tensors["initial_state"].to(dtype)
    call.tensors["initial_state"] = start
    tensors = {name: x for name, x in call.tensors.items() if name != "initial_state"}
    offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    for states in ({"initial_state": start}, {"state": start.clone()}):
        kept = torch.full((len(LENGTHS), *start.shape[1:]), 7.0, device=device)
        function(**tensors, **call.fixed, **states, checkpoint_offsets=offsets, checkpoints=kept)
        for n in (0, 2, 3):
            assert error(kept[n], wanted(call, n, OFFSETS[n])) < 1e-5
            assert error(kept[n].to(dtype), wanted(call, n, OFFSETS[n])) > 1e-5
        assert (kept[[1, 4, 5]] == 7).all()


def test_resuming_and_compile(device: str) -> None:
    """Going on from a checkpoint is running through; a trace sees that checkpoints change."""
    call = make(ops.chunk_gated_delta_rule, torch.float32, device, T=192, states=False)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    o, final = ops.chunk_gated_delta_rule(**tensors, output_final_state=True)
    kept = torch.zeros_like(final)

    def run(kept: torch.Tensor) -> torch.Tensor:
        offset = torch.full((1,), 128, device=device)
        ops.chunk_gated_delta_rule(**tensors, checkpoint_offsets=offset, checkpoints=kept)
        return kept + 1

    torch._dynamo.reset()
    after = torch.compile(run, backend="aot_eager", fullgraph=True)(kept)
    assert torch.equal(after, kept + 1) and kept.any()
    rest = {name: x[:, 128:].contiguous() for name, x in tensors.items()}
    got = ops.chunk_gated_delta_rule(**rest, initial_state=kept, output_final_state=True)
    assert error(got[0], o[:, 128:]) < 1e-5 and error(got[1], final) < 1e-5


def bad(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, **changes}


MISTAKES = {
    "both": (
        lambda x: {**x, "checkpoint_offsets": torch.zeros(6, dtype=torch.int32)}, ValueError,
        "checkpoint_every and checkpoint_offsets are given",
    ),
    "no checkpoints": (bad(checkpoints=None), ValueError, "checkpoints is missing"),
    "checkpoints alone": (bad(checkpoint_every=None), ValueError, "checkpoints is given without"),
    "every": (bad(checkpoint_every=96), ValueError, "checkpoint_every is 96; it must be 0 or a multiple of 64"),
    "every of 0": (bad(checkpoint_every=0), ValueError, "checkpoint_every is 0; it must be a multiple"),
    "every as text": (bad(checkpoint_every="64"), TypeError, "checkpoint_every is str"),
    "offsets": (
        bad(checkpoint_every=None, checkpoint_offsets=torch.zeros(6)), TypeError,
        "checkpoint_offsets is torch.float32; it must be torch.int32 or torch.int64",
    ),
    "offsets' shape": (
        bad(checkpoint_every=None, checkpoint_offsets=torch.zeros(5, dtype=torch.int32)), ValueError,
        r"checkpoint_offsets has shape \[5\]; it must be",
    ),
    "dtype": (
        lambda x: {**x, "checkpoints": x["checkpoints"].half()}, TypeError, "checkpoints is torch.float16",
    ),
    "states' dtype": (
        lambda x: {**x, "checkpoints": x["checkpoints"].bfloat16()}, TypeError, "checkpoints is torch.bfloat16",
    ),
    "rank": (
        lambda x: {**x, "checkpoints": x["checkpoints"][0]}, ValueError, "checkpoints has 3 dimensions",
    ),
    "shape": (
        lambda x: {**x, "checkpoints": x["checkpoints"][:, :1]}, ValueError, "checkpoints has shape",
    ),
    "strides": (
        lambda x: {**x, "checkpoints": x["checkpoints"].transpose(2, 3).contiguous().transpose(2, 3)},
        ValueError, "checkpoints has strides",
    ),
    "overlap": (
        lambda x: {**x, "checkpoints": x["initial_state"][:6]}, ValueError, "checkpoints overlaps initial_state",
    ),
    "gradient": (
        lambda x: {**x, "q": x["q"].clone().requires_grad_()}, ValueError, "q requires a gradient; with checkpoints",
    ),
    "recompute": (bad(disable_recompute=True), ValueError, "disable_recompute is true"),
    "float64": (
        lambda x: {**x, **{name: x[name].double() for name in ("q", "k", "v")}}, TypeError,
        "q is torch.float64; with checkpoints",
    ),
    "no tensor": (bad(checkpoints=[1]), TypeError, "checkpoints is list; it must be a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_write_nothing(name: str) -> None:
    change, kind, message = MISTAKES[name]
    call = pack(ops.chunk_gated_delta_rule, "cpu")
    kept = rows_like(call, 6)
    given = {**call.tensors, **call.fixed, "checkpoint_every": 64, "checkpoints": kept}
    with pytest.raises(kind, match=message):
        ops.chunk_gated_delta_rule(**change(given))
    assert (kept == 7).all()
