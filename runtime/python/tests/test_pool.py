"""States in a pool, updated in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call, make
from reference import error, recurrence
from wyvern import ops

FUNCTIONS = [
    ops.chunk_delta_rule,
    ops.chunk_gated_delta_rule,
    ops.chunk_kda,
    ops.fused_recurrent_delta_rule,
    ops.fused_recurrent_gated_delta_rule,
    ops.fused_recurrent_kda,
]
LENGTHS = [33, 0, 70, 5, 17]
FROM, TO, SEEN = [6, -1, 3, 1, 99], [6, 2, 5, 1, 4], [True, True, True, False, True]


def pack(function: Callable[..., Any], device: str, dtype: torch.dtype = torch.float32) -> Call:
    """A packed batch without states."""
    call = make(function, dtype, device, T=sum(LENGTHS), N=len(LENGTHS), states=False)
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(device)
    call.fixed["cu_seqlens"] = ends
    call.options.pop("output_final_state", None)
    return call


def pool_like(
    call: Call, slots: int, v_first: bool = False, apart: int = 0, dtype: Any = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool on the call's device, its slots so many elements more than they need apart, and its memory."""
    q, v = call.tensors["q"], call.tensors["v"]
    shape = [v.shape[2], *((v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3]))]
    size = shape[0] * shape[1] * shape[2]
    memory = torch.randn(slots * (size + apart), generator=torch.Generator().manual_seed(5))
    memory = memory.to(q.device, dtype)
    strides = [size + apart, shape[1] * shape[2], shape[2], 1]
    return torch.as_strided(memory, [slots, *shape], strides), memory


def wanted(call: Call, pool: torch.Tensor, v_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the pool afterwards, by the recurrence."""
    exact = {name: x.double().cpu() for name, x in call.tensors.items()}
    after = pool.double().cpu().clone()
    o = torch.zeros_like(exact["v"])
    ends = call.fixed["cu_seqlens"].tolist()
    for n, (source, to, seen) in enumerate(zip(FROM, TO, SEEN, strict=True)):
        if not (0 <= source < len(pool) and 0 <= to < len(pool)):
            continue
        rows = {name: x[:, ends[n] : ends[n + 1]] for name, x in exact.items()}
        start = pool[source : source + 1].double().cpu() if seen else None
        part, final = recurrence(**rows, initial_state=start, v_first=v_first)
        o[:, ends[n] : ends[n + 1]] = part
        after[to] = final[0]
    return o, after


def indices(device: str, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    return {
        "state_index": torch.tensor(FROM, dtype=dtype, device=device),
        "output_state_index": torch.tensor(TO, dtype=dtype, device=device),
        "has_initial_state": torch.tensor(SEEN, device=device),
    }


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("apart", [0, 12])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_matches_the_recurrence(function: Any, apart: int, v_first: bool, device: str) -> None:
    """Slots that nobody writes, and what lies between them, keep their bits; null sequences read nothing."""
    call = pack(function, device)
    pool, memory = pool_like(call, 8, v_first, apart)
    o, after = wanted(call, pool, v_first)
    ends = call.fixed["cu_seqlens"].tolist()
    for n in (1, 4):  # null
        for x in call.tensors.values():
            x[:, ends[n] : ends[n + 1]] = float("nan")
    before = memory.clone()
    version = pool._version
    got, final = function(
        **call.tensors, **call.fixed, state=pool, state_v_first=v_first,
        **indices(device, torch.int64 if v_first else torch.int32),
    )  # fmt: skip
    assert final is None
    assert pool._version > version
    assert error(got, o) < 1e-5
    assert not got[:, ends[4] :].any()
    assert error(pool, after) < 1e-5
    written = torch.zeros(len(memory), dtype=torch.bool)
    for slot in (6, 5, 1):
        first = slot * pool.stride(0)
        written[first : first + pool[0].numel()] = True
    assert torch.equal(memory.cpu()[~written], before.cpu()[~written])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_pieces_in_place_are_the_whole(function: Any, device: str) -> None:
    """Without index tensors slot n is sequence n's; null_slots says whether 0 is one."""
    call = make(function, torch.float32, device, T=96, states=False)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    o, final = function(**tensors, output_final_state=True)
    pool = torch.full_like(final, float("nan"))
    seen = torch.zeros(1, dtype=torch.bool, device=device)
    parts = []
    for first, last in ((0, 64), (64, 96)):
        piece = {name: x[:, first:last].contiguous() for name, x in tensors.items()}
        parts.append(function(**piece, state=pool, has_initial_state=seen)[0])
        seen = ~seen
    assert error(torch.cat(parts, 1), o) < 1e-5
    assert error(pool, final) < 1e-5
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    kept = pool.clone()
    assert not function(**tensors, state=pool, state_index=zero, null_slots="non-positive")[0].any()
    assert torch.equal(pool, kept)
    pool.zero_()
    assert function(**tensors, state=pool, state_index=zero)[0].any()
    assert pool.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pools_of_16_bits_and_compile(dtype: torch.dtype, device: str) -> None:
    call = pack(ops.chunk_gated_delta_rule, device, torch.bfloat16)
    pool, _ = pool_like(call, 8, dtype=dtype)
    other = pool.clone()
    wanted_o, after = wanted(call, pool, v_first=False)
    o, _ = ops.chunk_gated_delta_rule(**call.tensors, **call.fixed, state=pool, **indices(device))
    assert error(o, wanted_o) < 5e-3
    assert error(pool, after) < 5e-3

    def step(state: torch.Tensor) -> torch.Tensor:
        given = ops.chunk_gated_delta_rule(**call.tensors, **call.fixed, state=state, **indices(device))[0]
        return given + state.float().sum()  # of the pool as it is afterwards

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(other)
    assert torch.equal(other, pool)
    assert torch.equal(compiled, o + pool.float().sum())


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float8_e4m3fn, 2**-3 / 12**0.5), (torch.float8_e5m2, 2**-2 / 12**0.5)]
)
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float8_pools_have_scales(
    function: Any, v_first: bool, dtype: torch.dtype, rounding: float, device: str
) -> None:
    call = pack(function, device)
    plain, _ = pool_like(call, 8, v_first)
    pool = plain.to(dtype)
    generator = torch.Generator().manual_seed(6)
    scale = torch.rand(pool.shape[:2], generator=generator).add(0.5).to(device)
    before = scale.clone()
    o, after = wanted(call, pool.float() * scale[..., None, None], v_first)
    got, _ = function(
        **call.tensors, **call.fixed, state=pool, state_scale=scale, state_v_first=v_first, **indices(device)
    )
    assert error(got, o) < 1e-5
    assert torch.equal(scale, before)
    assert error(pool.float() * scale[..., None, None], after) < rounding


def test_saved_pools_are_noticed(device: str) -> None:
    call = make(ops.chunk_delta_rule, torch.float32, device, states=False)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    pool, _ = pool_like(call, 1)
    weight = torch.ones((), device=device, requires_grad=True)
    product = (weight * pool).sum()
    ops.chunk_delta_rule(**tensors, state=pool)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def bad(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, **changes}


MISTAKES = {
    "index without state": (bad(state=None), ValueError, "state_index is given without state"),
    "zero without index": (
        bad(state_index=None, null_slots="non-positive"), ValueError, "null_slots is 'non-positive' without",
    ),
    "null_slots": (bad(null_slots="none"), ValueError, "null_slots is 'none'; it must be 'negative' or"),
    "output index alone": (
        lambda x: {**x, "output_state_index": x["state_index"], "state_index": None},
        ValueError, "output_state_index is given without state_index",
    ),
    "final state": (bad(output_final_state=True), ValueError, "output_final_state is true"),
    "initial state": (
        lambda x: {**x, "initial_state": x["state"].clone()}, ValueError, "initial_state is given",
    ),
    "recompute": (bad(disable_recompute=True), ValueError, "disable_recompute is true"),
    "dtype": (lambda x: {**x, "state": x["state"].double()}, TypeError, "state is torch.float64; it must be"),
    "index dtype": (
        lambda x: {**x, "state_index": x["state_index"].float()}, TypeError,
        "state_index is torch.float32; it must be torch.int32 or torch.int64",
    ),
    "index dtypes": (
        lambda x: {**x, "output_state_index": x["state_index"].long()}, TypeError,
        "output_state_index is torch.int64; it must be torch.int32",
    ),
    "flags": (
        lambda x: {**x, "has_initial_state": x["state_index"]}, TypeError,
        "has_initial_state is torch.int32; it must be torch.bool",
    ),
    "scale of float32": (
        lambda x: {**x, "state_scale": torch.ones(8, 2)}, ValueError,
        "state_scale is given with a state of torch.float32",
    ),
    "no scale": (
        lambda x: {**x, "state": x["state"].to(torch.float8_e4m3fn)}, ValueError,
        "state_scale is missing; it must be given with a state of torch.float8_e4m3fn",
    ),
    "scale's shape": (
        lambda x: {**x, "state": x["state"].to(torch.float8_e5m2), "state_scale": torch.ones(3, 2)}, ValueError,
        r"state_scale has shape \[3, 2\]; it must be",
    ),
    "scale's dtype": (
        lambda x: {
            **x, "state": x["state"].to(torch.float8_e5m2), "state_scale": torch.ones(8, 2).double()
        }, TypeError,
        "state_scale is torch.float64; it must be",
    ),
    "rank": (lambda x: {**x, "state": x["state"][0]}, ValueError, "state has 3 dimensions; it must have 4"),
    "shape": (
        lambda x: {**x, "state": x["state"][:, :1]}, ValueError, "state has shape",
    ),
    "index shape": (
        lambda x: {**x, "state_index": x["state_index"][:2]}, ValueError, r"state_index has shape \[2\]",
    ),
    "strides": (
        lambda x: {**x, "state": x["state"].transpose(2, 3).contiguous().transpose(2, 3)}, ValueError,
        "state has strides .* contiguous slots",
    ),
    "expanded": (
        lambda x: {**x, "state": x["state"][:1].expand(8, -1, -1, -1)}, ValueError, "state has strides",
    ),
    "gradient": (
        lambda x: {**x, "q": x["q"].clone().requires_grad_()}, ValueError,
        "q requires a gradient; with state",
    ),
    "gradient of the pool": (
        lambda x: {**x, "state": x["state"].clone().requires_grad_()}, ValueError,
        "state requires a gradient",
    ),
    "float64": (
        lambda x: {**x, **{name: x[name].double() for name in ("q", "k", "v")}}, TypeError,
        "q is torch.float64; with state",
    ),
    "no tensor": (bad(state=[1]), TypeError, "state is list; it must be a torch.Tensor"),
    "no index": (bad(state_index=[1]), TypeError, "state_index is list; it must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_write_nothing(name: str) -> None:
    change, kind, message = MISTAKES[name]
    call = pack(ops.chunk_gated_delta_rule, "cpu")
    pool, _ = pool_like(call, 8)
    before = pool.clone()
    given = {**call.tensors, **call.fixed, "state": pool, "state_index": indices("cpu")["state_index"]}
    with pytest.raises(kind, match=message):
        ops.chunk_gated_delta_rule(**change(given))
    assert torch.equal(pool, before)


def test_transforms_are_refused() -> None:
    call = make(ops.chunk_delta_rule, states=False)
    tensors = [x.detach().unsqueeze(0) for x in call.tensors.values()]
    pool, _ = pool_like(call, 1)
    with pytest.raises(NotImplementedError, match="updated in place"):
        torch.func.vmap(lambda *x: ops.chunk_delta_rule(*x, state=pool)[0])(*tensors)
