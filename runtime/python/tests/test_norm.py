"""The norm of o, in every pass: RMSNorm of each value head's row, weighed and gated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Call, check_compiled_and_kept_gradients, check_gradients, make
from reference import error, recurrence
from wyvern import ops

FUNCTIONS = [
    ops.fused_recurrent_delta_rule, ops.fused_recurrent_gated_delta_rule, ops.fused_recurrent_kda,
    ops.fused_recurrent_gdn2,
]  # fmt: skip
CHUNKED = [
    ops.chunk_delta_rule, ops.chunk_gated_delta_rule, ops.chunk_kda, ops.chunk_gated_delta_product, ops.chunk_gdn2,
]  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}


def normalized(o: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """What the norm makes of o, in float64."""
    gate = ACTIVATIONS[given.get("norm_activation", "silu")](given["norm_gate"].double().cpu())
    weight = given["norm_weight"].double().cpu()
    return F.rms_norm(o.double().cpu(), o.shape[-1:], weight, given.get("norm_eps", 1e-6)) * gate


def batch(function: Callable[..., Any], device: str, dtype: torch.dtype, **sizes: int) -> Call:
    """Without gradients, with a norm of o."""
    steps = 2 if function is ops.chunk_gated_delta_product else 1
    call = make(function, dtype, device, steps=steps, **sizes)
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    q, v = call.tensors["q"], call.tensors["v"]
    call.fixed = {
        "norm_weight": torch.randn(v.shape[-1], device=device),
        "norm_gate": torch.randn(*q.shape[:2], *v.shape[2:], device=device).to(dtype),
    }
    return call


def exact(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    names = {"b": "erase", "w": "write"}
    exact = {names.get(name, name): x.double().cpu() for name, x in call.tensors.items()}
    return recurrence(**exact, **call.reference)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_are_normalized(function: Any, dtype: torch.dtype, activation: str, device: str) -> None:
    call = batch(function, device, dtype, B=3, T=4)
    call.fixed |= {"norm_activation": activation, "norm_eps": 1e-3}
    o, state = call()
    wanted, after = exact(call)
    assert o.dtype is dtype
    assert error(o, normalized(wanted, call.fixed)) < TOLERANCE[dtype]
    assert error(state, after) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", CHUNKED)
def test_rows_of_many_tokens(function: Any, dtype: torch.dtype, activation: str, device: str) -> None:
    """The gate is a slice of a wider row; a weight in the model's dtype; out."""
    call = batch(function, device, dtype, B=2, T=70)
    B, T, HV, V = call.fixed["norm_gate"].shape
    call.fixed["norm_gate"] = torch.randn(B, T, 3, HV, V, device=device).to(dtype)[:, :, 1]
    call.fixed["norm_weight"] = call.fixed["norm_weight"].to(dtype)
    call.fixed |= {"norm_activation": activation, "norm_eps": 1e-3}
    wanted, after = exact(call)
    call.fixed["out"] = torch.full([B, T, HV, V], float("nan"), device=device, dtype=dtype)
    o, state = call()
    assert o is call.fixed["out"]
    assert error(o, normalized(wanted, call.fixed)) < TOLERANCE[dtype]
    assert error(state, after) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_one_row(dtype: torch.dtype, device: str) -> None:
    """q, k, v and the gate of a token side by side, as one projection gives them; raw a and b; a weight in
    the model's dtype; out."""
    N, H, HV, K, V = 5, 2, 4, 32, 16
    sizes = [H * K, H * K, HV * V, HV * V]
    rows = torch.randn(N, 1, sum(sizes), device=device).to(dtype)
    q, k, v, z = (
        x.unflatten(-1, (-1, width)) for x, width in zip(rows.split(sizes, -1), (K, K, V, V), strict=True)
    )
    a, b = torch.randn(2, N, 1, HV, device=device).to(dtype)
    A_log, dt_bias = torch.randn(2, HV, device=device)
    pool = torch.randn(7, HV, V, K, device=device)
    index = torch.tensor([4, -1, 0, 6, 2], dtype=torch.int32, device=device)
    z[1] = float("nan")  # of no sequence
    out = torch.full([N, 1, HV, V], float("nan"), device=device, dtype=dtype)
    norm = {"norm_weight": torch.randn(V, device=device).to(dtype), "norm_gate": z}
    start = pool.clone()
    o, _ = ops.fused_recurrent_gated_delta_rule(
        q, k, v, a, beta=b, A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state=pool, state_index=index,
        state_v_first=True, out=out, **norm,
    )  # fmt: skip
    assert o is out and not out[1].any()
    live = [0, 2, 3, 4]
    wanted, after = recurrence(
        *(x[live].double().cpu() for x in (q, k, v, a, b)), A_log=A_log.double().cpu(),
        dt_bias=dt_bias.double().cpu(), gate=True, beta_sigmoid=True, l2norm=True, v_first=True,
        initial_state=start[index[live].long()].double().cpu(),
    )  # fmt: skip
    norm["norm_gate"] = z[live]
    assert error(out[live], normalized(wanted, norm)) < TOLERANCE[dtype]
    assert error(pool[index[live].long()], after) < TOLERANCE[dtype]


def test_every_token_of_drafts(device: str) -> None:
    """Null tokens' rows are 0 whatever their gates hold."""
    call = batch(ops.fused_recurrent_kda, device, torch.float32, B=2, T=3, states=False)
    call.options = {}
    v = call.tensors["v"]
    kept = torch.zeros(2, 3, v.shape[2], call.tensors["q"].shape[3], v.shape[3], device=device)
    parents = [[-1, 0, 0], [-1, 2, 0]]
    call.fixed["norm_gate"][1, 1] = float("nan")
    o, _ = call.function(
        **call.tensors, **call.fixed, intermediate_states=kept, parent=torch.tensor(parents, device=device),
        intermediate_index=torch.tensor([1, 0], device=device),
    )  # fmt: skip
    assert not o[1, 1].any()
    for n, path in ((0, [0, 1]), (0, [0, 2]), (1, [0]), (1, [0, 2])):
        rows = {name: x[n : n + 1, path].double().cpu() for name, x in call.tensors.items()}
        gate = {**call.fixed, "norm_gate": call.fixed["norm_gate"][n, path[-1]]}
        assert error(o[n, path[-1]], normalized(recurrence(**rows)[0][0, -1], gate)) < 1e-5


@pytest.mark.parametrize("function", [ops.fused_recurrent_gated_delta_rule, *CHUNKED])
def test_compiled(function: Any, device: str) -> None:
    call = batch(function, device, torch.float32, B=2, T=1 if function in FUNCTIONS else 70)
    torch._dynamo.reset()
    step = torch.compile(
        lambda given: call.function(**given, **call.options)[0] + 1, backend="aot_eager", fullgraph=True
    )
    assert error(step({**call.tensors, **call.fixed}), normalized(exact(call)[0], call.fixed) + 1) < 1e-5


def trained(function: Callable[..., Any], device: str, dtype: torch.dtype, **sizes: Any) -> Call:
    """With gradients of everything; the gate is a slice of a wider row."""
    steps = 2 if function is ops.chunk_gated_delta_product else 1
    call = make(function, dtype, device, steps=steps, **sizes)
    (B, T), (HV, V) = call.tensors["q"].shape[:2], call.tensors["v"].shape[2:]
    gate = torch.randn(B, T, 2, HV, V, device=device).to(dtype)[:, :, 1]
    call.tensors |= {"norm_weight": torch.randn(V, device=device).requires_grad_(), "norm_gate": gate.requires_grad_()}
    return call


def exact_gradients(call: Call, seeds: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of o and the final state by their gradients, in float64."""
    exact = {name: x.detach().double().cpu().requires_grad_() for name, x in call.tensors.items()}
    names = {"b": "erase", "w": "write"}
    given = {names.get(name, name): x for name, x in exact.items() if not name.startswith("norm_")}
    o, state = recurrence(**given, **{name: x.cpu() for name, x in call.fixed.items()}, **call.reference)
    o = normalized(o, exact | {name: x for name, x in call.options.items() if name.startswith("norm_")})
    return list(torch.autograd.grad([o, state], list(exact.values()), [x.double().cpu() for x in seeds]))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", CHUNKED)
def test_gradients(function: Any, dtype: torch.dtype, activation: str, device: str) -> None:
    """Of a pack with empty sequences for one of the gates."""
    packed = activation == "silu"
    call = trained(function, device, dtype, T=80, N=4 if packed else None)
    call.options |= {"norm_activation": activation, "norm_eps": 1e-3}
    if packed:
        call.fixed["cu_seqlens"] = torch.tensor([0, 13, 13, 80, 80], device=device)
    check_gradients(call, exact_gradients)


@pytest.mark.parametrize("function", CHUNKED)
def test_gradients_are_the_same_compiled_and_kept(function: Any, device: str) -> None:
    check_compiled_and_kept_gradients(trained(function, device, torch.float32))


def test_gradients_of_a_weight_in_the_models_dtype_and_of_samples(device: str) -> None:
    call = trained(ops.chunk_gated_delta_rule, device, torch.bfloat16)
    call.tensors["norm_weight"] = call.tensors["norm_weight"].detach().to(torch.bfloat16).requires_grad_()
    leaves = [x.detach() for x in call.leaves()]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        return call.function(**dict(zip(call.tensors, given, strict=True)), **call.options)[0].float().sum()

    at = list(call.tensors).index("norm_weight")
    wanted = torch.autograd.grad(call()[0].float().sum(), call.tensors["norm_weight"])[0]
    assert wanted.dtype is torch.bfloat16
    assert torch.equal(torch.func.grad(loss, at)(*leaves), wanted)
    both = torch.func.vmap(torch.func.grad(loss, at))(*(torch.stack([x, x]) for x in leaves))
    assert torch.equal(both[0], wanted) and torch.equal(both[1], wanted)


@pytest.mark.parametrize("given", ["out", "state", "checkpoints"])
def test_gradients_are_refused_beside_what_is_written(given: str) -> None:
    call = trained(ops.chunk_gated_delta_rule, "cpu", torch.float32, states=False)
    o, _ = call()
    written = {
        "out": {"out": torch.empty_like(o)}, "state": {"state": torch.zeros(1, 2, 32, 16)},
        "checkpoints": {"checkpoints": torch.zeros(1, 2, 32, 16), "checkpoint_every": 64},
    }[given]  # fmt: skip
    with pytest.raises(ValueError, match=f"^q requires a gradient; with {given}, .* under torch.no_grad"):
        call.function(**call.tensors, **written)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_decoding_are_refused(function: Any) -> None:
    call = batch(function, "cpu", torch.float32, B=2, T=3)
    last = list(call.tensors)[-2]  # beta, or w
    call.tensors[last].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{last} requires a gradient; .* with norm_gate: call the chunk function"):
        call()
    with pytest.raises(NotImplementedError, match="^norm_gate is given to a fused_recurrent function, which torch.func"):
        torch.func.grad(lambda x: call.function(**call.tensors | {last: x}, **call.fixed)[0].sum())(
            call.tensors[last].detach()
        )


MISTAKES: dict[str, tuple[dict[str, Any], type, str]] = {
    "no weight": ({"norm_weight": None}, ValueError, "norm_weight is missing; .* with norm_gate"),
    "no gate": ({"norm_gate": None}, ValueError, "norm_gate is missing; .* with norm_weight"),
    "activation": ({"norm_activation": "relu"}, ValueError, "norm_activation is 'relu'; .* 'silu', 'swish'"),
    "eps": ({"norm_eps": 0.0}, ValueError, "norm_eps is 0; it must be finite and above 0"),
    "shape": ({"norm_weight": torch.ones(15)}, ValueError, r"norm_weight has shape \[15\]; it must be .*16"),
    "integers": ({"norm_gate": torch.ones(2, 3, 2, 16).int()}, TypeError, "norm_gate is torch.int32"),
    "dtype": ({"norm_gate": torch.ones(2, 3, 2, 16).half()}, TypeError, "norm_gate is torch.float16"),
    "list": ({"norm_gate": [1]}, TypeError, "norm_gate is list; it must be a torch.Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("function", [ops.fused_recurrent_delta_rule, ops.chunk_delta_rule])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, function: Any) -> None:
    change, kind, message = MISTAKES[name]
    call = batch(function, "cpu", torch.float32, B=2, T=3, states=False)
    with pytest.raises(kind, match=message):
        call.function(**{**call.tensors, **call.fixed, **change})
