"""Tensors with strided rows of tokens, as slices of one projection have them."""

from __future__ import annotations

import pytest
import torch

from conftest import make
from wyvern import ops, stages

B, H, HV, K, V = 2, 2, 4, 32, 16


def projection(T: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """q, k, v and the gates' columns side by side, with NaNs in columns that nobody asked for."""
    widths = [H * K, H * K, HV * V, HV, HV]
    x = torch.randn(B, T, sum(widths) + 8, device=device)
    x[..., -2 * HV - 8 :].sigmoid_()
    x[..., -8:] = torch.nan
    return x.to(dtype)


def slices(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v, g, beta: views all."""
    q, k, v, g, beta, _ = x.split([H * K, H * K, HV * V, HV, HV, 8], dim=-1)
    heads = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    return *heads, g, beta


def dense(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [x.contiguous() for x in tensors]


def decode(q, k, v, g, beta):
    return ops.fused_recurrent_gated_delta_rule(
        q, k, v, -g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )


def chunk(q, k, v, g, beta):
    return ops.chunk_gated_delta_rule(
        q, k, v, -g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )


def copies(function, *inputs: torch.Tensor) -> int:
    """How many tensors a call copies."""
    function(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*inputs)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_takes_slices_without_a_copy(device: str, T: int, dtype: torch.dtype) -> None:
    inputs = slices(projection(T, device, dtype))
    assert not any(x.is_contiguous() for x in inputs[:3])
    for one, other in zip(decode(*inputs), decode(*dense(inputs)), strict=True):
        assert torch.equal(one, other)
    q, k, v, g, beta = inputs
    # -g is dense; in 16 bits the columns of beta start at no multiple of 16 bytes.
    assert copies(decode, *inputs) == (0 if dtype == torch.float32 else 1)
    assert copies(decode, *dense(inputs)) == 0
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    assert copies(decode, apart, k, v, g, beta.contiguous()) == (0 if T == 1 else 1)
    assert torch.equal(decode(apart, k, v, g, beta)[0], decode(*inputs)[0])


def launches(function) -> int:
    """How many kernels, copies and fills a call has a GPU do, after its first."""
    function()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type is torch.autograd.DeviceType.CUDA for event in profile.events())


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_decoding_is_one_launch(device: str, dtype: torch.dtype, kda: bool) -> None:
    """q, k and v as slices of rows, raw gates and rates as slices of others, parameters, a pool of states."""
    N, heads = 5, 8
    keys, values = (heads if kda else H) * K, heads * V
    gates = heads * K if kda else heads
    rows = torch.randn(N, 2 * keys + values + 16, device=device).to(dtype)
    raw = torch.randn(N, gates + heads, device=device).to(dtype)
    pool = torch.randn(7, heads * V * K + 64, device=device)[:, :-64].unflatten(1, (heads, V, K))
    slots = torch.tensor([3, 0, 6, -1, 2], dtype=torch.int32, device=device)
    A_log, dt_bias = torch.randn(heads, device=device), torch.randn(gates, device=device)
    function = ops.fused_recurrent_kda if kda else ops.fused_recurrent_gated_delta_rule

    def call(state: torch.Tensor, prepare=lambda x: x) -> torch.Tensor:
        q, k, v, _ = rows.unsqueeze(1).split([keys, keys, values, 16], dim=-1)
        g, beta = raw.unsqueeze(1).split([gates, heads], dim=-1)
        given = [q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V))]
        given += [g.unflatten(-1, (-1, K)) if kda else g, beta]
        names = ("q", "k", "v", "g", "beta")
        o, _ = function(
            **{name: prepare(x) for name, x in zip(names, given, strict=True)}, A_log=A_log, dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            state=state, state_index=slots, state_v_first=True, null_slots="non-positive",
        )  # fmt: skip
        return o

    other = pool.clone()
    assert torch.equal(call(pool), call(other, torch.Tensor.contiguous)) and torch.equal(pool, other)
    assert copies(lambda _: call(pool), pool) == 0
    if device == "cuda":
        assert launches(lambda: call(pool)) == 1


@pytest.mark.parametrize("function", [chunk, decode])
def test_what_repeats_or_overlaps_is_copied(device: str, function) -> None:
    q, k, v, g, beta = dense(slices(projection(5, device)))
    same = k[:, :1].expand(B, 5, H, K)
    windows = torch.randn(B * 5 * 8 + H * K, device=device).as_strided((B, 5, H, K), (40, 8, K, 1))
    for rows in (same, windows):
        for one, other in zip(
            function(q, rows, v, g, beta), function(q, rows.contiguous(), v, g, beta), strict=True
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("function", [chunk, decode])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(device: str, function, backend: str) -> None:
    def layer(x):
        return function(*slices(x))

    x = projection(5, device)
    for one, other in zip(
        torch.compile(layer, fullgraph=True, backend=backend)(x),
        function(*dense(slices(x))),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_export(device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x):
            return decode(*slices(x))

    x = projection(3, device)
    program = torch.export.export(Layer(), (x,))
    for one, other in zip(program.module()(x), decode(*dense(slices(x))), strict=True):
        assert torch.equal(one, other)


def strided_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a slice of rows that hold NaNs behind them."""
    width = x[0, 0].numel()
    wide = x.new_full((*x.shape[:2], (width + 7) // 8 * 8 + 24), torch.nan)
    wide[..., :width] = x.flatten(2) if x.dim() > 3 else x
    slice = wide[..., :width]
    return slice.unflatten(-1, x.shape[2:]) if x.dim() > 3 else slice


CHUNKED = [
    (ops.chunk_gated_delta_rule, {}),
    (ops.chunk_delta_rule, {}),
    (ops.chunk_kda, {}),
    (ops.chunk_gdn2, {}),
    (ops.chunk_gated_delta_product, {"steps": 2}),
]


@pytest.mark.parametrize(("function", "options"), CHUNKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_takes_slices_without_a_copy(device: str, function, options, dtype) -> None:
    call = make(function, dtype, device, B=2, T=37, **options)
    do = torch.randn_like(call.tensors["v"][:, :37])

    def train(do: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        o, state = function(**dict(zip(call.tensors, leaves, strict=True)), **call.options)
        given = [do, torch.ones_like(state)]
        return [o, state, *torch.autograd.grad([o, state], leaves, given)]

    names = list(call.tensors)
    together = [x.detach() for x in call.tensors.values()]
    apart = [x if n == "initial_state" else strided_rows(x) for n, x in zip(names, together, strict=True)]
    assert sum(not x.is_contiguous() for x in apart) == len(names) - 1
    for one, other in zip(train(strided_rows(do), *apart), train(do, *together), strict=True):
        assert torch.equal(one, other) and one.is_contiguous()
    assert copies(train, do, *together) == 0
    assert copies(train, strided_rows(do), *apart) == 0
    q, k, v, *others = apart
    v = v.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    assert copies(train, do, q, k, v, *others) == 2  # in either pass


def test_gradients(device: str) -> None:
    x = projection(70, device)
    gradients = []
    for prepare in (slices, lambda x: dense(slices(x))):
        leaf = x.clone().requires_grad_()
        o, state = chunk(*prepare(leaf))
        (gradient,) = torch.autograd.grad(o.square().sum() + state.sum(), leaf)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert gradients[0][..., :-8].abs().sum() > 0 and not gradients[0][..., -8:].any()


def by_stages(q, k, v, g, beta):
    g = stages.chunk_local_cumsum(g, 16, scale=stages.RCP_LN2)
    A = stages.chunk_scaled_dot_kkt_fwd(k, g, beta, chunk_size=16)
    A = stages.solve_tril(A, output_dtype=k.dtype)
    w, u = stages.recompute_w_u_fwd(k, v, beta, A, g)
    h, v_new, _ = stages.chunk_gated_delta_rule_fwd_h(k, w, u, g, chunk_size=16)
    return stages.chunk_fwd_o(q, k, v_new, h, g, chunk_size=16)


def test_stages_take_slices_without_a_copy(device: str) -> None:
    inputs = slices(projection(37, device))
    assert not any(x.is_contiguous() for x in inputs)
    assert torch.equal(by_stages(*inputs), by_stages(*dense(inputs)))
    own = copies(by_stages, *dense(inputs))  # of gates, from base to base
    assert copies(by_stages, *inputs) == own
    q, k, *rest = inputs
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens
    assert copies(by_stages, apart, k, *rest) == own + 1
    assert torch.equal(by_stages(apart, k, *rest), by_stages(*inputs))
