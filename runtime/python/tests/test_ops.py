"""Every operator and its gradients against the recurrence in float64."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import Call, make, reference_of
from reference import error

import wyvern
from wyvern import ops
from wyvern._extension import extension

# Bounds of runtime/SPECIFICATION.md, section 5: outputs, gradients of rows and states, of gates.
BOUNDS = {torch.float32: (1e-5, 2e-5, 5e-5), torch.bfloat16: (5e-3, 8e-3, 2e-2)}
TF32_BOUNDS = (1e-3, 2e-3, 4e-3)
GATES = ("g", "beta", "b", "w", "A_log", "dt_bias")


def exact(call: Call, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The outputs of the reference, random gradients of them, and what it makes of these."""
    leaves, outputs = reference_of(call)
    given = tuple(
        torch.randn(x.shape).to(kind).double()
        for x, kind in zip(outputs, (dtype, torch.float32), strict=True)
    )
    return outputs, given, torch.autograd.grad(outputs, leaves, given)


def check(
    call: Call, dtype: torch.dtype, bounds: tuple[float, ...] | None = None, wanted: tuple | None = None
) -> None:
    """Holds outputs and gradients to the reference's, or to these of it; all must be finite."""
    (wanted_o, wanted_state), (do, dht), wanted_gradients = wanted or exact(call, dtype)
    o, state = call()
    gradients = torch.autograd.grad((o, state), call.leaves(), (do.to(o), dht.to(state)))
    forward, rows, gates = bounds or BOUNDS[dtype]
    assert error(o, wanted_o) < forward and error(state, wanted_state) < forward
    assert o.dtype == dtype and state.dtype == torch.float32
    for (name, x), gradient, right in zip(
        call.tensors.items(), gradients, wanted_gradients, strict=True
    ):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype, name
        assert error(gradient, right) < (gates if name in GATES else rows), name


def pack(call: Call, boundaries: list[int], device: str, dtype: torch.dtype = torch.int64) -> None:
    call.fixed["cu_seqlens"] = torch.tensor(boundaries, device=device, dtype=dtype)


def leaf(x: torch.Tensor, dtype: torch.dtype, device: str) -> torch.Tensor:
    return x.to(device, dtype).requires_grad_()


def test_gated_delta_rule(device: str) -> None:
    check(make(ops.chunk_gated_delta_rule, device=device, B=2), torch.float32)


def test_gated_delta_rule_with_every_option(device: str) -> None:
    """Packed, bf16, the gate in the kernel with parameters in bf16, states with v first."""
    call = make(ops.chunk_gated_delta_rule, torch.bfloat16, device, N=3)
    pack(call, [0, 5, 5, 70], device, torch.int32)
    call.options |= {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
        "scale": 0.3,
        "cu_seqlens_cpu": torch.tensor([0, 5, 5, 70]),
    }
    call.tensors["initial_state"] = leaf(torch.randn(3, 2, 16, 32), torch.float32, device)
    call.tensors["A_log"] = leaf(torch.tensor([-0.5, 0.5]), torch.bfloat16, device)
    call.tensors["dt_bias"] = leaf(torch.tensor([0.25, -1.0]), torch.bfloat16, device)
    call.reference |= {
        "l2norm": True,
        "gate": True,
        "beta_sigmoid": True,
        "neg_eigval": True,
        "v_first": True,
        "scale": 0.3,
    }
    check(call, torch.bfloat16)


def test_delta_rule(device: str) -> None:
    call = make(ops.chunk_delta_rule, device=device)
    call.options |= {"use_qk_l2norm_in_kernel": True, "disable_recompute": True}
    call.reference["l2norm"] = True
    check(call, torch.float32)


def test_kda(device: str) -> None:
    call = make(ops.chunk_kda, device=device)
    call.options |= {"use_gate_in_kernel": True, "lower_bound": -3.0}
    call.tensors["A_log"] = leaf(torch.tensor([0.1, -0.2]), torch.float32, device)
    call.tensors["dt_bias"] = leaf(torch.randn(2 * 32), torch.float32, device)
    call.reference |= {"gate": True, "lower_bound": -3.0}
    check(call, torch.float32)


def test_kda_promises_a_bound(device: str) -> None:
    call = make(ops.chunk_kda, torch.bfloat16, device)
    call.options |= {"safe_gate": True, "disable_recompute": True}
    check(call, torch.bfloat16)


@pytest.mark.parametrize("gated", [True, False])
def test_gated_delta_product(device: str, gated: bool) -> None:
    call = make(ops.chunk_gated_delta_product, device=device, T=40, steps=2, N=2)
    pack(call, [0, 11, 40], device)
    if not gated:
        del call.tensors["g"]
        call.options["g"] = None
    check(call, torch.float32)


def test_gdn2(device: str) -> None:
    check(make(ops.chunk_gdn2, device=device), torch.float32)


@pytest.mark.parametrize(
    "function",
    [
        ops.fused_recurrent_gated_delta_rule,
        ops.fused_recurrent_delta_rule,
        ops.fused_recurrent_kda,
        ops.fused_recurrent_gdn2,
    ],
    ids=lambda function: function.__name__,
)
def test_recurrent(device: str, function) -> None:
    check(make(function, device=device, T=3), torch.float32)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_precision(device: str, precision: str) -> None:
    """It is the floor of the problem in each pass."""
    for function, T in ((ops.chunk_kda, 70), (ops.fused_recurrent_kda, 3)):
        call = make(function, device=device, T=T, V=24)
        call.options["precision"] = precision
        check(call, torch.float32, TF32_BOUNDS if precision == "tf32" else None)
    keys = [one["problem"] for one in wyvern.prepared()]
    floors = [key for key in keys if f"/floor={precision}/" in key]
    for stage in ("forward", "backward", "recurrent"):
        assert any(key.startswith(f"kda/{stage}/H=1,HV=2,K=32,V=24/") for key in floors)
    with pytest.raises(ValueError, match="precision is 'fp32'.*'tf32', 'tf32x3', 'ieee'"):
        ops.chunk_kda(**call.tensors, precision="fp32")


def test_recurrent_with_a_decay_for_key_channels(device: str) -> None:
    """g and gk together decay as their sum; beta is ones where it is absent."""
    call = make(ops.fused_recurrent_gated_delta_rule, device=device, T=3)
    g = call.tensors.pop("g").detach()
    beta = call.tensors.pop("beta")
    gk = -torch.rand(1, 3, 2, 32, device=device)
    o, state = ops.fused_recurrent_gated_delta_rule(
        **call.tensors, g=g, gk=gk, output_final_state=True
    )
    call.tensors |= {"g": gk + g[..., None], "beta": torch.ones_like(beta)}
    _, (wanted_o, wanted_state) = reference_of(call)
    assert error(o, wanted_o) < 1e-5 and error(state, wanted_state) < 1e-5


def test_states_between_chunks(device: str) -> None:
    """The states before each chunk, of a packed batch one after the other."""
    call = make(ops.chunk_kda, device=device, T=100, N=3)
    boundaries = [0, 70, 70, 100]
    pack(call, boundaries, device)
    with torch.no_grad():
        _, _, states = ops.chunk_kda(
            **call.tensors, **call.fixed, **call.options, return_intermediate_states=True
        )
    assert states.shape == (1, 3, 2, 32, 16)
    initial = call.tensors["initial_state"].detach()
    assert error(states[0, 0], initial[0]) < 1e-6 and error(states[0, 2], initial[2]) < 1e-6
    for name in ("q", "k", "v", "g", "beta"):
        call.tensors[name] = call.tensors[name].detach()[:, :64]
    call.tensors["initial_state"] = initial[:1]
    call.fixed.clear()
    _, (_, after_64) = reference_of(call)
    assert error(states[0, 1], after_64[0]) < 1e-5
    with pytest.raises(ValueError, match="return_intermediate_states"):
        q = call.tensors["q"].requires_grad_()
        ops.chunk_kda(**call.tensors | {"q": q}, return_intermediate_states=True)
    many = {name: x[None] for name, x in call.tensors.items()}
    # Within a transform a tensor that requires a gradient does not show it.
    with pytest.raises(ValueError, match="return_intermediate_states"):
        torch.func.vmap(lambda x: ops.chunk_kda(**x, return_intermediate_states=True))(many)


@pytest.mark.parametrize("function", [ops.chunk_kda, ops.fused_recurrent_gated_delta_rule])
@torch.no_grad()
def test_batch_invariant(function) -> None:
    """A sequence alone, in a pack, and in two pieces, bit by bit; nobody asks for gradients of it."""
    call = make(function, device="cpu", T=200)
    x = {name: tensor.detach() for name, tensor in call.tensors.items() if name != "initial_state"}

    def run(first: int, end: int, **options) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = {name: tensor[:, first:end] for name, tensor in x.items()}
        return function(**tokens, output_final_state=True, batch_invariant=True, **options)

    o, state = run(70, 200)
    ends = torch.tensor([0, 70, 70, 200])
    packed, states = run(0, 200, cu_seqlens=ends)
    assert torch.equal(packed[:, 70:], o) and torch.equal(states[2:], state)
    start, middle = run(70, 134)
    rest, end = run(134, 200, initial_state=middle)
    assert torch.equal(torch.cat([start, rest], 1), o) and torch.equal(end, state)
    with torch.enable_grad(), pytest.raises(ValueError, match="batch_invariant is true; .*no_grad"):
        function(**x | {"q": x["q"].requires_grad_()}, batch_invariant=True)


@pytest.mark.parametrize("function", [ops.chunk_gated_delta_rule, ops.chunk_kda])
def test_seqlens_hint(function, device: str) -> None:
    """Right or wrong it is of the problem's key where it says that the pack is uneven, and of no result."""
    call = make(function, device=device, T=300, N=5, V=20)
    pack(call, [0, 3, 203, 203, 231, 300], device)  # a mean of 60

    def prepared_for() -> set[str]:
        """The longest sequences of the keys, a forward and a backward pass each."""
        keys = [one["problem"] for one in wyvern.prepared() if one["device"].startswith(device)]
        found = [re.findall(r"/longest=(\d+)", key) for key in keys]
        assert len(keys) % 2 == 0
        return {longest[0] if longest else "" for longest in found}

    wanted = exact(call, torch.float32)
    for options, longest in (
        ({}, ""),
        ({"seqlens_hint": 0}, ""),
        ({"seqlens_hint": 89}, ""),
        ({"seqlens_hint": 200}, "256"),
        ({"seqlens_hint": 1 << 30}, "512"),
        ({"cu_seqlens_cpu": call.fixed["cu_seqlens"].cpu()}, "256"),
        ({"cu_seqlens_cpu": call.fixed["cu_seqlens"].cpu(), "seqlens_hint": 0}, ""),
    ):
        extension().wyvern_extension_forget()
        call.options = {"output_final_state": True} | options
        check(call, torch.float32, wanted=wanted)
        assert prepared_for() == {longest}, options

    extension().wyvern_extension_forget()
    even = make(function, device=device, T=300, N=5, V=20)
    pack(even, [0, 60, 120, 180, 240, 300], device)
    wanted = exact(even, torch.float32)
    check(even, torch.float32, wanted=wanted)
    even.options["cu_seqlens_cpu"] = even.fixed["cu_seqlens"].cpu()
    check(even, torch.float32, wanted=wanted)
    assert prepared_for() == {""} and len(wyvern.prepared()) == 2  # the same problem

    given = {**call.tensors, **call.fixed}
    with pytest.raises(ValueError, match="seqlens_hint is 8; it must be absent unless the batch is packed"):
        function(**call.tensors | {"initial_state": None}, seqlens_hint=8)
    with pytest.raises(ValueError, match="seqlens_hint is -1"):
        function(**given, seqlens_hint=-1)
    with pytest.raises(TypeError, match="seqlens_hint"):
        function(**given, seqlens_hint="long")


def test_no_tokens_give_the_initial_state_back(device: str) -> None:
    call = make(ops.chunk_gated_delta_rule, device=device, T=0)
    o, state = call()
    assert o.shape == (1, 0, 2, 16)
    assert torch.equal(state, call.tensors["initial_state"])


def test_half_precision_states_and_gates_of_another_dtype(device: str) -> None:
    """States in fp16 are taken as they are; beta in fp16 beside bf16 is cast."""
    call = make(ops.fused_recurrent_gated_delta_rule, torch.bfloat16, device, T=3)
    wanted, _ = call()
    for name, dtype in (("initial_state", torch.float16), ("beta", torch.float16)):
        call.tensors[name] = call.tensors[name].detach().to(dtype).requires_grad_()
    o, state = call()
    assert error(o, wanted) < 1e-2
    for x, gradient in zip(
        call.leaves(), torch.autograd.grad((o.sum(), state.sum()), call.leaves()), strict=True
    ):
        assert gradient.dtype == x.dtype
