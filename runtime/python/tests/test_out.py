"""o in a tensor of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call, make, reference_of
from reference import error
from wyvern import ops

FUNCTIONS = [ops.__dict__[name] for name in ops.__all__ if name not in ("chunk_gdn", "fused_recurrent_gdn")]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def without_gradients(function: Callable[..., Any], device: str, dtype: Any = torch.float32) -> Call:
    call = make(function, dtype, device, steps=2 if "product" in function.__name__ else 1)
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    return call


def poisoned(call: Call) -> torch.Tensor:
    q, v = call.tensors["q"], call.tensors["v"]
    return q.new_full([*q.shape[:2], *v.shape[2:]], float("nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_o_is_written_there(function: Any, dtype: torch.dtype, device: str) -> None:
    """In the middle of a buffer, whose other elements stay."""
    call = without_gradients(function, device, dtype)
    _, (wanted, wanted_state) = reference_of(call)
    size = poisoned(call).numel()
    buffer = torch.full([size + 128], float("nan"), device=device, dtype=dtype)
    out = buffer[64 : size + 64].view_as(poisoned(call))
    version = out._version
    call.options["out"] = out
    o, state = call()
    assert o is out and out._version > version
    assert error(out, wanted) < TOLERANCE[dtype]
    assert error(state, wanted_state) < TOLERANCE[dtype]
    assert buffer[:64].isnan().all() and buffer[size + 64 :].isnan().all()


@pytest.mark.parametrize("function", [ops.chunk_kda, ops.fused_recurrent_kda])
def test_beside_a_pool(function: Any, device: str) -> None:
    call = without_gradients(function, device)
    _, (wanted, after) = reference_of(call)
    pool, out = call.tensors.pop("initial_state").clone(), poisoned(call)
    o, state = function(**call.tensors, state=pool, out=out)
    assert o is out and state is None
    assert error(out, wanted) < 1e-5 and error(pool, after) < 1e-5


def test_states_with_values_first(device: str) -> None:
    call = without_gradients(ops.chunk_gated_delta_rule, device)
    _, (wanted, after) = reference_of(call)
    call.tensors["initial_state"] = call.tensors["initial_state"].mT.contiguous()
    call.options |= {"state_v_first": True, "out": poisoned(call)}
    o, state = call()
    assert error(o, wanted) < 1e-5 and error(state, after.mT) < 1e-5


@pytest.mark.parametrize("function", [ops.chunk_gated_delta_rule, ops.fused_recurrent_gdn2])
def test_compiled(function: Any, device: str) -> None:
    call = without_gradients(function, device)
    _, (wanted, _) = reference_of(call)

    def step(out: torch.Tensor) -> torch.Tensor:
        o, _ = function(**call.tensors, out=out)
        return 2 * o + out  # of out as it is afterwards

    out = poisoned(call)
    torch._dynamo.reset()
    result = torch.compile(step, backend="aot_eager", fullgraph=True)(out)
    assert error(out, wanted) < 1e-5 and error(result, 3 * wanted) < 1e-5


def test_autocast(device: str) -> None:
    """out has the dtype in which o is computed."""
    call = without_gradients(ops.chunk_delta_rule, device)
    _, (wanted, _) = reference_of(call)
    out = poisoned(call).bfloat16()
    with torch.autocast(device, torch.bfloat16):
        assert ops.chunk_delta_rule(**call.tensors, out=out)[0] is out
        with pytest.raises(TypeError, match=r"out is torch.float32; it must be torch.bfloat16"):
            ops.chunk_delta_rule(**call.tensors, out=poisoned(call))
    assert error(out, wanted) < 1e-2


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type, str]] = {
    "list": (lambda x: {"out": [1]}, TypeError, "out is list; it must be a torch.Tensor"),
    "dtype": (lambda x: {"out": x["out"].half()}, TypeError, "out is torch.float16; it must be torch.float32"),
    "integers": (lambda x: {"out": x["out"].int()}, TypeError, "out is torch.int32; it must be torch.float32"),
    "shape": (lambda x: {"out": x["out"][:, 1:]}, ValueError, r"out has shape \[1, 69, 2, 16\]"),
    "rank": (lambda x: {"out": x["out"][0]}, ValueError, "out has 3 dimensions; it must have 4|out has shape"),
    "strides": (lambda x: {"out": x["out"].mT.contiguous().mT}, ValueError, "out has strides"),
    "rows": (
        lambda x: {"out": x["out"].new_empty([*x["out"].shape[:2], 4, 16])[:, :, :2]}, ValueError,
        "out has strides",
    ),
    "alignment": (
        lambda x: {"out": x["out"].new_empty(x["out"].numel() + 1)[1:].view_as(x["out"])}, ValueError,
        "out .*align",
    ),
    "device": (lambda x: {"out": x["out"].to("meta")}, ValueError, "out is on meta"),
    "overlap": (lambda x: {"out": x["v"]}, ValueError, "out overlaps v"),
    "gradient": (
        lambda x: {"q": x["q"].clone().requires_grad_()}, ValueError,
        "q requires a gradient; with out, .* under torch.no_grad",
    ),
    "gradient of out": (
        lambda x: {"out": x["out"].clone().requires_grad_()}, ValueError, "out requires a gradient",
    ),
    "float64": (
        lambda x: {name: x[name].double() for name in ("q", "k", "v")}, TypeError,
        "q is torch.float64; with out it must be",
    ),
    "recompute": (lambda x: {"disable_recompute": True}, ValueError, "disable_recompute is true; .* with out"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_write_nothing(name: str) -> None:
    change, kind, message = MISTAKES[name]
    call = without_gradients(ops.chunk_gated_delta_rule, "cpu")
    given = {**call.tensors, "out": poisoned(call)}
    values = call.tensors["v"].clone()
    with pytest.raises(kind, match=message):
        ops.chunk_gated_delta_rule(**{**given, **change(given)})
    assert given["out"].isnan().all() and torch.equal(call.tensors["v"], values)


def test_transforms_are_refused() -> None:
    call = without_gradients(ops.chunk_delta_rule, "cpu")
    out, q = poisoned(call), call.tensors.pop("q")
    with pytest.raises(NotImplementedError, match="out is updated in place"):
        torch.func.vmap(lambda x: ops.chunk_delta_rule(x, **call.tensors, out=out)[0])(q.unsqueeze(0))
