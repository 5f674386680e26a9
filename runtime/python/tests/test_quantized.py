"""o in 8 bits with scales: the bits of quantizing the o that the same call else gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Call, make
from wyvern import layers, ops

E4M3 = torch.float8_e4m3fn
FUNCTIONS = [
    ops.chunk_delta_rule, ops.chunk_gated_delta_rule, ops.chunk_kda, ops.chunk_gated_delta_product, ops.chunk_gdn2,
    ops.fused_recurrent_delta_rule, ops.fused_recurrent_gated_delta_rule, ops.fused_recurrent_kda,
    ops.fused_recurrent_gdn2,
]  # fmt: skip
LAYERS = [layers.gated_delta_net, layers.kimi_delta, layers.delta_net, layers.gated_delta_product, layers.gdn2]


def quantized(o: torch.Tensor, tokens_last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Of o of the dtype of q, and its scales."""
    B, T, HV, V = o.shape
    groups = o.float().reshape(B * T, HV * V // 128, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    codes = (groups / scale.unsqueeze(-1)).clamp(-448, 448).to(E4M3)
    if tokens_last:
        scale = F.pad(scale, (0, 0, 0, -(B * T) % 4)).T.contiguous()
    return codes.reshape(o.shape), scale


def check(made: Any, o: torch.Tensor, tokens_last: bool = False) -> None:
    codes, scale = quantized(o, tokens_last)
    assert made[0].dtype is E4M3 and made[1].dtype is torch.float32
    assert torch.equal(made[0].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(made[1], scale)


def batch(function: Callable[..., Any], device: str, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Call:
    """Without gradients; z is a slice of a wider row."""
    steps = 2 if function is ops.chunk_gated_delta_product else 1
    call = make(function, dtype, device, steps=steps, **{"K": 64, "V": 128, **sizes})
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    q, v = call.tensors["q"], call.tensors["v"]
    z = torch.randn(*q.shape[:2], v.shape[2] * v.shape[3] + 64, device=device).to(dtype)
    call.fixed = {
        "norm_weight": torch.randn(v.shape[-1], device=device),
        "norm_gate": z[..., 64:].unflatten(-1, v.shape[2:]),
    }
    return call


def run(call: Call, **more: Any) -> Any:
    return call.function(**call.tensors, **call.fixed, **call.options, **more)


@pytest.mark.parametrize("tokens_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_equals_quantizing_o(function: Any, dtype: torch.dtype, tokens_last: bool, device: str) -> None:
    call = batch(function, device, dtype, B=3, T=3, V=256)
    o, state = call()
    made, after = run(call, output_dtype=E4M3, output_scale_tokens_last=tokens_last)
    check(made, o, tokens_last)
    assert torch.equal(after, state)


@pytest.mark.parametrize("function", [ops.chunk_kda, ops.chunk_gated_delta_rule, ops.fused_recurrent_kda])
def test_packed_in_a_pool_and_where_the_caller_says(function: Any, device: str) -> None:
    """With a null sequence, whose rows are 0 and have the least scale."""
    call = batch(function, device, T=9, N=3)
    bounds = torch.tensor([0, 2, 6, 9], device=device)
    pool = call.tensors.pop("initial_state")
    call.fixed |= {"cu_seqlens": bounds, "state_index": torch.tensor([2, -1, 0], device=device)}
    del call.options["output_final_state"]
    o, _ = run(call, state=pool.clone())
    out = torch.full(o.shape, float("nan"), device=device).to(E4M3)
    made, _ = run(call, state=pool.clone(), output_dtype=E4M3, output_scale_tokens_last=True, out=out)
    assert made[0] is out
    check(made, o, tokens_last=True)
    assert (made[1][:, 2:6] == torch.tensor(1e-10) / 448).all() and (made[1][:, 9:] == 0).all()


def test_beside_a_window_and_states_of_chunks(device: str) -> None:
    call = batch(ops.chunk_gated_delta_rule, device, T=70)
    C = sum(call.tensors[name].shape[2] * call.tensors[name].shape[3] for name in "qkv")
    call.fixed |= {"conv_weight": torch.randn(C, 4, device=device), "output_conv_state": True}
    wanted = call()
    made = run(call, output_dtype=E4M3)
    check(made[0], wanted[0])
    assert all(torch.equal(x, y) for x, y in zip(made[1:], wanted[1:], strict=True))
    kda = batch(ops.chunk_kda, device, T=70)
    wanted = run(kda, return_intermediate_states=True)
    made = run(kda, return_intermediate_states=True, output_dtype=E4M3)
    check(made[0], wanted[0])
    assert all(torch.equal(x, y) for x, y in zip(made[1:], wanted[1:], strict=True))


def layer(function: Any, device: str, T: int) -> dict[str, Any]:
    H, HV, K, V, steps = 1, 2, 32, 128, 2 if function is layers.gated_delta_product else 1
    C = H * K + steps * (H * K + HV * V)
    widths = {"z": HV * V, "b": steps * HV, "a": HV}
    given: dict[str, Any] = {"heads": (H, HV), "dims": (K, V), "conv_weight": 0.3 * torch.randn(C, 4)}
    order = {
        layers.gated_delta_net: "zba", layers.kimi_delta: "zb", layers.delta_net: "zb",
        layers.gated_delta_product: "zba", layers.gdn2: "z",
    }[function]  # fmt: skip
    if function in (layers.kimi_delta, layers.gdn2):
        given |= {"g": torch.randn(2, T, HV, K), "A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV, K)}
    elif function is not layers.delta_net:
        given |= {"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV)}
    if function is layers.gdn2:
        given |= {"b": torch.randn(2, T, HV, K), "w": torch.randn(2, T, HV, V)}
    if function is layers.gated_delta_product:
        given["num_householder"] = steps
    given |= {
        "projected": torch.randn(2, T, C + sum(widths[name] for name in order)), "order": "qkv" + order,
        "norm_weight": torch.randn(V), "output_final_state": True,
    }  # fmt: skip
    rows = ("projected", "g", "b", "w")
    return {
        name: x.to(device, torch.bfloat16 if name in rows else None) if isinstance(x, torch.Tensor) else x
        for name, x in given.items()
    }


@pytest.mark.parametrize("tokens", [70, 1])
@pytest.mark.parametrize("function", LAYERS)
def test_of_layers(function: Any, tokens: int, device: str) -> None:
    """Of prompts, and of steps of decoding."""
    given = layer(function, device, tokens)
    wanted = function(**given)
    for tokens_last in (False, True):
        made = function(**given, output_dtype=E4M3, output_scale_tokens_last=tokens_last)
        check(made.o, wanted.o, tokens_last)
        assert all(torch.equal(x, y) for x, y in zip(made[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("tokens", [70, 1])
def test_decoding_from_pools(tokens: int, device: str) -> None:
    given = layer(layers.gated_delta_net, device, tokens) | {"output_final_state": False}
    C = given["conv_weight"].shape[0]
    states, windows = torch.randn(4, 2, 32, 128, device=device), torch.randn(4, C, 3, device=device).bfloat16()
    index = torch.tensor([3, 1], device=device)

    def step(**options: Any) -> Sequence[Any]:
        pools = states.clone(), windows.clone()
        o = layers.gated_delta_net(**given, state=pools[0], conv_state=pools[1], state_index=index, **options).o
        return o, *pools

    wanted, made = step(), step(output_dtype=E4M3)
    check(made[0], wanted[0])
    assert all(torch.equal(x, y) for x, y in zip(made[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("function", [ops.chunk_kda, ops.fused_recurrent_kda])
def test_compiled(function: Any, pool: bool, device: str) -> None:
    call = batch(function, device, B=2, T=5)
    options: dict[str, Any] = {"output_dtype": E4M3, "output_scale_tokens_last": True}
    if pool:
        states = call.tensors.pop("initial_state")
        del call.options["output_final_state"]

    def step(q: torch.Tensor, state: torch.Tensor | None) -> Any:
        given = {**call.tensors, "q": q} | ({} if state is None else {"state": state})
        return function(**given, **call.fixed, **call.options, **options)[0]

    def state() -> torch.Tensor | None:
        return states.clone() if pool else None

    wanted = step(call.tensors["q"], state())
    torch._dynamo.reset()
    made = torch.compile(step, backend="aot_eager", fullgraph=True)(call.tensors["q"], state())
    assert torch.equal(made[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(made[1], wanted[1])


def test_under_autocast(device: str) -> None:
    call = batch(ops.chunk_kda, device, torch.float32, T=20)
    call.tensors["g"] = call.tensors["g"].float()
    with torch.autocast(device, torch.bfloat16):
        check(run(call, output_dtype=E4M3)[0], call()[0])


MISTAKES: dict[str, tuple[dict[str, Any], type, str]] = {
    "dtype": ({"output_dtype": torch.float16}, ValueError, "output_dtype is torch.float16; .* torch.float8_e4m3fn"),
    "e5m2": ({"output_dtype": torch.float8_e5m2}, ValueError, "output_dtype is torch.float8_e5m2; it must be None or"),
    "no norm": (
        {"norm_weight": None, "norm_gate": None}, ValueError,
        "output_dtype is torch.float8_e4m3fn; it must be None without norm_weight",
    ),
    "layout alone": (
        {"output_dtype": None, "output_scale_tokens_last": True}, ValueError,
        "output_scale_tokens_last is true; it must be false without output_dtype",
    ),
    "out": ({"out": torch.empty(2, 3, 2, 128)}, TypeError, "out is torch.float32; it must be torch.float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize("function", [ops.chunk_kda, ops.fused_recurrent_kda])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, function: Any) -> None:
    change, kind, message = MISTAKES[name]
    call = batch(function, "cpu", torch.float32, B=2, T=3)
    with pytest.raises(kind, match=message):
        function(**{**call.tensors, **call.fixed, "output_dtype": E4M3, **change})


def test_what_it_does_not_go_with_is_refused() -> None:
    call = batch(ops.chunk_kda, "cpu", torch.float32, B=2, T=3)
    with pytest.raises(ValueError, match="V is 64, no multiple of 128"):
        run(batch(ops.chunk_kda, "cpu", torch.float32, V=64), output_dtype=E4M3)
    wide = batch(ops.chunk_kda, "cpu", torch.float32)
    wide.tensors = {name: x.double() for name, x in wide.tensors.items()}
    wide.fixed = {name: x.double() for name, x in wide.fixed.items()}
    with pytest.raises(TypeError, match="q is torch.float64; with output_dtype it must be"):
        run(wide, output_dtype=E4M3)
    with pytest.raises(NotImplementedError, match="output_dtype is given, and torch.func cannot"):
        torch.func.vmap(lambda q: call.function(**call.tensors | {"q": q}, **call.fixed, output_dtype=E4M3)[0])(
            call.tensors["q"][None]
        )
    call.tensors["v"].requires_grad_()
    with pytest.raises(ValueError, match="v requires a gradient; with output_dtype there is none"):
        run(call, output_dtype=E4M3)
    with torch.no_grad():
        assert run(call, output_dtype=E4M3)[0][0].dtype is E4M3
