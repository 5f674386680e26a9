"""Every public function with every argument wrong in every way: a TypeError or ValueError that names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import make

from wyvern import ops, stages

T, CHUNK = 20, 16
FUNCTIONS = [ops.__dict__[name] for name in ops.__all__ if name not in ("chunk_gdn", "fused_recurrent_gdn")]
Wrong = tuple[str, str, dict[str, Any]]  # the argument, what is wrong with it, the call's changes


def wrong_tensors(name: str, x: torch.Tensor, optional: bool) -> Iterator[Wrong]:
    x = x.detach()
    values = {
        "float": 1.5,
        "list": [1.0],
        "text": "no",
        "storage": x.untyped_storage(),
        "fewer dimensions": x[(0,) * min(2, x.dim())],
        "int64": x.long(),
        "bool": x.bool(),
        "complex": x.to(torch.complex64),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
    }
    if not optional:
        values["None"] = None
    for what, value in values.items():
        yield name, what, {name: value}


BOUNDARIES = {
    "list": [0, T],
    "float": torch.tensor([0.0, T]),
    "int16": torch.tensor([0, T], dtype=torch.int16),
    "end": torch.tensor([0, T - 1]),
    "past the end": torch.tensor([0, T + 1]),
    "start": torch.tensor([1, T]),
    "order": torch.tensor([0, 12, 5, T]),
    "negative": torch.tensor([0, -5, T]),
    "empty": torch.tensor([], dtype=torch.int64),
    "dimensions": torch.tensor([[0, T]]),
    "meta": torch.tensor([0, T], device="meta"),
    "number": 3,
}
OTHERS: dict[str, dict[str, Any]] = {
    "cu_seqlens": BOUNDARIES,
    "chunk_size": {"0": 0, "negative": -1, "48": 48, "text": "64", "fraction": 64.5, "huge": 2**70},
    "scale": {"text": "0.5", "list": [1.0], "tensor": torch.ones(2), "complex": 1j},
    "precision": {"unknown": "fp32", "number": 3, "list": ["tf32"], "tensor": torch.ones(2)},
    "num_householder": {"0": 0, "negative": -1, "text": "2", "fraction": 2.0, "None": None},
}
STATES = {
    "float": 1.5,
    "list": [0],
    "dimensions": torch.zeros(1, 2, 32),
    "shape": torch.zeros(2, 2, 32, 16),
    "int64": torch.zeros(1, 2, 32, 16, dtype=torch.int64),
    "float64": torch.zeros(1, 2, 32, 16, dtype=torch.float64),
    "meta": torch.zeros(1, 2, 32, 16, device="meta"),
}
GATES = {
    "float": 1.0,
    "list": [0.0, 0.0],
    "text": "no",
    "shape": torch.zeros(3),
    "int64": torch.zeros(2, dtype=torch.int64),
    "meta": torch.zeros(2, device="meta"),
}
CHANNEL_DECAYS = {
    "float": 1.0,
    "text": "no",
    "dimensions": torch.zeros(1, T, 2),
    "channels": torch.zeros(1, T, 2, 31),
    "tokens": torch.zeros(1, T - 1, 2, 32),
    "int64": torch.zeros(1, T, 2, 32, dtype=torch.int64),
    "meta": torch.zeros(1, T, 2, 32, device="meta"),
}


def wrong_calls(function: Callable[..., Any], tensors: dict[str, torch.Tensor]) -> Iterator[Wrong]:
    parameters = inspect.signature(function).parameters
    for name, x in tensors.items():
        yield from wrong_tensors(name, x, parameters[name].default is None or name == "g")
    for name, values in OTHERS.items():
        for what, value in values.items() if name in parameters else ():
            yield name, what, {name: value}
    for what, value in STATES.items() if "initial_state" in parameters else ():
        yield "initial_state", what, {"initial_state": value}
    if "cu_seqlens_cpu" in parameters:
        for what, value in BOUNDARIES.items():
            # Of what the copy holds the message tells under the name of what it is a copy of.
            name = "cu_seqlens(_cpu)?"
            yield name, f"copy: {what}", {"cu_seqlens": torch.tensor([0, T]), "cu_seqlens_cpu": value}


def wrong_gates(function: Callable[..., Any]) -> Iterator[Wrong]:
    parameters = inspect.signature(function).parameters
    right = {"use_gate_in_kernel": True, "A_log": torch.zeros(2)}
    if "use_gate_in_kernel" in parameters:
        for name in ("A_log", "dt_bias"):
            for what, value in GATES.items():
                yield name, what, right | {name: value}
        yield "A_log", "None", right | {"A_log": None}
    if "lower_bound" in parameters:
        for what, value in {"text": "-5", "list": [-5.0], "-7": -7.0, "positive": 1.0}.items():
            yield "lower_bound", what, right | {"lower_bound": value}
    for what, value in CHANNEL_DECAYS.items() if "gk" in parameters else ():
        yield "gk", what, {"gk": value}
        yield "gk", f"alone: {what}", {"gk": value, "g": None}
    if "cu_seqlens_cpu" in parameters:
        yield "cu_seqlens_cpu", "alone", {"cu_seqlens_cpu": torch.tensor([0, T])}


def not_told(function: Callable[..., Any], right: dict[str, Any], calls: list[Wrong]) -> list[str]:
    """The calls that do not end with an error as it should be."""
    found = []
    for name, what, changes in calls:
        try:
            function(**right | changes)
        except (TypeError, ValueError) as error:
            if not re.search(rf"\b{name}\b", str(error)):
                found.append(f"{name}, {what}: {type(error).__name__}: {error}")
        except Exception as error:
            found.append(f"{name}, {what}: {type(error).__name__}: {error}")
        else:
            found.append(f"{name}, {what}: taken")
    return found


@pytest.mark.parametrize(
    ("dtype", "gradients"),
    [(torch.float32, True), (torch.float32, False), (torch.float64, True)],
    ids=["gradients", "no gradients", "float64"],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_an_operator(function: Callable[..., Any], dtype: torch.dtype, gradients: bool) -> None:
    call = make(function, dtype, T=T, steps=2 if "product" in function.__name__ else 1, states=False)
    right = {name: x.requires_grad_(gradients) for name, x in call.tensors.items()} | call.options
    function(**right)
    calls = [*wrong_calls(function, call.tensors), *wrong_gates(function)]
    if dtype is torch.float64:  # which is right for a state then
        calls = [one for one in calls if one[:2] != ("initial_state", "float64")]
    assert len(calls) > 60
    missed = not_told(function, right, calls)
    assert not missed


def stage_arguments() -> dict[str, dict[str, Any]]:
    q, k, w = torch.randn(1, T, 1, 32), torch.randn(1, T, 1, 32), torch.randn(1, T, 2, 32)
    v, g, beta = torch.randn(1, T, 2, 16), -torch.rand(1, T, 2), torch.rand(1, T, 2)
    A, h = torch.zeros(1, T, 2, CHUNK), torch.zeros(1, 2, 2, 32, 16)
    x, dy, weight = torch.randn(1, T, 24), torch.randn(1, T, 24), torch.randn(24, 4)
    conv = {"x": x, "weight": weight, "bias": torch.randn(24), "initial_state": torch.randn(1, 24, 3)}
    norm = {"x": x, "gate": torch.randn(1, T, 24), "weight": torch.randn(24)}
    size = {"chunk_size": CHUNK}
    return {
        "chunk_local_cumsum": {"g": g} | size,
        "chunk_scaled_dot_kkt_fwd": {"k": k, "g": g, "beta": beta} | size,
        "solve_tril": {"A": A},
        "recompute_w_u_fwd": {"k": k, "v": v, "beta": beta, "A": A, "g": g},
        "chunk_gated_delta_rule_fwd_h": {"k": k, "w": w, "u": v, "g": g} | size,
        "chunk_fwd_o": {"q": q, "k": k, "v": v, "h": h, "g": g} | size,
        "l2norm_fwd": {"x": q},
        "short_conv": conv,
        "short_conv_bwd": conv | {"dy": dy},
        "output_norm": norm,
        "output_norm_bwd": norm | {"dy": dy},
    }


@pytest.mark.parametrize("name", stage_arguments())
def test_a_stage(name: str) -> None:
    function, right = getattr(stages, name), stage_arguments()[name]
    function(**right)
    tensors = {key: x for key, x in right.items() if isinstance(x, torch.Tensor)}
    calls = list(wrong_calls(function, tensors))
    if name in ("l2norm_fwd", "output_norm", "output_norm_bwd"):  # of any number of dimensions but none
        calls = [one for one in calls if one[1] != "fewer dimensions"]
        calls.append(("x", "no dimension", {"x": torch.tensor(1.0)}))
    if "output_dtype" in inspect.signature(function).parameters:
        calls += [("output_dtype", str(kind), {"output_dtype": kind}) for kind in ("float32", torch.int64)]
    assert len(calls) > 9
    missed = not_told(function, right, calls)
    assert not missed


def test_every_stage_is_here() -> None:
    assert set(stage_arguments()) == {name for name in stages.__all__ if name != "RCP_LN2"}


def test_a_copy_of_boundaries_of_another_length() -> None:
    right = stage_arguments()["chunk_gated_delta_rule_fwd_h"] | {"cu_seqlens": torch.tensor([0, T])}
    with pytest.raises(ValueError, match="cu_seqlens_cpu has 3 entries; it must have 2"):
        stages.chunk_gated_delta_rule_fwd_h(**right, cu_seqlens_cpu=torch.tensor([0, 5, T]))
