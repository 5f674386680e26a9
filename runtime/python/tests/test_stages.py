"""Stages on their own: each against its definition, and a chain of them against the recurrence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICES, make, reference_of

from wyvern import ops, stages
from wyvern.stages import RCP_LN2

CHUNK = 16
LENGTHS = [0, 7, 40, 16, 1]
BOUNDS = torch.tensor([0, *LENGTHS]).cumsum(0)


def chunks(T: int, packed: bool) -> list[slice]:
    """The rows of each chunk."""
    bounds = BOUNDS.tolist() if packed else [0, T]
    return [
        slice(first, min(first + CHUNK, end))
        for begin, end in zip(bounds, bounds[1:], strict=False)
        for first in range(begin, end, CHUNK)
    ]


def forward(call, device: str, *, packed: bool, v_first: bool):
    """A forward pass, stage by stage."""
    x = {name: tensor.detach() for name, tensor in call.tensors.items()}
    bounds = {"cu_seqlens": BOUNDS.to(device)} if packed else {}
    layout = bounds | {"state_v_first": v_first}
    g = x.get("g")
    if g is not None:
        g = stages.chunk_local_cumsum(g, CHUNK, scale=RCP_LN2, **bounds)
    A = stages.chunk_scaled_dot_kkt_fwd(x["k"], g, x["beta"], chunk_size=CHUNK, **bounds)
    A = stages.solve_tril(A, output_dtype=x["k"].dtype, **bounds)
    w, u = stages.recompute_w_u_fwd(x["k"], x["v"], x["beta"], A, g, **bounds)
    state = x["initial_state"].transpose(-1, -2) if v_first else x["initial_state"]
    h, v_new, final = stages.chunk_gated_delta_rule_fwd_h(
        x["k"], w, u, g, initial_state=state, output_final_state=True, chunk_size=CHUNK, **layout
    )
    assert h.shape[:2] == (u.shape[0], len(chunks(u.shape[1], packed)))
    o = stages.chunk_fwd_o(x["q"], x["k"], v_new, h, g, chunk_size=CHUNK, **layout)
    return o, final.transpose(-1, -2) if v_first else final


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("function", [ops.chunk_gated_delta_rule, ops.chunk_delta_rule], ids=["gated", "delta"])
def test_a_forward_pass_by_stages(function, packed: bool, kind: torch.dtype, device: str) -> None:
    sizes = {"B": 1, "T": sum(LENGTHS), "N": len(LENGTHS)} if packed else {"B": 2, "T": 37}
    call = make(function, kind, device, H=1, HV=2, K=32, V=16, **sizes)
    if packed:
        call.fixed["cu_seqlens"] = BOUNDS.to(device)
    _, (wanted, wanted_state) = reference_of(call)
    bound = 1e-4 if kind == torch.float32 else 2e-2
    for v_first in (False, True):
        o, state = forward(call, device, packed=packed, v_first=v_first)
        assert o.dtype == kind and state.dtype == torch.float32
        torch.testing.assert_close(o.double().cpu(), wanted, rtol=bound, atol=bound)
        torch.testing.assert_close(state.double().cpu(), wanted_state, rtol=bound, atol=bound)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("shape", [(3,), (2, 16)], ids=str)
def test_sums_inside_chunks(shape: tuple[int, ...], packed: bool, device: str) -> None:
    T = sum(LENGTHS)
    g = -torch.rand(1, T, *shape)
    wanted = torch.cat([g[:, rows].cumsum(1) for rows in chunks(T, packed)], 1)
    bounds = BOUNDS.to(device, torch.int32) if packed else None
    got = stages.chunk_local_cumsum(g.to(device), CHUNK, cu_seqlens=bounds)
    torch.testing.assert_close(got.cpu(), wanted)
    got = stages.chunk_local_cumsum(
        g.to(device), CHUNK, scale=3.0, cu_seqlens=bounds, output_dtype=torch.bfloat16
    )
    torch.testing.assert_close(got.cpu(), (3 * wanted).bfloat16(), rtol=1e-2, atol=0)


def test_the_inverse(device: str) -> None:
    A = torch.zeros(1, 37, 2, CHUNK)
    wanted = torch.zeros_like(A)
    for rows in chunks(37, False):
        n = rows.stop - rows.start
        for head in range(2):
            one = torch.randn(n, n).tril(-1) / 4
            A[0, rows, head, :n] = one
            wanted[0, rows, head, :n] = torch.linalg.inv(torch.eye(n) + one)
    torch.testing.assert_close(stages.solve_tril(A.to(device)).cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_a_decay_per_channel(device: str) -> None:
    """The scan, with rows of k that are decayed to their chunk's end."""
    T, K, V = 37, 32, 16
    gk, k, w, u = (torch.rand(1, T, 2, n) for n in (K, K, K, V))
    w /= K
    summed = torch.cat([-gk[:, rows].cumsum(1) for rows in chunks(T, False)], 1)
    state, states, values = torch.zeros(2, K, V), [], []
    for rows in chunks(T, False):
        states.append(state)
        values.append(u[0, rows] - torch.einsum("thk,hkv->thv", w[0, rows], state))
        state = summed[0, rows.stop - 1].exp()[..., None] * state
        state = state + torch.einsum("thk,thv->hkv", k[0, rows], values[-1])
    h, v_new, final = stages.chunk_gated_delta_rule_fwd_h(
        *(x.to(device) for x in (k, w, u)), gk=(RCP_LN2 * summed).to(device), output_final_state=True,
        chunk_size=CHUNK,
    )  # fmt: skip
    for got, wanted in [(h[0], torch.stack(states)), (v_new[0], torch.cat(values)), (final[0], state)]:
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_length_1(device: str) -> None:
    x = torch.randn(2, 5, 3, 48)
    y, rstd = stages.l2norm_fwd(x.to(device))
    wanted = x.double().square().sum(-1).add(1e-6).rsqrt()
    torch.testing.assert_close(rstd.double().cpu(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(y.double().cpu(), x.double() * wanted[..., None], rtol=1e-5, atol=1e-6)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double().cpu() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("D", "W", "packed"), [(96, 4, False), (200, 3, True), (7, 2, True)])
def test_the_short_convolution(D: int, W: int, packed: bool, kind: torch.dtype, device: str) -> None:
    """With bias and states and their gradients, of strided rows, also where rows cannot be written side by side."""
    bounds = BOUNDS.tolist() if packed else None
    B, T, N = (1, sum(LENGTHS), len(LENGTHS)) if packed else (2, 37, 2)
    rows, seed = torch.randn(B, T, D + 8).to(kind)[..., 8:], torch.randn(B, T, D).to(kind)
    given = [rows, torch.randn(D, W).to(kind), torch.randn(D).to(kind), torch.randn(N, D, W - 1).to(kind)]
    exact = [x.double().requires_grad_() for x in given]
    x, weight, bias, state = exact
    pieces = x.split(1) if bounds is None else [x[:, i:j] for i, j in zip(bounds, bounds[1:], strict=False)]
    before = [torch.cat([state[n : n + 1], pieces[n].transpose(1, 2)], 2) for n in range(N)]
    # A zero in front, so that conv1d has rows enough of an empty sequence.
    sums = [F.conv1d(F.pad(row, (1, 0)), weight[:, None], bias, groups=D)[..., 1:] for row in before]
    wanted = torch.cat([F.silu(one).transpose(1, 2) for one in sums], 1 if packed else 0)
    wanted.backward(seed.double())

    x, weight, bias, state = (x.to(device) for x in given)
    cu_seqlens = BOUNDS.to(device) if packed else None
    y, last = stages.short_conv(x, weight, bias, "swish", state, True, cu_seqlens)
    dx, dweight, dbias, dstate = stages.short_conv_bwd(x, seed.to(device), weight, bias, "silu", state, cu_seqlens)
    assert last is not None and dbias is not None and dstate is not None
    bound = 1e-6 if kind == torch.float32 else 4e-3
    assert y.dtype == dx.dtype == kind and relative(y, wanted.detach()) < bound
    assert torch.equal(last.cpu(), torch.cat([row[..., row.shape[2] - W + 1 :] for row in before]).to(kind))
    for got, of in zip((dx, dweight, dbias, dstate), exact, strict=True):
        assert of.grad is not None and relative(got, of.grad) < bound


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize(("shape", "kind"), [((3, 5, 64), torch.float32), ((7, 1200), torch.bfloat16)], ids=str)
def test_the_gated_norm(shape: tuple[int, ...], kind: torch.dtype, activation: str, device: str) -> None:
    given = [torch.randn(shape).to(kind), torch.randn(shape).to(kind), torch.randn(shape[-1])]
    seed = torch.randn(shape).to(kind)
    exact = [x.double().requires_grad_() for x in given]
    x, gate, weight = exact
    wanted = F.rms_norm(x, shape[-1:], weight, 1e-5) * getattr(F, activation)(gate)
    wanted.backward(seed.double())
    x, gate, weight = (x.to(device) for x in given)
    y = stages.output_norm(x, gate, weight, 1e-5, activation)
    gradients = stages.output_norm_bwd(seed.to(device), x, gate, weight, 1e-5, activation)
    bound = 1e-6 if kind == torch.float32 else 4e-3
    assert y.dtype == kind and relative(y, wanted.detach()) < bound
    for got, of in zip(gradients, exact, strict=True):
        assert of.grad is not None and relative(got, of.grad) < bound


def test_wrong_arguments() -> None:
    k, beta = torch.ones(1, 5, 1, 16), torch.ones(1, 5, 1)
    with pytest.raises(ValueError, match="k has 3 dimensions; it must have 4"):
        stages.chunk_scaled_dot_kkt_fwd(k[0], None, beta)
    with pytest.raises(TypeError, match="beta is None"):
        stages.chunk_scaled_dot_kkt_fwd(k)
    with pytest.raises(TypeError, match="k has dtype torch.float64"):
        stages.chunk_scaled_dot_kkt_fwd(k.double(), None, beta)
    with pytest.raises(ValueError, match=r"g has shape \[1, 4, 1\]"):
        stages.chunk_scaled_dot_kkt_fwd(k, beta[:, :4], beta)
    with pytest.raises(ValueError, match="chunk_size is 48"):
        stages.chunk_local_cumsum(beta, 48)
    with pytest.raises(ValueError, match="reverse is given"):
        stages.chunk_local_cumsum(beta, 16, reverse=True)
    with pytest.raises(ValueError, match="eps is 0.1"):
        stages.l2norm_fwd(k, eps=0.1)
    with pytest.raises(ValueError, match="x has 2 channels; it must have 3 or more"):
        stages.short_conv(torch.ones(1, 4, 2), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"dy has shape \[1, 5, 1\]; it must be \[1, 5, 6\], as x"):
        stages.short_conv_bwd(torch.ones(1, 5, 6), beta, torch.ones(6, 4))
    with pytest.raises(ValueError, match=r"gate has shape \[1, 5, 1\] and dtype torch.float32; it must be as x"):
        stages.output_norm(k, beta)
    with pytest.raises(ValueError, match="g is on meta; it must be on the CPU or a CUDA device"):
        stages.chunk_local_cumsum(beta.to("meta"), 16)


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU that PyTorch can use")
def test_a_captured_stage() -> None:
    g = -torch.rand(1, 64, 2, device="cuda")
    wanted = stages.chunk_local_cumsum(g, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = stages.chunk_local_cumsum(g, 64)
    graph.replay()
    torch.testing.assert_close(got, wanted)
    with pytest.raises(RuntimeError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        stages.chunk_local_cumsum(g[:, :50], 64)
