"""Shared by the tests: which devices there are, and random inputs of each operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers_every_run() -> None:
    """Random gradients and parameters repeat: a sum over all tokens (A_log's gradient) that happens to
    nearly vanish has a relative error without bound."""
    torch.manual_seed(0)


@dataclass
class Call:
    """An operator's function, its tensors by parameter, its options, and the same for the reference."""

    function: Callable[..., Any]
    tensors: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)  # tensors without gradient

    def leaves(self) -> list[Any]:
        return list(self.tensors.values())

    def __call__(self) -> tuple[Any, ...]:
        return self.function(**self.tensors, **self.fixed, **self.options)


# What the reference calls a parameter.
_REFERENCE_NAMES = {"b": "erase", "w": "write"}


def reference_of(call: Call) -> tuple[list[Any], tuple[Any, Any]]:
    """The inputs in float64, asking for gradients, and what the recurrence makes of them."""
    from reference import recurrence

    exact = {
        name: x.detach().double().cpu().requires_grad_() for name, x in call.tensors.items()
    }
    given = {_REFERENCE_NAMES.get(name, name): x for name, x in exact.items()}
    if "dt_bias" in given and given["g"].dim() == 4:
        given["dt_bias"] = given["dt_bias"].reshape(given["g"].shape[2:])
    fixed = {name: x.cpu() for name, x in call.fixed.items()}
    return list(exact.values()), recurrence(**given, **fixed, **call.reference)


def make(
    function: Callable[..., Any],
    dtype: Any = torch.float32,
    device: str = "cpu",
    *,
    B: int = 1,
    T: int = 70,
    H: int = 1,
    HV: int = 2,
    K: int = 32,
    V: int = 16,
    steps: int = 1,
    N: int | None = None,
    states: bool = True,
    seed: int = 0,
) -> Call:
    """A call on random inputs: rows of k of length 1, decays between 0.4 and 1, rates between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    def leaf(x: Any, kind: Any = dtype) -> Any:
        return x.to(device, kind).requires_grad_()

    name = function.__name__
    vector = "kda" in name or "gdn2" in name
    tensors = {
        "q": leaf(random(B, T, H, K)),
        "k": leaf(torch.nn.functional.normalize(random(B, T * steps, H, K), dim=-1)),
        "v": leaf(random(B, T * steps, HV, V)),
    }
    if "delta_rule" not in name or "gated" in name:
        shape = (B, T, HV, K) if vector else (B, T, HV)
        tensors["g"] = leaf(-random(*shape).sigmoid(), torch.float32)
    if "gdn2" in name:
        tensors["b"] = leaf(random(B, T, HV, K).sigmoid())
        tensors["w"] = leaf(random(B, T, HV, V).sigmoid())
    else:
        tensors["beta"] = leaf(random(B, T * steps, HV).sigmoid())
    if states:
        tensors["initial_state"] = leaf(random(N or B, HV, K, V), torch.float32)
    options = {"output_final_state": True}
    reference: dict[str, Any] = {}
    if steps != 1:
        options["num_householder"] = reference["steps"] = steps
    return Call(function, tensors, options, reference)


# Bounds of gradients of OF_ROWS, and of all others (runtime/SPECIFICATION.md, section 5).
GRADIENTS = {torch.float32: (2e-5, 5e-5), torch.bfloat16: (8e-3, 2e-2), torch.float16: (8e-3, 2e-2)}
OF_ROWS = ("q", "k", "v", "initial_state", "initial_conv_state")


def check_gradients(call: Call, exact: Callable[[Call, list[torch.Tensor]], list[torch.Tensor]]) -> None:
    """Gradients of all outputs by all tensors beside exact(call, the outputs' gradients)."""
    from reference import error

    outputs = call()
    seeds = [torch.randn_like(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, call.leaves(), seeds)
    rows, others = GRADIENTS[call.tensors["q"].dtype]
    for name, got, wanted in zip(call.tensors, gradients, exact(call, seeds), strict=True):
        assert got.dtype is call.tensors[name].dtype, name
        assert error(got, wanted) < (rows if name in OF_ROWS else others), name


def check_compiled_and_kept_gradients(call: Call) -> None:
    """Compiled they have the same bits; where what the forward pass computed is kept they are near."""
    from reference import error

    seeds = [torch.randn_like(x) for x in call()]
    wanted = torch.autograd.grad(call(), call.leaves(), seeds)
    torch._dynamo.reset()
    step = torch.compile(
        lambda *leaves: call.function(**dict(zip(call.tensors, leaves, strict=True)), **call.options),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    for one, other in zip(torch.autograd.grad(step(*call.leaves()), call.leaves(), seeds), wanted, strict=True):
        assert torch.equal(one, other)
    call.options["disable_recompute"] = True
    for one, other in zip(torch.autograd.grad(call(), call.leaves(), seeds), wanted, strict=True):
        assert error(one, other.double().cpu()) < 5e-5
