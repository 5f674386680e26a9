"""The short convolution of q, k and v in front of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import GRADIENTS, Call, check_compiled_and_kept_gradients, check_gradients, make
from reference import error, recurrence
from wyvern import ops
from wyvern._recurrence import convolve

FUNCTIONS = [
    ops.chunk_delta_rule, ops.chunk_gated_delta_rule, ops.chunk_kda, ops.chunk_gated_delta_product, ops.chunk_gdn2,
]  # fmt: skip
DECODING = [
    ops.fused_recurrent_delta_rule, ops.fused_recurrent_gated_delta_rule, ops.fused_recurrent_kda,
    ops.fused_recurrent_gdn2,
]  # fmt: skip
POOLED = [ops.chunk_delta_rule, ops.chunk_gated_delta_rule, ops.chunk_kda, *DECODING[:3]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
NAMES = {"b": "erase", "w": "write"}


def batch(
    function: Callable[..., Any], device: str, dtype: torch.dtype, W: int = 4, bias: bool = True, **sizes: Any
) -> Call:
    """Without gradients, with weights that keep rows of k shorter than 1, and windows."""
    steps = 2 if function is ops.chunk_gated_delta_product else 1
    call = make(function, dtype, device, steps=steps, **sizes)
    call.tensors = {name: x.detach() for name, x in call.tensors.items()}
    (B, T), (q, v) = call.tensors["q"].shape[:2], (call.tensors["q"], call.tensors["v"])
    C = q[0, 0].numel() + steps * (q[0, 0].numel() + v[0, 0].numel())
    N = sizes.get("N") or B
    call.fixed = {
        "conv_weight": torch.randn(C, W, device=device) / 8,
        "initial_conv_state": torch.randn(N, C, W - 1, device=device).to(dtype),
    }
    if bias:
        call.fixed["conv_bias"] = torch.randn(C, device=device) / 8
    call.options["output_conv_state"] = True
    return call


def exact(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, the final state and the last rows, sequence by sequence; rows are rounded once."""
    given = {name: x.double().cpu() for name, x in (call.tensors | call.fixed).items() if name != "out"}
    rows = {name: given.pop(name) for name in ("q", "k", "v")}
    (B, T), dtype = rows["q"].shape[:2], call.tensors["q"].dtype
    weight, bias, window = (given.pop(name, None) for name in ("conv_weight", "conv_bias", "initial_conv_state"))
    C, W = weight.shape
    bounds = [n * T for n in range(B + 1)]
    if "cu_seqlens" in call.fixed:
        bounds = given["cu_seqlens"].long().tolist()
        given["cu_seqlens"] = call.fixed["cu_seqlens"].cpu()
    x = torch.cat([part.reshape(B * T, -1) for part in rows.values()], 1)
    made, last = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        before = x.new_zeros(C, W - 1) if window is None else window[n]
        line = torch.cat([before, x[begin:end].mT], 1)
        if end > begin:
            made.append(F.conv1d(line[None], weight[:, None], bias, groups=C)[0].mT)
        last.append(line[:, end - begin :])
    y = torch.cat(made)
    y = y if call.options.get("conv_activation", "silu") is None else F.silu(y)
    widths = [part.numel() // (B * T) for part in rows.values()]
    for (name, part), one in zip(rows.items(), y.split(widths, 1), strict=True):
        rows[name] = one.to(dtype).double().reshape(part.shape)
    o, state = recurrence(**rows, **{NAMES.get(name, name): x for name, x in given.items()}, **call.reference)
    return o, state, torch.stack(last)


def check(call: Call, outputs: tuple[torch.Tensor, ...]) -> None:
    o, state, window = outputs
    wanted, after, last = exact(call)
    dtype = call.tensors["q"].dtype
    assert o.dtype is window.dtype is dtype
    assert error(o, wanted) < TOLERANCE[dtype]
    assert error(state, after) < TOLERANCE[dtype]
    assert torch.equal(window.double().cpu(), last)


@pytest.mark.parametrize(("W", "activation", "bias"), [(4, "silu", True), (3, None, False), (2, "swish", True)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", FUNCTIONS + DECODING)
def test_rows_are_convolved(
    function: Any, dtype: torch.dtype, W: int, activation: str | None, bias: bool, device: str
) -> None:
    call = batch(function, device, dtype, W, bias, B=2)
    call.options["conv_activation"] = activation
    if activation == "silu":  # weights in the model's dtype
        call.fixed |= {name: call.fixed[name].to(dtype) for name in ("conv_weight", "conv_bias")}
    check(call, call())


@pytest.mark.parametrize("given", ["windows", "zeros", "out"])
@pytest.mark.parametrize("function", FUNCTIONS + DECODING)
def test_packs_with_short_and_empty_sequences(function: Any, given: str, device: str) -> None:
    call = batch(function, device, torch.float32, T=80, N=6)
    call.fixed["cu_seqlens"] = torch.tensor([0, 1, 1, 70, 72, 80, 80], device=device)
    if given == "zeros":
        del call.fixed["initial_conv_state"]
    if given == "out":
        call.fixed["out"] = torch.full([1, 80, 2, 16], float("nan"), device=device)
    outputs = call()
    assert (outputs[0] is call.fixed.get("out")) == (given == "out")
    check(call, outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_one_row_go_on(dtype: torch.dtype, device: str) -> None:
    """q, k and v of a token side by side, as one projection gives them; in two calls as in one. The second may go on
    from a checkpoint of the first."""
    B, T, H, HV, K, V = 2, 150, 2, 4, 32, 16
    sizes = [H * K, H * K, HV * V]
    rows = torch.randn(B, T, sum(sizes), device=device).to(dtype)
    g, beta = -torch.rand(B, T, HV, device=device), torch.rand(B, T, HV, device=device)
    weight = torch.randn(sum(sizes), 4, device=device).to(dtype)

    def run(begin: int, end: int, **given: Any) -> tuple[torch.Tensor, ...]:
        parts = rows[:, begin:end].split(sizes, -1)
        q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip(parts, (K, K, V), strict=True))
        return ops.chunk_gated_delta_rule(
            q, k, v, g[:, begin:end], beta[:, begin:end], use_qk_l2norm_in_kernel=True, output_final_state=True,
            batch_invariant=True, conv_weight=weight, output_conv_state=True, **given,
        )  # fmt: skip

    checkpoints = torch.full((2 * B, HV, K, V), float("nan"), device=device)
    whole, first = run(0, T, checkpoint_every=64, checkpoints=checkpoints), run(0, 64)
    assert torch.equal(checkpoints[[0, 2]], first[1])
    rest = run(64, T, initial_state=first[1], initial_conv_state=first[2])
    assert torch.equal(torch.cat([first[0], rest[0]], 1), whole[0])
    assert torch.equal(rest[1], whole[1]) and torch.equal(rest[2], whole[2])


def test_no_states_and_chunks_states(device: str) -> None:
    call = batch(ops.chunk_kda, device, torch.float32, states=False)
    call.options = {}
    o, state = call()
    assert state is None
    o_too, state, inside = call.function(**call.tensors, **call.fixed, return_intermediate_states=True)
    assert state is None and error(o_too, o.double().cpu()) < 1e-5
    *_, window = call.function(
        **call.tensors, **call.fixed, return_intermediate_states=True, output_conv_state=True
    )
    assert len(_) == 3 and torch.equal(_[2], inside)
    assert torch.equal(window.double().cpu(), exact(call)[2])


@pytest.mark.parametrize("function", FUNCTIONS + DECODING)
def test_compiled(function: Any, device: str) -> None:
    call = batch(function, device, torch.bfloat16, B=2)
    torch._dynamo.reset()
    step = torch.compile(
        lambda given: [x * 1 for x in call.function(**given, **call.options)], backend="aot_eager", fullgraph=True
    )
    for compiled, eager in zip(step({**call.tensors, **call.fixed}), call(), strict=True):
        assert compiled.dtype is eager.dtype and torch.equal(compiled, eager)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float64_has_every_derivative(function: Any, packed: bool) -> None:
    sizes = {"T": 7, "N": 4} if packed else {"T": 3, "B": 2}
    call = batch(function, "cpu", torch.float64, K=2, V=2, H=1, HV=1, **sizes)
    if packed:
        call.options["cu_seqlens"] = torch.tensor([0, 1, 1, 5, 7])
    tensors = {name: x.double().requires_grad_() for name, x in (call.tensors | call.fixed).items()}

    def run(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return function(**dict(zip(tensors, given, strict=True)), **call.options)

    if packed:
        call.fixed["cu_seqlens"] = call.options["cu_seqlens"]
    for got, wanted in zip(run(*tensors.values()), exact(call), strict=True):
        assert error(got.detach(), wanted) < 1e-12
    assert torch.autograd.gradcheck(run, tuple(tensors.values()))
    if not packed:
        assert torch.autograd.gradgradcheck(run, tuple(tensors.values()))


def in_slots(windows: torch.Tensor, to: list[int], count: int, layout: str) -> torch.Tensor:
    """A pool [count, C, L] with the window of sequence n in slot to[n], and NaN elsewhere."""
    _, C, W1 = windows.shape
    if layout == "channels first":
        pool = windows.new_full([count, C, W1], float("nan"))
    elif layout == "tokens first":
        pool = windows.new_full([count, W1 + 2, C], float("nan")).mT
    else:  # slots apart, with room for more columns
        pool = windows.new_full([count, C * (W1 + 1) + 64], float("nan"))[:, 64:].unflatten(1, (C, W1 + 1))
    pool[to, :, :W1] = windows
    return pool


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.nan_to_num(3e4), y.nan_to_num(3e4)) and not (x == 3e4).any()


LAYOUTS = ["channels first", "tokens first", "apart"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", POOLED)
def test_rows_in_slots(function: Any, layout: str, device: str) -> None:
    """From slots to others, from zeros, of a null sequence, and of one without tokens."""
    call = batch(function, device, torch.bfloat16, T=20, N=5)
    call.fixed["cu_seqlens"] = torch.tensor([0, 1, 1, 12, 14, 20], device=device)
    window, state = call.fixed["initial_conv_state"], call.tensors["initial_state"]
    window[4] = state[4] = 0
    o, after, last = call()
    del call.fixed["initial_conv_state"], call.tensors["initial_state"]
    call.options = {}
    come, go = [6, 2, 1, 0, 3], [5, 4, 1, 0, 3]
    call.fixed |= {
        "state": torch.full([7, *state.shape[1:]], float("nan"), device=device),
        "conv_state": in_slots(window, come, 7, layout),
        "state_index": torch.tensor([6, 2, -1, 0, 3], device=device),
        "output_state_index": torch.tensor(go, device=device),
        "has_initial_state": torch.tensor([True, True, True, True, False], device=device),
    }
    call.fixed["state"][come] = state
    call.fixed["state"][3] = call.fixed["conv_state"][3] = float("nan")
    wanted, states = call.fixed["conv_state"].clone(), call.fixed["state"].clone()
    kept = torch.tensor([0, 1, 3, 4])  # of sequences
    slots = [go[n] for n in kept]
    wanted[slots, :, :3], states[slots] = last[kept], after[kept]
    version = call.fixed["conv_state"]._version
    o_too, none = call()
    assert none is None and call.fixed["conv_state"]._version > version
    assert not o_too[:, 1:12].any()
    for rows in (slice(0, 1), slice(12, 20)):
        assert error(o_too[:, rows], o[:, rows].double().cpu()) < 5e-3
    assert same(call.fixed["conv_state"], wanted)
    assert error(call.fixed["state"][slots], states[slots].double().cpu()) < 5e-3
    untouched = [n for n in range(7) if n not in slots]
    assert same(call.fixed["state"][untouched], states[untouched])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", DECODING[:3])
def test_tokens_one_by_one(function: Any, layout: str, device: str) -> None:
    """Decoding token by token has the bits of one launch of all, and of states that are returned."""
    call = batch(function, device, torch.bfloat16, B=2, T=7)
    o, after, last = call()
    window, state = call.fixed.pop("initial_conv_state"), call.tensors.pop("initial_state").clone()
    pool = in_slots(window, [0, 1], 2, layout)
    rows = {name: x for name, x in call.tensors.items()}
    made = [
        function(**{name: x[:, [t]] for name, x in rows.items()}, **call.fixed, state=state, conv_state=pool)[0]
        for t in range(7)
    ]
    assert torch.equal(torch.cat(made, 1), o)
    assert torch.equal(state, after) and same(pool, in_slots(last, [0, 1], 2, layout))


@pytest.mark.parametrize("function", DECODING)
def test_gradients_of_decoding(function: Any, device: str) -> None:
    """They are those of the chunked backward pass."""
    chunked = getattr(ops, function.__name__.replace("fused_recurrent", "chunk"))
    gradients = []
    for one in (function, chunked):
        torch.manual_seed(1)
        call = trained(one, device, torch.float32, T=9)
        outputs = call()
        gradients.append(torch.autograd.grad(outputs, call.leaves(), [torch.randn_like(x) for x in outputs]))
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


def test_a_compiled_step_updates_slots(device: str) -> None:
    call = batch(ops.fused_recurrent_kda, device, torch.bfloat16, B=2, T=1)
    window, state = call.fixed.pop("initial_conv_state"), call.tensors.pop("initial_state")
    torch._dynamo.reset()
    step = torch.compile(lambda given: call.function(**given)[0] * 1, backend="aot_eager", fullgraph=True)
    results = []
    for function in (step, lambda given: call.function(**given)[0]):
        pools = {"state": state.clone(), "conv_state": in_slots(window, [0, 1], 2, "tokens first")}
        o = [function(call.tensors | call.fixed | pools) for _ in range(2)]
        results.append([*o, *pools.values()])
    assert all(same(x, y) for x, y in zip(*results, strict=True))
    assert not torch.equal(results[0][0], results[0][1])


def trained(function: Callable[..., Any], device: str, dtype: torch.dtype, **sizes: Any) -> Call:
    """With gradients of everything."""
    call = batch(function, device, dtype, **sizes)
    call.tensors |= call.fixed
    call.tensors = {name: x.detach().requires_grad_() for name, x in call.tensors.items()}
    call.fixed = {}
    return call


def exact_gradients(call: Call, seeds: list[torch.Tensor]) -> list[torch.Tensor]:
    """In float64, where convolved rows are rounded to the dtype of q and their gradients are not."""
    dtype = call.tensors["q"].dtype
    given = {name: x.detach().double().cpu().requires_grad_() for name, x in call.tensors.items()}
    fixed = {name: x.cpu() for name, x in call.fixed.items()}
    *rows, last = convolve(
        *(given[name] for name in ("q", "k", "v", "conv_weight")), bias=given.get("conv_bias"),
        initial=given["initial_conv_state"], cu_seqlens=fixed.get("cu_seqlens"), steps=call.reference.get("steps", 1),
        silu=call.options.get("conv_activation", "silu") is not None,
    )  # fmt: skip
    rows = [x + (x.to(dtype).double() - x).detach() for x in rows]
    beside = {name: x for name, x in given.items() if "conv" not in name and name not in ("q", "k", "v")}
    others = {NAMES.get(name, name): x for name, x in beside.items()}
    o, state = recurrence(*rows, **others, **fixed, **call.reference)
    return list(torch.autograd.grad([o, state, last], list(given.values()), [x.double().cpu() for x in seeds]))


@pytest.mark.parametrize(("W", "activation", "packed"), [(4, "silu", True), (3, None, False), (2, "silu", False)])
@pytest.mark.parametrize("dtype", GRADIENTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(
    function: Any, dtype: torch.dtype, W: int, activation: str | None, packed: bool, device: str
) -> None:
    """Of a pack with empty sequences and some shorter than the window; of weights in the model's dtype."""
    call = trained(function, device, dtype, W=W, bias=W != 3, T=80, N=6 if packed else None)
    call.options["conv_activation"] = activation
    if packed:
        call.fixed["cu_seqlens"] = torch.tensor([0, 1, 1, 70, 72, 80, 80], device=device)
    if W == 2:
        for name in ("conv_weight", "conv_bias"):
            call.tensors[name] = call.tensors[name].detach().to(dtype).requires_grad_()
    check_gradients(call, exact_gradients)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_are_the_same_compiled_and_kept(function: Any, device: str) -> None:
    check_compiled_and_kept_gradients(trained(function, device, torch.float32))


def test_gradients_of_one_output_and_of_samples(device: str) -> None:
    call = trained(ops.chunk_gated_delta_rule, device, torch.float32)
    leaves, at = [x.detach() for x in call.leaves()], list(call.tensors).index("conv_weight")

    def loss(*given: torch.Tensor) -> torch.Tensor:
        o, _, last = call.function(**dict(zip(call.tensors, given, strict=True)), **call.options)
        return o.sum() + (last * last).sum()

    wanted = torch.autograd.grad(loss(*call.leaves()), call.tensors["conv_weight"])[0]
    assert torch.equal(torch.func.grad(loss, at)(*leaves), wanted)
    both = torch.func.vmap(torch.func.grad(loss, at))(*(torch.stack([x, x]) for x in leaves))
    assert torch.equal(both[0], wanted) and torch.equal(both[1], wanted)
    # Of the last rows alone: they are rows as they were given.
    *_, last = call()
    q, weight = torch.autograd.grad(last.sum(), [call.tensors["q"], call.tensors["conv_weight"]])
    assert torch.equal(q[:, -3:], torch.ones_like(q[:, -3:])) and not q[:, :-3].any() and not weight.any()


@pytest.mark.parametrize("name", ["q", "conv_weight", "initial_conv_state"])
def test_gradients_are_refused_with_out(name: str) -> None:
    call = batch(ops.chunk_gated_delta_rule, "cpu", torch.float32)
    tensors = call.tensors | call.fixed
    tensors[name].requires_grad_()
    out = torch.full_like(tensors["v"], float("nan"))
    with pytest.raises(ValueError, match=f"^{name} requires a gradient; with out, .* under torch.no_grad"):
        call.function(**tensors, out=out)
    assert out.isnan().all()


POOLS: dict[str, Any] = {"state": torch.zeros(2, 2, 32, 16), "conv_state": torch.zeros(2, 96, 3)}
IN_PLACE = POOLS | {"initial_conv_state": None}
MISTAKES: dict[str, tuple[dict[str, Any], type, str]] = {
    "no weight": ({"conv_weight": None, "initial_conv_state": None}, ValueError, "conv_bias is given without conv_we"),
    "window alone": (
        {"conv_weight": None, "conv_bias": None}, ValueError, "initial_conv_state is given without conv_weight"
    ),
    "last rows alone": (
        {"conv_weight": None, "conv_bias": None, "initial_conv_state": None, "output_conv_state": True},
        ValueError, "output_conv_state is true; it must be false without conv_weight",
    ),
    "width": ({"conv_weight": torch.ones(96, 5)}, ValueError, r"conv_weight has shape \[96, 5\]; .* W from 2 to 4"),
    "one": ({"conv_weight": torch.ones(96, 1)}, ValueError, r"conv_weight has shape \[96, 1\]; .* W from 2 to 4"),
    "dimensions": (
        {"conv_weight": torch.ones(96, 1, 4)}, ValueError, r"conv_weight has shape \[96, 1, 4\]; .*\[C, W\]"
    ),
    "channels": ({"conv_weight": torch.ones(95, 4)}, ValueError, r"conv_weight has shape \[95, 4\]; .*\[96, ?4\]"),
    "bias": ({"conv_bias": torch.ones(95)}, ValueError, r"conv_bias has shape \[95\]; .*\[96\]"),
    "window": (
        {"initial_conv_state": torch.ones(2, 96, 4)}, ValueError, r"initial_conv_state has shape \[2, 96, 4\]; .*96, ?3"
    ),
    "window's dtype": (
        {"initial_conv_state": torch.ones(2, 96, 3).half()}, TypeError, "initial_conv_state is torch.float16"
    ),
    "activation": ({"conv_activation": "relu"}, ValueError, "conv_activation is 'relu'; .* 'silu', 'swish', None"),
    "integers": ({"conv_weight": torch.ones(96, 4).int()}, TypeError, "conv_weight is torch.int32"),
    "list": ({"conv_bias": [1]}, TypeError, "conv_bias is list; it must be a torch.Tensor"),
    "states alone": (
        {"state": torch.zeros(2, 2, 32, 16), "initial_conv_state": None}, ValueError,
        "conv_state is missing; with state it must be given with conv_weight",
    ),
    "rows alone": (
        {"conv_state": torch.zeros(2, 96, 3)}, ValueError, "conv_state is given without state",
    ),
    "rows without weights": (
        POOLS | {"conv_weight": None, "conv_bias": None, "initial_conv_state": None}, ValueError,
        "conv_weight is missing; with state it must be given with conv_state",
    ),
    "rows twice": (POOLS, ValueError, "initial_conv_state is given; it must be None with conv_state"),
    "rows in place and returned": (
        IN_PLACE | {"output_conv_state": True}, ValueError, "output_conv_state is true; it must be false with conv_s"
    ),
    "few columns": (
        IN_PLACE | {"conv_state": torch.zeros(2, 96, 2)}, ValueError,
        r"conv_state has 3 dimensions and 2 columns; it must be \[slots, C, L\] with L at least 3",
    ),
    "few columns of drafts": (
        IN_PLACE | {
            "conv_state": torch.zeros(2, 96, 4), "state_index": torch.zeros(2, 3, dtype=torch.int32),
            "num_accepted": torch.ones(2, dtype=torch.int32),
        }, ValueError,
        r"conv_state has 3 dimensions and 4 columns; it must be \[slots, C, L\] with L at least 5",
    ),
    "drafts without rows": (
        {"intermediate_states": torch.zeros(2, 3, 2, 32, 16), "intermediate_index": torch.zeros(2, dtype=torch.int32)},
        ValueError, "intermediate_conv_states is missing; with intermediate_states it must be given with conv_weight",
    ),
    "rows without drafts": (
        {"intermediate_conv_states": torch.zeros(2, 3, 96, 3)},
        ValueError, "intermediate_conv_states is given without intermediate_states",
    ),
    "rows of drafts": (
        {
            "intermediate_states": torch.zeros(2, 3, 2, 32, 16), "intermediate_conv_states": torch.zeros(2, 3, 96, 4),
            "intermediate_index": torch.zeros(2, dtype=torch.int32),
        }, ValueError, r"intermediate_conv_states has shape \[2, 3, 96, 4\]; .*2, 3, 96, 3",
    ),
    "drafts' rows without weights": (
        {
            "intermediate_states": torch.zeros(2, 3, 2, 32, 16), "intermediate_conv_states": torch.zeros(2, 3, 96, 3),
            "intermediate_index": torch.zeros(2, dtype=torch.int32), "conv_weight": None, "conv_bias": None,
            "initial_conv_state": None, "output_conv_state": False,
        }, ValueError, "conv_weight is missing; with intermediate_states it must be given with intermediate_conv_st",
    ),
    "pool's rank": (
        IN_PLACE | {"conv_state": torch.zeros(2, 96)}, ValueError, "conv_state has 2 dimensions and 96 columns",
    ),
    "pool's slots": (
        IN_PLACE | {"conv_state": torch.zeros(3, 96, 3)}, ValueError, r"conv_state has shape \[3, 96, 3\]; .*2, 96, 3",
    ),
    "pool's strides": (
        IN_PLACE | {"conv_state": torch.zeros(2, 96, 6)[..., ::2]}, ValueError, "conv_state has strides",
    ),
    "pool's dtype": (
        IN_PLACE | {"conv_state": torch.zeros(2, 96, 3).half()}, TypeError, "conv_state is torch.float16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, dtype: torch.dtype) -> None:
    change, kind, message = MISTAKES[name]
    drafts = {"num_accepted", "intermediate_conv_states", "intermediate_states"} & change.keys()
    function = ops.fused_recurrent_delta_rule if drafts else ops.chunk_delta_rule
    call = batch(function, "cpu", dtype, B=2, T=3, states=False)
    if dtype is torch.float64 and (name == "window's dtype" or {"state", "checkpoints", *drafts} & change.keys()):
        pytest.skip("float64 takes windows of any dtype, and no pools")
    with pytest.raises(kind, match=message):
        call.function(**{**call.tensors, **call.fixed, **change})
