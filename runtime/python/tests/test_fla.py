"""flash-linear-attention's functions served by Wyvern: results, what is declined, and the way back."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Call, make, reference_of
from reference import error, recurrence
from test_ops import check

pytest.importorskip(
    "fla.ops", reason="flash-linear-attention is not installed: pip install flash-linear-attention"
)
import wyvern.fla

NAMES = sorted(wyvern.fla._MODULES)


def of_fla(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(wyvern.fla._MODULES[name]), name)


@pytest.fixture(autouse=True)
def counted_from_zero() -> Iterator[None]:
    wyvern.fla.report(reset=True)
    yield
    wyvern.fla.disable()


@pytest.mark.parametrize("name", NAMES)
def test_served_with_gradients(name: str, device: str) -> None:
    options = {"steps": 2} if "product" in name else {}
    with wyvern.fla.enable():
        check(make(of_fla(name), device=device, **options), torch.float32)
        counted = wyvern.fla.report()
    assert counted.served == {name: 1} and not counted.declined


def test_a_packed_batch_in_positions(device: str) -> None:
    """Arguments by position, as FLA's order has them."""
    call = make(wyvern.ops.chunk_delta_rule, torch.bfloat16, device, states=False)
    cu_seqlens = torch.tensor([0, 30, 70], device=device)
    tensors = [call.tensors[name] for name in ("q", "k", "v", "beta")]
    with wyvern.fla.enable():
        o, state = of_fla("chunk_delta_rule")(*tensors, 0.5, None, True, True, cu_seqlens)
    call.fixed["cu_seqlens"] = cu_seqlens
    call.reference |= {"scale": 0.5, "l2norm": True}
    _, (wanted, wanted_state) = reference_of(call)
    assert error(o, wanted) < 5e-3 and error(state, wanted_state) < 5e-3
    assert wyvern.fla.report().served == {"chunk_delta_rule": 1}


@pytest.fixture
def declined_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of FLA's own functions that were called; they return it, and need no GPU."""
    called: list[str] = []

    def stand_in(name: str) -> Callable[..., Any]:
        def own(*args: Any, **kwargs: Any) -> str:
            called.append(name)
            return name

        own.__name__ = name
        return own

    # A fresh enable() finds these where FLA's functions without backends are.
    monkeypatch.setattr(wyvern.fla._switch, "pairs", None)
    for name in NAMES:
        if name not in wyvern.fla._DISPATCHED:
            monkeypatch.setattr(importlib.import_module(wyvern.fla._MODULES[name]), name, stand_in(name))
    return called


def test_what_is_declined_goes_to_fla(declined_calls: list[str]) -> None:
    name = "fused_recurrent_gated_delta_rule"
    call = make(wyvern.ops.fused_recurrent_gated_delta_rule, T=3)
    with wyvern.fla.enable():
        for _ in range(2):
            assert of_fla(name)(**call.tensors, gv=call.tensors["v"]) == name
        assert of_fla(name)(**call.tensors, colour=1) == name
        of_fla(name)(**call.tensors)
    counted = wyvern.fla.report(reset=True)
    assert declined_calls == [name] * 3 and counted.served == {name: 1}
    reasons = counted.declined[name]
    assert sorted(reasons.values()) == [1, 2]
    assert any("gv is given" in why and count == 2 for why, count in reasons.items())
    assert any("colour" in why for why in reasons)
    told = str(counted)
    assert f"{name}: 1 served" in told and f"{name}: 2 declined: gv is given" in told
    assert str(wyvern.fla.report()) == "no calls"


@pytest.mark.parametrize("name", wyvern.fla._DISPATCHED)
def test_what_the_backend_declines_goes_on(name: str, device: str) -> None:
    """On a GPU to FLA's own kernels, for which cp_context is not what they expect either; those would fail on
    CPU tensors whatever the call, so there the reason is the error."""
    call = make(getattr(wyvern.ops, name), device=device, T=3, states=False)
    with wyvern.fla.enable(), pytest.raises(Exception) as raised:
        of_fla(name)(**call.tensors, cp_context=object())
    (reason,) = wyvern.fla.report().declined[name]
    assert "cp_context is given" in reason
    assert (reason in str(raised.value)) == (device == "cpu")
    assert ("computes on GPUs only" in str(raised.value)) == (device == "cpu")


def test_a_device_out_of_memory_is_not_hidden(
    declined_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    fails.__name__ = "chunk_delta_rule"
    monkeypatch.setattr(wyvern.ops, "chunk_delta_rule", fails)
    with wyvern.fla.enable(), pytest.raises(torch.OutOfMemoryError):
        of_fla("chunk_delta_rule")()
    assert not declined_calls and not wyvern.fla.report().declined


def test_names_are_replaced_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FLA's modules, in ones that imported a function before, under another name too, and after."""
    functions = {name: of_fla(name) for name in NAMES}
    layer = types.ModuleType("layer")
    layer.rule = functions["chunk_delta_rule"]
    monkeypatch.setitem(sys.modules, "layer", layer)
    root = importlib.import_module("fla.ops")
    with wyvern.fla.enable():
        assert wyvern.fla.is_enabled()
        for name, own in functions.items():
            assert (of_fla(name) is own) == (name in wyvern.fla._DISPATCHED), name
        assert layer.rule is root.chunk_delta_rule is of_fla("chunk_delta_rule")
        assert layer.rule is not functions["chunk_delta_rule"]
        assert root.fused_recurrent_gdn is root.fused_recurrent_gated_delta_rule
        layer.later = root.fused_recurrent_kda
        with wyvern.fla.enable():  # the inner one leaves the outer one as it is
            pass
        assert wyvern.fla.is_enabled()
    assert not wyvern.fla.is_enabled()
    assert all(of_fla(name) is own for name, own in functions.items())
    assert layer.rule is functions["chunk_delta_rule"]
    assert layer.later is functions["fused_recurrent_kda"]


@pytest.mark.parametrize("name", ["chunk_kda", "fused_recurrent_kda"])
def test_the_environment_switches_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(getattr(wyvern.ops, name), T=3, states=False)
    if torch.cuda.is_available():
        pytest.skip("FLA's own kernels must fail here, as they do on CPU tensors without a GPU")
    monkeypatch.setenv("FLA_WYVERN", "0")
    with wyvern.fla.enable(), pytest.raises(Exception):  # noqa: B017 (whatever Triton says)
        of_fla(name)(**call.tensors)
    counted = wyvern.fla.report()
    assert not counted.served and not counted.declined


def test_counts_from_threads(device: str) -> None:
    call: Call = make(of_fla("chunk_kda"), device=device, T=3, states=False)

    def calls() -> None:
        for _ in range(20):
            call()

    with wyvern.fla.enable():
        threads = [threading.Thread(target=calls) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wyvern.fla.report().served == {"chunk_kda": 80}


LAYERS = {
    "GatedDeltaNet": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 2},
    "GatedDeltaNet without a gate": {"num_heads": 2, "head_dim": 16, "use_gate": False, "conv_bias": True},
    "GatedDeltaNet with biases": {"num_heads": 2, "head_dim": 16, "conv_bias": True, "conv_size": 3},
    "KimiDeltaAttention": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16},
    "KimiDeltaAttention with a bound": {"num_heads": 2, "head_dim": 16, "lower_bound": -5.0},
}
OTHERS: dict[str, dict[str, Any]] = {
    "DeltaNet": {"num_heads": 3, "use_gate": True, "allow_neg_eigval": True},
    "GatedDeltaProduct": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "num_householder": 2},
    "GatedDeltaProduct without a decay": {"num_heads": 2, "head_dim": 16, "use_forget_gate": False},
    "GatedDeltaNet2": {"num_heads": 2, "head_dim": 16, "allow_neg_eigval": True},
}


WHOLE = {
    "GatedDeltaNet": "gated_delta_net",
    "GatedDeltaNet with biases": "gated_delta_net",
    "KimiDeltaAttention": "kimi_delta",
    "KimiDeltaAttention with a bound": "kimi_delta",
}  # what serves the layers as a whole


def layer_of(name: str) -> Any:
    from fla import layers

    layer = getattr(layers, name.split()[0])(hidden_size=48, layer_idx=0, **(LAYERS | OTHERS)[name])
    for weight in (x for name, x in layer.named_parameters() if "norm" in name or "conv" in name):
        torch.nn.init.normal_(weight, mean=0.5, std=0.5)  # ones would hide what it is multiplied by
    return layer


def exact_output(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer in float64 makes of x: its formulas, with Conv1d's own convolution."""
    kimi = type(layer).__name__.startswith("Kimi")

    def heads(x: torch.Tensor, width: int) -> torch.Tensor:
        return x.unflatten(-1, (-1, width))

    def convolved(name: str, width: int) -> torch.Tensor:
        rows = getattr(layer, f"{name}_proj")(x).transpose(1, 2)
        y = torch.nn.Conv1d.forward(getattr(layer, f"{name}_conv1d"), rows)[..., : x.shape[1]]
        return heads(torch.nn.functional.silu(y.transpose(1, 2)), width)

    K, V = layer.head_k_dim, layer.head_v_dim
    g = heads(layer.f_proj(x), K) if kimi else layer.a_proj(x)
    o, _ = recurrence(
        convolved("q", K), convolved("k", K), convolved("v", V), g, layer.b_proj(x),
        l2norm=True, beta_sigmoid=True, gate=True, A_log=layer.A_log,
        dt_bias=layer.dt_bias.unflatten(0, (-1, K)) if kimi else layer.dt_bias,
        lower_bound=getattr(layer, "lower_bound", None),
    )  # fmt: skip
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.o_norm.eps) * layer.o_norm.weight
    if kimi or layer.use_gate:
        gate = heads(layer.g_proj(x), V)
        o = o * (torch.sigmoid(gate) if kimi else torch.nn.functional.silu(gate))
    return layer.o_proj(o.flatten(2))


def operators(served: dict[str, int]) -> dict[str, int]:
    """Without what layers call beside their operator."""
    return {name: n for name, n in served.items() if name not in ("causal_conv1d", "rms_norm_gated")}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_train_on_the_cpu(name: str, dtype: torch.dtype, whole: bool) -> None:
    layer = layer_of(name).to(dtype)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(2, 70, 48, dtype=dtype, requires_grad=True)
    seed = torch.randn(2, 70, 48, dtype=dtype)
    with wyvern.fla.enable(layers=whole):
        o, _, _ = layer(x)
        o.backward(seed)
    wanted_x = x.detach().double().requires_grad_()
    wanted = exact_output(exact, wanted_x)
    wanted.backward(seed.double())
    assert error(o, wanted) < 1e-5 and error(x.grad, wanted_x.grad) < 2e-5
    for (weight, value), other in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert error(value.grad, other.grad) < 5e-5, weight
    counted = wyvern.fla.report()
    assert sum(operators(counted.served).values()) == 1 and not counted.declined
    parts = counted.served.get("causal_conv1d", 0)
    assert parts == 0 if dtype == torch.float64 or (whole and name in WHOLE) else parts > 0
    if whole and name in WHOLE:
        assert counted.served == {WHOLE[name]: 1}


WHOLE_OTHERS = {
    "DeltaNet": "delta_net",
    "GatedDeltaProduct": "gated_delta_product",
    "GatedDeltaProduct without a decay": "gated_delta_product",
    "GatedDeltaNet2": "gdn2",
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "whole"), [("GatedDeltaNet", False), ("KimiDeltaAttention", False), *((name, True) for name in WHOLE)]
)
def test_layers_generate_on_the_cpu(name: str, whole: bool, masked: bool) -> None:
    """A first part of a prompt, more of it, a token, from the states of the cache; padded on the left."""
    from fla.models.utils import Cache

    layer = layer_of(name).eval()
    x = torch.randn(2, 96, 48)
    first = [0, 7 if masked else 0]  # the first token of each sequence
    mask = torch.ones(2, 96, dtype=torch.int64)
    mask[1, : first[1]] = 0
    past, parts = Cache(), []
    with wyvern.fla.enable(layers=whole), torch.no_grad():
        for begin, end in ((0, 80), (80, 94), (94, 95), (95, 96)):
            part, _, past = layer(
                x[:, begin:end], mask[:, :end] if masked else None, past_key_values=past, use_cache=True
            )
            parts.append(part)
        exact = copy.deepcopy(layer).double()
        for n, o in enumerate(torch.cat(parts, dim=1)):
            wanted = exact_output(exact, x[n : n + 1, first[n] :].double())
            assert error(o[first[n] :], wanted[0]) < 1e-5
    counted = wyvern.fla.report()
    assert not counted.declined
    if whole:
        assert counted.served == {WHOLE[name]: 4}


@pytest.mark.parametrize("form", ["batch", "masked", "packed", "no cache", "gradients"])
@pytest.mark.parametrize("name", [*WHOLE, *WHOLE_OTHERS])
def test_whole_layers_leave_what_theirs_leave(name: str, form: str) -> None:
    """The output, and both states in the cache, after each of two parts of a prompt and of some tokens; sequences that
    are shorter than the convolution, and none. Then what the one way left the other goes on from."""
    from fla.models.utils import Cache

    layer = layer_of(name).eval()
    lengths = [70, 2, *[1] * 5]
    parts = [torch.randn(2, length, 48) for length in lengths]
    given: list[dict[str, torch.Tensor]] = [{} for _ in lengths]
    if form == "packed":
        parts = [x.view(1, -1, 48) for x in parts]
        bounds = [[0, 0, 1, 3, 140, 140], [0, 1, 1, 2, 4, 4], [0, 1, 1, 1, 2, 2]]
        given = [{"cu_seqlens": torch.tensor(ends)} for ends in [*bounds, *bounds[2:] * 4]]
    if form == "masked":
        mask = torch.ones(2, sum(lengths), dtype=torch.int64)
        mask[1, :69] = 0  # a token of the first part
        mask[0, 74:76] = 0  # a sequence that waits
        ends = torch.tensor(lengths).cumsum(0).tolist()
        given = [{"attention_mask": mask[:, :end]} for end in ends]
    cached = {} if form == "no cache" else {"use_cache": True}

    def step(i: int, past: Any, whole: bool) -> torch.Tensor:
        with wyvern.fla.enable(layers=whole):
            return layer(parts[i], past_key_values=past if cached else None, **cached, **given[i])[0].detach()

    def check_cache(past: Any, other: Any) -> None:
        state, exact = past[0], other[0]
        assert error(state["recurrent_state"], exact["recurrent_state"]) < 1e-5
        for window, theirs in zip(state["conv_state"], exact["conv_state"], strict=True):
            assert window.shape == theirs.shape and torch.equal(window[..., 1:], theirs[..., 1:])
            assert window.is_contiguous()  # as the library's kernels want it
        assert past.get_seq_length() == other.get_seq_length()

    exact, past, mixed = Cache(), Cache(), Cache()
    with torch.set_grad_enabled(form == "gradients"):
        for i in range(len(parts)):
            wanted = step(i, exact, whole=False)
            if i % 2:
                assert error(step(i, mixed, whole=False), wanted) < 1e-5
            wyvern.fla.report(reset=True)
            assert error(step(i, past, whole=True), wanted) < 1e-5
            if i % 2 == 0:
                assert error(step(i, mixed, whole=True), wanted) < 1e-5
            counted = wyvern.fla.report()
            assert counted.served == {(WHOLE | WHOLE_OTHERS)[name]: 2 - i % 2} and not counted.declined
            if cached:
                check_cache(past, exact)
                check_cache(mixed, exact)


MODELS = {
    "GatedDeltaNet": ({"head_dim": 16}, "gated_delta_net"),
    "KDA": ({"head_dim": 16}, "kimi_delta"),
    "DeltaNet": ({"use_gate": True}, "delta_net"),
    "GatedDeltaProduct": ({"head_dim": 16, "num_householder": 2}, "gated_delta_product"),
}  # of GatedDeltaNet2 there is none


@pytest.mark.parametrize("name", MODELS)
def test_models_generate_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that operators alone give, with a cache and without one, and by beams; padded on the left."""
    own, function = MODELS[name]
    models = importlib.import_module("fla.models")
    monkeypatch.setattr("fla.modules.mlp.swiglu", lambda x, y: torch.nn.functional.silu(x) * y)  # theirs is Triton's
    config = getattr(models, f"{name}Config")(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_heads=2, initializer_range=0.3, fuse_norm=False,
        fuse_swiglu=False, fuse_cross_entropy=False, bos_token_id=None, eos_token_id=None, pad_token_id=None, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(models, f"{name}ForCausalLM")(config).eval()
    prompt = torch.randint(0, 97, (2, 30))
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0

    def generate(whole: bool, **options: Any) -> torch.Tensor:
        with wyvern.fla.enable(layers=whole), torch.no_grad():
            return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=20, **options)

    wanted, by_beams = generate(False), generate(False, num_beams=3)
    wyvern.fla.report(reset=True)
    assert torch.equal(generate(True), wanted)
    assert torch.equal(generate(True, use_cache=False), wanted)
    assert torch.equal(generate(True, num_beams=3), by_beams)
    counted = wyvern.fla.report()
    assert counted.served == {function: 3 * 2 * 20} and not counted.declined


def change_norm(layer: Any) -> None:
    layer.o_norm.register_forward_hook(lambda module, args, o: 2 * o)


def change_convolution(layer: Any) -> None:
    layer.v_conv1d.__class__ = type("OtherConvolution", (type(layer.v_conv1d),), {})


def change_activation(layer: Any) -> None:
    layer.k_conv1d.activation = None


NOT_WHOLE: dict[str, Callable[[Any], None]] = {
    "GatedDeltaNet without a gate": lambda layer: None,
    "GatedDeltaNet, hook": change_norm,
    "GatedDeltaNet, module": change_convolution,
    "KimiDeltaAttention, activation": change_activation,
    "DeltaNet, norm of keys": lambda layer: setattr(layer, "qk_norm", "sum"),
    "DeltaNet, rates": lambda layer: setattr(layer, "use_beta", False),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_other_layers_are_as_without(name: str) -> None:
    layer = layer_of(name.split(",")[0]).eval()
    NOT_WHOLE[name](layer)
    x = torch.randn(1, 70, 48)
    with torch.no_grad():
        with wyvern.fla.enable(layers=False):
            wanted = layer(x)[0]
        counted = wyvern.fla.report(reset=True).served
        with wyvern.fla.enable():
            assert torch.equal(layer(x)[0], wanted)
    assert wyvern.fla.report().served == counted and len(operators(counted)) == 1


def test_calls_that_are_not_whole() -> None:
    """Where wyvern.layers declines: by the operators; after disable() by the library alone."""
    from fla.layers import GatedDeltaNet

    own, layer = GatedDeltaNet.forward, layer_of("GatedDeltaNet")
    x = torch.randn(1, 70, 48)
    with wyvern.fla.enable(layers=False):
        assert GatedDeltaNet.forward is own
        with wyvern.fla.enable():
            assert GatedDeltaNet.forward is not own
            with torch.no_grad():
                wanted = layer(x)[0]
            assert wyvern.fla.report(reset=True).served == {"gated_delta_net": 1}
            layer.conv_size = 5
            for name in "qkv":
                conv = getattr(layer, f"{name}_conv1d")
                conv.weight = torch.nn.Parameter(torch.nn.functional.pad(conv.weight, (1, 0)).detach())
                conv.kernel_size = (5,)
            assert error(layer(x)[0], wanted) < 1e-6
        assert GatedDeltaNet.forward is own and wyvern.fla.is_enabled()
    counted = wyvern.fla.report()
    assert operators(counted.served) == {"chunk_gated_delta_rule": 1}
    (reason,) = counted.declined["gated_delta_net"]
    assert reason == "conv_weight has shape [192, 5]; it must be [C, W] with W from 2 to 4"


def test_a_forward_of_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more than the library's, which is what Wyvern computes."""
    from fla.layers import GatedDeltaNet, KimiDeltaAttention

    own = GatedDeltaNet.forward

    @functools.wraps(own)
    def twice(*args: Any, **kwargs: Any) -> Any:
        o, *others = own(*args, **kwargs)
        return 2 * o, *others

    layer, x = layer_of("GatedDeltaNet"), torch.randn(1, 70, 48)
    with wyvern.fla.enable(layers=False), torch.no_grad():
        wanted = layer(x)[0]
    monkeypatch.setattr(GatedDeltaNet, "forward", twice)
    other = KimiDeltaAttention.forward
    wyvern.fla.report(reset=True)
    with wyvern.fla.enable(), torch.no_grad():
        assert KimiDeltaAttention.forward is not other
        assert torch.equal(layer(x)[0], 2 * wanted)
    assert operators(wyvern.fla.report().served) == {"chunk_gated_delta_rule": 1}
    assert GatedDeltaNet.forward is twice and KimiDeltaAttention.forward is other


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_layers_take_packs_with_empty_sequences(name: str) -> None:
    """In cu_seqlens, as a masked row and as all there is: with gradients, as the operators do."""
    layer = layer_of(name)
    exact = copy.deepcopy(layer).double()
    x, seed = torch.randn(1, 90, 48, requires_grad=True), torch.randn(1, 90, 48)
    bounds = [0, 0, 20, 20, 90, 90]
    mask = torch.ones(2, 45, dtype=torch.int64)
    mask[1] = 0
    with wyvern.fla.enable():
        o, _, _ = layer(x, cu_seqlens=torch.tensor(bounds))
        o.backward(seed)
        masked, _, _ = layer(x.detach().view(2, 45, 48), mask)
        none, _, _ = layer(x[:, :0])
        assert not torch.autograd.grad(none.sum(), layer.v_conv1d.weight)[0].any()
    wanted_x = x.detach().double().requires_grad_()
    wanted = torch.cat([exact_output(exact, wanted_x[:, :20]), exact_output(exact, wanted_x[:, 20:])], dim=1)
    wanted.backward(seed.double())
    assert error(o, wanted) < 1e-5 and error(x.grad, wanted_x.grad) < 2e-5
    for (weight, value), other in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert error(value.grad, other.grad) < 5e-5, weight
    assert error(masked[0], exact_output(exact, x[:, :45].double())[0]) < 1e-5 and not masked[1].any()
    assert none.shape == (1, 0, 48)
    assert not wyvern.fla.report().declined


def short_convolution() -> Callable[..., Any]:
    return importlib.import_module("fla.modules.conv").causal_conv1d


@pytest.mark.parametrize("bounds", [[0, 20], [0, 7, 7, 20], [0, 0, 1, 2, 20, 20]])
def test_the_short_convolution_takes_packs(bounds: list[int]) -> None:
    """Two rows that are one pack, with states, also of sequences that are shorter than the kernel."""
    x, weight, N = torch.randn(2, 10, 6), torch.randn(6, 4), len(bounds) - 1
    states, residual = torch.randn(N, 6, 4), torch.randn(2, 10, 6)
    with wyvern.fla.enable():
        y, last = short_convolution()(
            x, weight, None, residual, states, True, "silu", cu_seqlens=torch.tensor(bounds)
        )
    tokens = x.double().flatten(0, 1)
    for n in range(N):
        row = torch.cat([states[n].T.double(), tokens[bounds[n] : bounds[n + 1]]])
        sums = [(row[t - 3 : t + 1] * weight.T.double()).sum(0) for t in range(4, len(row))]
        if sums:
            wanted = torch.nn.functional.silu(torch.stack(sums))
            wanted += residual.flatten(0, 1)[bounds[n] : bounds[n + 1]]
            assert error(y.flatten(0, 1)[bounds[n] : bounds[n + 1]], wanted) < 1e-6
        assert torch.equal(last[n].double(), row[-4:].T)
    assert y.shape == x.shape


@pytest.mark.parametrize("packed", [False, True])
def test_the_short_convolution_is_served_with_gradients(packed: bool, device: str) -> None:
    """As the library's own by PyTorch in float64: the output, the last rows and all gradients, those of the state too."""
    bounds = torch.tensor([0, 2, 2, 20]) if packed else None
    B, T, N = (1, 20, 3) if packed else (2, 10, 2)
    given = [torch.randn(B, T, 48), torch.randn(48, 4), torch.randn(48), torch.randn(N, 48, 4)]
    seed, last_seed = torch.randn(B, T, 48), torch.randn(N, 48, 4)
    results = []
    for kind, where in ((torch.float64, "cpu"), (torch.float32, device)):
        x, weight, bias, state = (t.to(where, kind).requires_grad_() for t in given)
        ends = None if bounds is None else bounds.to(where)
        with wyvern.fla.enable():
            y, last = short_convolution()(x, weight, bias, None, state, True, "silu", cu_seqlens=ends)
        torch.autograd.backward([y, last], [seed.to(where, kind), last_seed.to(where, kind)])
        results.append([y, last, x.grad, weight.grad, bias.grad, state.grad])
    for exact, got in zip(*results, strict=True):
        assert error(got.cpu(), exact) < 1e-6
    counted = wyvern.fla.report()
    assert counted.served == {"causal_conv1d": 1} and not counted.declined


def test_the_gated_norm_is_served_with_gradients(device: str) -> None:
    norm = importlib.import_module("fla.modules").FusedRMSNormGated(48).to(device)
    torch.nn.init.normal_(norm.weight)
    x, g, seed = (torch.randn(2, 10, 3, 48) for _ in range(3))
    own_x, own_g = (t.to(device).requires_grad_() for t in (x, g))
    exact = [t.double().cpu().detach().requires_grad_() for t in (x, g, norm.weight)]
    wanted = torch.nn.functional.rms_norm(exact[0], (48,), exact[2], norm.eps)
    wanted = wanted * torch.nn.functional.silu(exact[1])
    wanted.backward(seed.double())
    with wyvern.fla.enable():
        y = norm(own_x, own_g)
    y.backward(seed.to(device))
    for got, of in zip((y, own_x.grad, own_g.grad, norm.weight.grad), (wanted, *(t.grad for t in exact)), strict=True):
        assert error(got.cpu(), of) < 1e-6
    counted = wyvern.fla.report()
    assert counted.served == {"rms_norm_gated": 1} and not counted.declined


@pytest.mark.parametrize("bounds", [None, [0], [0, 0, 0]])
def test_the_short_convolution_of_no_tokens(bounds: list[int] | None) -> None:
    x, weight = torch.randn(1, 0, 6), torch.randn(6, 4)
    N = 1 if bounds is None else len(bounds) - 1
    states = torch.randn(N, 6, 4)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)
    with wyvern.fla.enable():
        y, last = short_convolution()(x, weight, None, None, states, True, cu_seqlens=cu_seqlens)
    assert y.shape == x.shape and torch.equal(last, states)


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ([], "cu_seqlens is empty; it must have N + 1 entries, of N sequences"),
        ([1, 5, 20], "cu_seqlens[0] is 1; it must be 0"),
        ([0, 12, 5, 20], "cu_seqlens[2] is 5; it must be at least the entry before it, 12"),
        ([0, 5, 12], "cu_seqlens[2] is 12; it must be T = 20, the packed tokens"),
        ([0, 5, 21], "cu_seqlens[2] is 21; it must be T = 20, the packed tokens"),
        ([0, 20], "initial_state has 2 states; it must have N = 1"),
    ],
)
def test_the_short_convolution_refuses_what_the_operators_refuse(bounds: list[int], sentence: str) -> None:
    x, weight, states = torch.randn(1, 20, 6), torch.randn(6, 4), torch.randn(2, 6, 4)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int64)
    with wyvern.fla.enable(), pytest.raises(ValueError) as raised:
        short_convolution()(x, weight, initial_state=states, cu_seqlens=cu_seqlens)
    assert str(raised.value) == sentence


def test_parts_of_layers_elsewhere_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other devices' tensors, and those of the CPU after disable(), go to the library's own functions."""
    from fla.modules.norm import fused_norm_gate

    called: list[str] = []
    monkeypatch.setattr(fused_norm_gate, "rms_norm_gated", lambda x, *_: called.append(x.device.type))
    monkeypatch.setattr(wyvern.fla._switch, "pairs", None)
    with wyvern.fla.enable():
        for device in ("meta", "cpu"):
            x = torch.ones(1, 2, device=device)
            fused_norm_gate.rms_norm_gated(x, x, None, None)
    fused_norm_gate.rms_norm_gated(torch.ones(1), None, None, None)
    assert called == ["meta", "cpu"]
