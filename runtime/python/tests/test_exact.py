"""Operators of float64 tensors: values, derivatives of every kind, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Call, make
from reference import error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from wyvern import ops

SIZES = {"H": 1, "HV": 2, "K": 3, "V": 2}
GATE = {"use_gate_in_kernel": True, "A_log": torch.tensor([0.1, -0.2])}
PACKED = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "cu_seqlens_cpu": torch.tensor([0, 2, 2, 5])}
NORM = {"norm_weight": torch.tensor([0.7, -1.2]), "norm_gate": torch.linspace(-2, 3, 20).reshape(1, 5, 2, 2)}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "delta rule": (ops.chunk_delta_rule, {"B": 2}, {"use_qk_l2norm_in_kernel": True}),
    "gated, packed": (
        ops.chunk_gated_delta_rule,
        {"N": 3},
        PACKED | {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "scale": 0.3},
    ),
    "gated, gate": (ops.chunk_gated_delta_rule, {}, GATE | {"dt_bias": torch.tensor([0.3, -1.0])}),
    "kda": (ops.chunk_kda, {}, {}),
    "kda, bound": (ops.chunk_kda, {}, GATE | {"lower_bound": -3.0, "dt_bias": torch.ones(2, 3)}),
    "product": (ops.chunk_gated_delta_product, {"steps": 2}, {}),
    "gdn2": (ops.chunk_gdn2, {}, {}),
    "norm": (ops.chunk_gated_delta_rule, {}, NORM),
    "norm of kda, packed": (ops.chunk_kda, {"N": 3}, PACKED | NORM | {"norm_activation": "sigmoid"}),
    "recurrent": (ops.fused_recurrent_gated_delta_rule, {}, {}),
    "recurrent kda": (ops.fused_recurrent_kda, {}, {"use_beta_sigmoid_in_kernel": True}),
}


def call_of(what: str) -> Call:
    """In float32."""
    function, sizes, options = CALLS[what]
    call = make(function, T=5, **SIZES | sizes)
    for name, x in options.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            call.tensors[name] = x.clone().requires_grad_()
        else:
            call.options[name] = x
    return call


def exact(call: Call) -> list[torch.Tensor]:
    """Its tensors in float64, asking for gradients."""
    return [x.detach().double().requires_grad_() for x in call.leaves()]


def by_position(call: Call) -> Callable[..., Any]:
    def function(*leaves: torch.Tensor) -> Any:
        return call.function(**dict(zip(call.tensors, leaves, strict=True)), **call.options)

    return function


@pytest.mark.parametrize("what", CALLS)
def test_gradcheck(what: str) -> None:
    call = call_of(what)
    assert gradcheck(by_position(call), exact(call), check_forward_ad=True)


def test_second_derivatives() -> None:
    call = make(ops.chunk_gated_delta_rule, T=2, **SIZES)
    call.tensors |= {"norm_weight": NORM["norm_weight"], "norm_gate": NORM["norm_gate"][:, :2]}
    assert gradgradcheck(by_position(call), exact(call))


@pytest.mark.parametrize("what", CALLS)
def test_it_is_what_the_kernels_compute(what: str) -> None:
    """In float32, of the same numbers."""
    call = call_of(what)
    leaves = exact(call)
    wanted, got = by_position(call)(*leaves), call()
    seeds = [torch.randn_like(x) for x in wanted]
    exactly = torch.autograd.grad(wanted, leaves, seeds)
    gradients = torch.autograd.grad(got, call.leaves(), [x.float() for x in seeds])
    assert all(x.dtype is torch.float64 for x in (*wanted, *exactly))
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < 1e-5
    for one, other in zip(gradients, exactly, strict=True):
        assert error(one, other) < 5e-5


def test_vmap() -> None:
    call = make(ops.chunk_kda, T=5, **SIZES)
    leaves = [x.detach() for x in exact(call)]
    function = by_position(call)
    o, state = torch.func.vmap(function)(*(torch.stack([x, 0.5 * x]) for x in leaves))
    for i, factor in enumerate((1, 0.5)):
        wanted = function(*(factor * x for x in leaves))
        assert error(o[i], wanted[0]) < 1e-14 and error(state[i], wanted[1]) < 1e-14


def test_states_and_gates_of_other_dtypes() -> None:
    call = make(ops.chunk_gated_delta_rule, torch.float64, T=5, **SIZES)
    assert {call.tensors[name].dtype for name in ("g", "initial_state")} == {torch.float32}
    o, state = call()
    assert o.dtype is torch.float64 and state.dtype is torch.float64
    gradients = torch.autograd.grad(o.sum() + state.sum(), call.leaves())
    assert [x.dtype for x in gradients] == [x.dtype for x in call.leaves()]


def test_what_is_refused() -> None:
    call = make(ops.chunk_kda, torch.float64, T=5)
    with pytest.raises(ValueError, match="^return_intermediate_states is true.*float64"):
        ops.chunk_kda(**call.tensors, return_intermediate_states=True)
    for name in ("k", "v"):
        message = f"^q is torch.float64; it must be .* where {name} is torch.float32"
        with pytest.raises(TypeError, match=message):
            ops.chunk_kda(**call.tensors | {name: call.tensors[name].float()})
    with FakeTensorMode():  # a GPU's tensors without one
        on_gpu = {
            name: torch.empty(x.shape, dtype=x.dtype, device="cuda")
            for name, x in call.tensors.items()
        }
    with pytest.raises(TypeError, match="^q is on cuda:0 .*float64.* on the CPU alone"):
        ops.chunk_kda(**on_gpu)
