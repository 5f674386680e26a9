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
