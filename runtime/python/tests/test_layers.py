"""The layers: projections in, convolution, operator and norm as one call, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import GRADIENTS, OF_ROWS
from reference import error, recurrence
from wyvern import layers

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}
ACTIVATIONS = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid, None: lambda x: x}
FUNCTIONS = [
    layers.gated_delta_net, layers.kimi_delta, layers.delta_net, layers.gated_delta_product, layers.gdn2,
]  # fmt: skip
ORDERS = {"gated_delta_net": "qkvzba", "gated_delta_product": "qkvzba", "gdn2": "qkvz"}
PACK = [0, 0, 1, 44, 45, 70, 70]  # sequences without tokens and of one


@dataclass
class Layer:
    """A layer's function, its parts by letter, its other tensors and its options."""

    function: Callable[..., Any]
    parts: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, order: str | None = None, split: bool = False, **more: Any) -> layers.LayerOutput:
        """With the parts of order in one tensor, or as a tuple; the others by name."""
        order = "".join(self.parts) if order is None else order
        given = tuple(self.parts[letter] for letter in order)
        named = {letter: x for letter, x in self.parts.items() if letter not in order}
        projected = given if split else torch.cat(given, -1)
        return self.function(projected, order=order, **named | self.tensors | self.options | more)


def make(
    function: Callable[..., Any],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    bounds: list[int] | None = None,
    B: int = 2,
    T: int = 70,
    H: int = 2,
    HV: int = 4,
    K: int = 16,
    V: int = 32,
    W: int = 4,
    bias: bool = True,
) -> Layer:
    """With states, random in every element."""
    name = function.__name__
    steps = 2 if name == "gated_delta_product" else 1
    B, T, N = (1, bounds[-1], len(bounds) - 1) if bounds is not None else (B, T, B)
    C = H * K + steps * (H * K + HV * V)

    def random(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape).to(device, kind)

    widths = {
        "q": H * K, "k": steps * H * K, "v": steps * HV * V, "z": HV * V, "b": steps * HV, "a": HV,
    }  # fmt: skip
    parts = {letter: random(B, T, widths[letter]) for letter in ORDERS.get(name, "qkvzb")}
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    tensors = {
        "conv_weight": random(C, W, kind=wide) / 2,
        "norm_weight": random(V, kind=wide) + 1,
        "initial_state": random(N, HV, K, V, kind=wide),
        "initial_conv_state": random(N, C, W - 1),
    }
    if bias:
        tensors["conv_bias"] = random(C, kind=wide) / 2
    if name != "delta_net":
        channels = (K,) if name in ("kimi_delta", "gdn2") else ()
        tensors |= {"A_log": random(HV, kind=wide) / 2, "dt_bias": random(HV, *channels, kind=wide)}
        if channels:
            tensors["g"] = random(B, T, HV, K)
    if name == "gdn2":
        tensors |= {"b": random(B, T, HV, K), "w": random(B, T, HV, V)}
    options: dict[str, Any] = {"heads": (H, HV), "dims": (K, V), "output_final_state": True}
    if steps > 1:
        options["num_householder"] = steps
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=device)
    return Layer(function, parts, tensors, options)


def exact(layer: Layer, x: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64) -> layers.LayerOutput:
    """The same by the formulas, of float64 parts and tensors x; convolved rows are rounded to dtype."""
    options, name = layer.options, layer.function.__name__
    (H, HV), (K, V), steps = options["heads"], options["dims"], options.get("num_householder", 1)
    B, T = x["q"].shape[:2]
    weight, bias, windows = x["conv_weight"].flatten(1), x.get("conv_bias"), x.get("initial_conv_state")
    C, W = weight.shape
    bounds = [n * T for n in range(B + 1)]
    if "cu_seqlens" in options:
        bounds = options["cu_seqlens"].tolist()
    rows = torch.cat([x["q"], x["k"], x["v"]], -1).flatten(0, 1)
    convolved, last = [rows[:0]], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        window = rows.new_zeros(C, W - 1) if windows is None else windows[n]
        line = torch.cat([window, rows[begin:end].mT], 1)
        if end > begin:
            convolved.append(F.conv1d(line[None], weight[:, None], bias, groups=C)[0].mT)
        last.append(line[:, end - begin :])
    y = ACTIVATIONS[options.get("conv_activation", "silu")](torch.cat(convolved))
    y = y + (y.to(dtype).double() - y).detach()
    q, k, v = y.split([H * K, steps * H * K, steps * HV * V], 1)
    rate, decay = 2.0 if options.get("allow_neg_eigval") else 1.0, None
    if "A_log" in x:
        raw = x["a"] if "a" in x else x["g"].reshape(B, T, HV, K)
        raw = raw if "dt_bias" not in x else raw + x["dt_bias"].reshape(raw.shape[2:])
        speed = x["A_log"].exp().reshape([HV] + [1] * (raw.dim() - 3))
        bound = options.get("lower_bound")
        decay = -speed * F.softplus(raw) if bound is None else bound * torch.sigmoid(speed * raw)
    rates = {"beta": rate * x["b"].sigmoid().reshape(B, steps * T, -1)}
    if name == "gdn2":
        rates = {"erase": rate * x["b"].sigmoid(), "write": x["w"].sigmoid()}
    o, state = recurrence(
        q.reshape(B, T, H, K), k.reshape(B, steps * T, H, K), v.reshape(B, steps * T, HV, V), decay, **rates,
        l2norm=True, initial_state=x.get("initial_state"), cu_seqlens=options.get("cu_seqlens"), steps=steps,
        scale=options.get("scale"), v_first=options.get("state_v_first", False),
    )  # fmt: skip
    if "z" in x:
        default = "sigmoid" if name in ("kimi_delta", "gdn2") else "silu"
        gate = ACTIVATIONS[options.get("norm_activation", default)](x["z"]).reshape(o.shape)
        o = F.rms_norm(o, (V,), x["norm_weight"], options.get("norm_eps", 1e-6)) * gate
    return layers.LayerOutput(o, state, torch.stack(last))


def in_float64(layer: Layer) -> dict[str, torch.Tensor]:
    return {name: x.detach().double().cpu() for name, x in (layer.parts | layer.tensors).items()}


def check(layer: Layer, outputs: layers.LayerOutput) -> None:
    dtype = layer.parts["q"].dtype
    options = {name: x.cpu() if name == "cu_seqlens" else x for name, x in layer.options.items()}
    wanted = exact(Layer(layer.function, {}, {}, options), in_float64(layer), dtype)
    assert outputs.o.dtype is outputs.final_conv_state.dtype is dtype
    assert error(outputs.o, wanted.o) < TOLERANCE[dtype]
    assert error(outputs.final_state, wanted.final_state) < TOLERANCE[dtype]
    assert torch.equal(outputs.final_conv_state.double().cpu(), wanted.final_conv_state)


@pytest.mark.parametrize("bounds", [None, PACK])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_formulas(function: Any, dtype: torch.dtype, bounds: list[int] | None, device: str) -> None:
    layer = make(function, dtype, device, bounds=bounds)
    check(layer, layer())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option(function: Any, device: str) -> None:
    layer = make(function, device=device, W=3, bias=False)
    layer.options |= {
        "conv_activation": None, "norm_activation": "swish", "norm_eps": 1e-2, "allow_neg_eigval": True,
        "scale": 0.5, "state_v_first": True,
    }  # fmt: skip
    layer.tensors["initial_state"] = layer.tensors["initial_state"].mT.contiguous()
    if "g" in layer.tensors:
        layer.options["lower_bound"] = -4.0
        layer.tensors = {  # as flat as the projections of g, b and w give them
            name: x.flatten(2) if name in ("g", "b", "w") else x for name, x in layer.tensors.items()
        }
        layer.tensors["dt_bias"] = layer.tensors["dt_bias"].flatten()
    out = torch.full([2, 70, 4, 32], float("nan"), device=device)
    outputs = layer(out=out)
    assert outputs.o is out
    flat = Layer(function, layer.parts, dict(layer.tensors), layer.options)
    for name, width in (("g", 16), ("b", 16), ("w", 32)):
        if name in flat.tensors:
            flat.tensors[name] = flat.tensors[name].unflatten(-1, (4, width))
    check(flat, outputs)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_may_be_left_out(function: Any, device: str) -> None:
    """States, biases and the norm of o; delta products without a decay."""
    layer = make(function, device=device, bias=False)
    for name in ("initial_state", "initial_conv_state"):
        del layer.tensors[name]
    del layer.parts["z"]
    left_out = {"norm_weight"} | ({"dt_bias"} & layer.tensors.keys())
    if function is layers.gated_delta_product:
        del layer.parts["a"]
        left_out |= {"A_log"}
    layer.tensors = {name: x for name, x in layer.tensors.items() if name not in left_out}
    nothing = dict.fromkeys(left_out)
    check(layer, layer(**nothing))
    o, *states = layer(**nothing, **{"output_final_state": False})
    assert states == [None, None] and torch.equal(o, layer(**nothing).o)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_way_to_give_the_projections(function: Any, device: str) -> None:
    """In one tensor, in parts, some by name, with dimensions apart; weights with a dimension more, or in parts."""
    layer = make(function, torch.bfloat16, device)
    wanted = layer()
    letters = "".join(layer.parts)
    steps = layer.options.get("num_householder", 1)
    results = [layer(letters[:count]) for count in range(3, len(letters))]
    results += [layer("qkv" + letters[:2:-1]), layer(split=True), layer("qkv", split=True)]
    heads = {"q": (2, 16), "z": (4, 32)} | ({"k": (2, 16), "v": (4, 32)} if steps == 1 else {})
    apart = {name: x.unflatten(-1, heads[name]) if name in heads else x for name, x in layer.parts.items()}
    results.append(Layer(function, apart, layer.tensors, layer.options)(split=True))
    widths = [32, 32 * steps, 128 * steps]
    weights, biases = (layer.tensors[name].split(widths) for name in ("conv_weight", "conv_bias"))
    for weight, bias in (
        (layer.tensors["conv_weight"].unsqueeze(1), layer.tensors["conv_bias"]),
        (weights, list(biases)),
        ([x.unsqueeze(1) for x in weights], biases),
    ):
        tensors = {**layer.tensors, "conv_weight": weight, "conv_bias": bias}
        results.append(Layer(function, layer.parts, tensors, layer.options)())
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


@pytest.mark.parametrize("lengths", [(1,) * 9, (64, 1, 5)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_going_on_from_states(function: Any, lengths: Sequence[int], device: str) -> None:
    """Steps of decoding and parts of a prompt, from the states of the call before."""
    layer = make(function, device=device, T=sum(lengths))
    wanted = exact(layer, in_float64(layer))
    states = layer.tensors["initial_state"], layer.tensors["initial_conv_state"]
    begin = 0
    for length in lengths:
        tokens = slice(begin, begin + length)
        parts = {name: x[:, tokens] for name, x in layer.parts.items()}
        tensors = {name: x[:, tokens] if name in "gbw" else x for name, x in layer.tensors.items()}
        tensors |= zip(("initial_state", "initial_conv_state"), states, strict=True)
        o, *states = Layer(function, parts, tensors, layer.options)()
        assert error(o, wanted.o[:, tokens]) < 1e-5
        begin += length
    assert error(states[0], wanted.final_state) < 1e-5
    assert torch.equal(states[1].double().cpu(), wanted.final_conv_state)


@pytest.mark.parametrize("function", [layers.gated_delta_net, layers.kimi_delta, layers.delta_net])
def test_decoding_in_pools(function: Any, device: str) -> None:
    """A prompt and then token by token, in slots of two pools, beside float64."""
    layer = make(function, device=device, T=24)
    wanted = exact(layer, in_float64(layer))
    state = torch.full([5, 4, 16, 32], float("nan"), device=device)
    rows = torch.full([5, 3, layer.tensors["conv_weight"].shape[0]], float("nan"), device=device)
    slots = torch.tensor([3, 1], device=device)
    state[slots], rows[slots] = layer.tensors.pop("initial_state"), layer.tensors.pop("initial_conv_state").mT
    layer.options["output_final_state"] = False
    pools = {"state": state, "conv_state": rows.mT, "state_index": slots}
    begin = 0
    for length in (17, 1, 1, 1, 4):
        tokens = slice(begin, begin + length)
        parts = {name: x[:, tokens] for name, x in layer.parts.items()}
        tensors = {name: x[:, tokens] if name in "gbw" else x for name, x in layer.tensors.items()}
        o, *states = Layer(function, parts, tensors, layer.options)(**pools)
        assert states == [None, None] and error(o, wanted.o[:, tokens]) < 1e-5
        begin += length
    assert error(state[slots], wanted.final_state) < 1e-5
    assert torch.equal(rows[slots].mT.double().cpu(), wanted.final_conv_state)
    assert state[[0, 2, 4]].isnan().all() and rows[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("function", [layers.gated_delta_net, layers.kimi_delta, layers.delta_net])
def test_drafts(function: Any, device: str) -> None:
    """Steps of four tokens, of which some are accepted, beside float64."""
    layer = make(function, device=device, T=13)
    wanted = exact(layer, in_float64(layer))
    state = torch.full([8, 4, 16, 32], float("nan"), device=device)
    rows = torch.full([8, 6, layer.tensors["conv_weight"].shape[0]], float("nan"), device=device)
    slots = torch.tensor([[3, 1, 0, 6], [5, 4, 2, 7]], device=device)
    state[slots[:, 0]] = layer.tensors.pop("initial_state")
    rows[slots[:, 0], :3] = layer.tensors.pop("initial_conv_state").mT
    layer.options["output_final_state"] = False
    begin, accepted = 0, 1
    for following in (2, 1, 4, 3, 3):
        tokens = slice(begin, begin + 4)
        parts = {name: x[:, tokens] for name, x in layer.parts.items()}
        tensors = {name: x[:, tokens] if name in "gbw" else x for name, x in layer.tensors.items()}
        o, *states = Layer(function, parts, tensors, layer.options)(
            state=state, conv_state=rows.mT, state_index=slots, num_accepted=torch.full([2], accepted, device=device)
        )
        assert states == [None, None] and error(o, wanted.o[:, tokens]) < 1e-5
        begin, accepted = begin + following, following
    assert error(state[slots[:, 2]], wanted.final_state) < 1e-5
    assert torch.equal(rows[slots[:, 0], 2:5].mT.double().cpu(), wanted.final_conv_state)


@pytest.mark.parametrize("function", [layers.gated_delta_net, layers.kimi_delta, layers.delta_net])
def test_trees_of_drafts(function: Any, device: str) -> None:
    """Of two branches behind a token the second is that of the sequence, beside float64."""
    layer = make(function, device=device, T=3)
    wanted = exact(layer, in_float64(layer))
    layer.options["output_final_state"] = False
    order = [0, 2, 1, 2]  # token 2 comes twice, the first time behind token 0
    parts = {name: x[:, order] for name, x in layer.parts.items()}
    tensors = {name: x[:, order] if name in "gbw" else x for name, x in layer.tensors.items()}
    states = layer.tensors["initial_state"].new_zeros(2, 4, 4, 16, 32)
    windows = torch.zeros(2, 4, layer.tensors["conv_weight"].shape[0], 3, device=device)
    o, *none = Layer(function, parts, tensors, layer.options)(
        intermediate_states=states, intermediate_conv_states=windows,
        intermediate_index=torch.tensor([1, 0], device=device),
        parent=torch.tensor([[-1, 0, 0, 2]] * 2, device=device),
    )  # fmt: skip
    assert none == [None, None] and error(o[:, [0, 2, 3]], wanted.o) < 1e-5
    assert error(states[[1, 0], 3], wanted.final_state) < 1e-5
    assert torch.equal(windows[[1, 0], 3].double().cpu(), wanted.final_conv_state)


@pytest.mark.parametrize("function", [function for function in FUNCTIONS if function.__name__ != "gated_delta_product"])
def test_which_calls_go_token_by_token(function: Any, device: str) -> None:
    def same(x: layers.LayerOutput, y: layers.LayerOutput) -> bool:
        return all(torch.equal(a, b) for a, b in zip(x, y, strict=True))

    few, many = make(function, device=device, T=16), make(function, device=device, T=17)
    assert not same(few(recurrent=True), few(recurrent=False))
    assert same(few(), few(recurrent=True)) and same(many(), many(recurrent=False))
    assert same(few(batch_invariant=True), few(batch_invariant=True, recurrent=False))
    few.parts["q"].requires_grad_()
    assert same(few(), few(recurrent=False))
    with torch.no_grad():
        assert same(few(), few(recurrent=True))
    pack = make(function, device=device, bounds=[0, 16, 16, 30])
    assert same(pack(), pack(recurrent=False))
    assert same(pack(cu_seqlens_cpu=pack.options["cu_seqlens"].cpu()), pack(recurrent=True))


def test_the_bits_of_one_call(device: str) -> None:
    layer = make(layers.gated_delta_net, torch.bfloat16, device, T=130)
    layer.options["batch_invariant"] = True
    whole = layer()
    part = {name: x[:, :64] for name, x in layer.parts.items()}
    first = Layer(layer.function, part, layer.tensors, layer.options)()
    rest = {name: x[:, 64:] for name, x in layer.parts.items()}
    states = {"initial_state": first.final_state, "initial_conv_state": first.final_conv_state}
    second = Layer(layer.function, rest, layer.tensors | states, layer.options)()
    assert torch.equal(torch.cat([first.o, second.o], 1), whole.o)
    assert all(torch.equal(x, y) for x, y in zip(second[1:], whole[1:], strict=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled(function: Any, device: str) -> None:
    layer = make(function, torch.bfloat16, device)
    torch._dynamo.reset()

    def step(parts: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> layers.LayerOutput:
        return Layer(function, parts, tensors, layer.options)()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for given in (layer, make(function, torch.bfloat16, device, T=33)):
        outputs = compiled(given.parts, given.tensors)
        assert all(torch.equal(x, y) for x, y in zip(outputs, given(), strict=True))


def test_autocast(device: str) -> None:
    """Projections and windows in float32 are cast, z with q, k and v; logits and decays are not."""
    layer = make(layers.gated_delta_net, device=device)
    with torch.autocast(device, torch.bfloat16):
        outputs = layer()
    layer.parts |= {name: layer.parts[name].bfloat16() for name in "qkvz"}
    layer.tensors["initial_conv_state"] = layer.tensors["initial_conv_state"].bfloat16()
    wanted = layer(split=True)
    assert outputs.o.dtype is torch.bfloat16
    assert all(torch.equal(x, y) for x, y in zip(outputs, wanted, strict=True))


def leaves(layer: Layer) -> Layer:
    """The same in tensors that ask for gradients."""
    parts, tensors = (
        {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        for given in (layer.parts, layer.tensors)
    )
    return Layer(layer.function, parts, tensors, layer.options)


def nodes_before(outputs: Sequence[torch.Tensor], leaf: torch.Tensor) -> list[str]:
    """The names of the autograd nodes that give a part of the gradient of leaf."""
    seen, found, todo = set(), [], [x.grad_fn for x in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for after, _ in node.next_functions:
            if after is not None and getattr(after, "variable", None) is leaf:
                found.append(node.name())
            todo.append(after)
    return found


def test_one_gradient_for_each_given_tensor() -> None:
    layer = leaves(make(layers.gated_delta_net, torch.float64, T=3, K=2, V=2, H=1, HV=2))
    projected = torch.cat(list(layer.parts.values()), -1).detach().requires_grad_()
    outputs = layers.gated_delta_net(projected, **layer.tensors, **layer.options)
    assert nodes_before(outputs, projected) == ["SplitWithSizesBackward0"]
    parts = tuple(layer.parts.values())
    outputs = layers.gated_delta_net(parts, **layer.tensors, **layer.options)
    assert all(len(nodes_before(outputs, part)) == 1 for part in parts)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bounds", [None, [0, 0, 1, 4, 5, 5]])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float64_has_derivatives(function: Any, bounds: list[int] | None, split: bool) -> None:
    """Of every tensor, through o and both states, in one tensor with one weight and in parts with three."""
    layer = make(function, torch.float64, bounds=bounds, B=1, T=3, H=1, HV=2, K=2, V=2, W=3)
    for got, wanted in zip(layer(), exact(layer, in_float64(layer)), strict=True):
        assert error(got, wanted) < 1e-12
    letters, names = list(layer.parts), list(layer.tensors)
    steps = layer.options.get("num_householder", 1)
    tensors = list(leaves(layer).parts.values()) + list(leaves(layer).tensors.values())
    if split:
        weight = tensors.pop(len(letters) + names.index("conv_weight"))
        names.remove("conv_weight")
        tensors += [x.detach().requires_grad_() for x in weight.split([2, 2 * steps, 4 * steps])]
    else:
        tensors[: len(letters)] = [torch.cat(tensors[: len(letters)], -1).detach().requires_grad_()]

    def run(*given: torch.Tensor) -> layers.LayerOutput:
        count = len(letters) if split else 1
        more = {"conv_weight": given[-3:]} if split else {}
        more |= zip(names, given[count:], strict=False)
        return function(given[:count] if split else given[0], **more, **layer.options)

    assert torch.autograd.gradcheck(run, tensors)


def test_second_derivatives() -> None:
    layer = leaves(make(layers.gated_delta_net, torch.float64, B=1, T=2, H=1, HV=1, K=2, V=2, W=2))
    tensors = [*layer.parts.values(), *layer.tensors.values()]

    def run(*given: torch.Tensor) -> layers.LayerOutput:
        count = len(layer.parts)
        return layers.gated_delta_net(
            given[:count], **dict(zip(layer.tensors, given[count:], strict=True)), **layer.options
        )

    assert torch.autograd.gradgradcheck(run, tensors)


X = torch.ones(1, 3, 4 * 16 * 2 + 2 * 4 * 32 + 8)  # more than is needed
MISTAKES: dict[str, tuple[dict[str, Any], type, str]] = {
    "order": ({"order": "kqv"}, ValueError, "order is 'kqv'; it must be 'qkv' and then letters of 'zba'"),
    "twice": ({"order": "qkvzz"}, ValueError, "order is 'qkvzz'"),
    "letter": ({"order": "qkvg"}, ValueError, "order is 'qkvg'"),
    "no text": ({"order": None}, ValueError, "order is None"),
    "width": ({"projected": torch.ones(1, 3, 5)}, ValueError, r"projected has shape \[1, 3, 5\]; .* \[B, T, 328\]"),
    "count": ({"projected": (X, X)}, ValueError, "projected has 2 tensors; it must have 6"),
    "part": ({"projected": (X,) * 6}, ValueError, r"q has shape \[1, 3, 392\]; it must be \[1, 3, 32\] or \[1, 3, 2, 16\]"),
    "list": ({"projected": ([1],) * 6}, TypeError, "q is list; it must be a torch.Tensor"),
    "z twice": ({"z": X}, ValueError, "z is given; it must be None where order is 'qkvzba'"),
    "no a": ({"order": "qkvzb", "projected": X[..., :324]}, ValueError, "a is missing; it must be a letter of order"),
    "no z": (
        {"order": "qkvba", "projected": X[..., :200]}, ValueError, "z is missing; it must be given with norm_weight"
    ),
    "no norm": ({"norm_weight": None}, ValueError, "norm_weight is missing; it must be given with z"),
    "heads": ({"heads": 2}, ValueError, "heads is 2; it must be two numbers"),
    "head": ({"heads": (0, 4)}, ValueError, r"heads is \(0, 4\); both must be at least 1"),
    "dims": ({"dims": (16.5, 32)}, TypeError, "dims is float; it must be an integer"),
    "weights": ({"conv_weight": [torch.ones(96, 4)] * 2}, ValueError, "conv_weight has 2 tensors; it must be one, or th"),
    "unlike": (
        {"conv_weight": [torch.ones(32, 4), torch.ones(32, 3), torch.ones(128, 4)]}, ValueError,
        r"conv_weight has shapes \[32, 4\], \[32, 3\], \[128, 4\]; they must be alike",
    ),
    "channels": ({"conv_weight": torch.ones(32, 4)}, ValueError, r"conv_weight has shape \[32, 4\]"),
    "no weight": ({"conv_weight": None}, TypeError, "conv_weight is None; it must be a torch.Tensor"),
    "window": ({"initial_conv_state": torch.ones(1, 192, 4)}, ValueError, r"initial_conv_state has shape \[1, 192, 4\]"),
    "no rates": ({"A_log": None}, ValueError, "A_log is None"),
    "activation": ({"norm_activation": "relu"}, ValueError, "norm_activation is 'relu'"),
    "drafts": (
        {"num_accepted": torch.ones(1), "recurrent": False}, ValueError, "num_accepted is given with recurrent=False"
    ),
    "read only": (
        {"disable_state_update": True, "recurrent": False}, ValueError, "disable_state_update is given with recurrent=F"
    ),
    "two states": ({"state": torch.ones(1, 4, 16, 32)}, ValueError, "initial_state is given; .* None with state"),
    "states alone": (
        {"state": torch.ones(1, 4, 16, 32), "initial_state": None, "output_final_state": False}, ValueError,
        "conv_state is missing; with state it must be given with conv_weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str) -> None:
    change, kind, message = MISTAKES[name]
    layer = make(layers.gated_delta_net, B=1, T=3)
    given = {"projected": torch.cat(list(layer.parts.values()), -1), **layer.tensors, **layer.options}
    with pytest.raises(kind, match=message):
        layers.gated_delta_net(**given | change)


def test_steps_and_decays_belong_together() -> None:
    layer = make(layers.gated_delta_product, B=1, T=3)
    with pytest.raises(ValueError, match="^A_log is missing; it must be given with a"):
        layer(A_log=None)
    with pytest.raises(TypeError, match="^num_householder is float"):
        layer(num_householder=1.5)
    with pytest.raises(ValueError, match=r"^dt_bias has shape \[1\]; it must be \[4\]"):
        layer(dt_bias=torch.zeros(1))
    a = layer.parts.pop("a")
    with pytest.raises(ValueError, match="^a is missing; it must be given with A_log"):
        layer()
    with pytest.raises(ValueError, match=r"^a has shape \[1, 3\]; it must be \[1, 3, 4\]"):
        layer(a=a[..., 0])
    layer.parts["k"] = layer.parts["k"].unflatten(-1, (4, 16))
    with pytest.raises(ValueError, match=r"^k has shape \[1, 3, 4, 16\]; it must be \[1, 3, 64\]$"):
        layer(split=True)


BOUNDS = GRADIENTS | {torch.float64: (1e-11, 1e-11)}


@pytest.mark.parametrize("bounds", [None, PACK])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(function: Any, dtype: torch.dtype, bounds: list[int] | None, device: str) -> None:
    """Of the projection in one tensor and of all others, through o and both states."""
    if dtype is torch.float64 and device != "cpu":
        pytest.skip("float64 is computed on the CPU")
    layer = leaves(make(function, dtype, device, bounds=bounds))
    projected = torch.cat(list(layer.parts.values()), -1).detach().requires_grad_()
    outputs = function(projected, order="".join(layer.parts), **layer.tensors, **layer.options)
    seeds = [torch.randn(x.shape).to(x) for x in outputs]
    torch.autograd.backward(outputs, seeds)
    got = dict(zip(layer.parts, projected.grad.split([x.shape[-1] for x in layer.parts.values()], -1), strict=True))
    got |= {name: x.grad for name, x in layer.tensors.items()}

    x = {name: value.requires_grad_() for name, value in in_float64(layer).items()}
    options = {name: value.cpu() if name == "cu_seqlens" else value for name, value in layer.options.items()}
    wanted = exact(Layer(function, {}, {}, options), x, dtype)
    torch.autograd.backward(wanted, [seed.double().cpu() for seed in seeds])
    for name, value in x.items():
        assert error(got[name], value.grad) < BOUNDS[dtype][name not in OF_ROWS], name


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.bfloat16, 0)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_parts(function: Any, dtype: torch.dtype, bound: float, device: str) -> None:
    """Of tensors on their own and of weights in three parts: those of one, bit by bit but in float64, which PyTorch
    sums in an order that depends on strides."""
    if dtype is torch.float64 and device != "cpu":
        pytest.skip("float64 is computed on the CPU")
    layer = leaves(make(function, dtype, device))
    outputs = layer(split=True)
    seeds = [torch.randn(x.shape).to(x) for x in outputs]
    torch.autograd.backward(outputs, seeds)
    apart = leaves(layer)
    C, steps = apart.tensors["conv_weight"].shape[0], apart.options.get("num_householder", 1)
    widths = [32, 32 * steps, 128 * steps]
    assert sum(widths) == C
    names = ("conv_weight", "conv_bias")
    three = {name: [x.detach().requires_grad_() for x in apart.tensors[name].split(widths)] for name in names}
    projected = torch.cat(list(apart.parts.values()), -1).detach().requires_grad_()
    again = function(projected, order="".join(apart.parts), **apart.tensors | three, **apart.options)
    torch.autograd.backward(again, seeds)
    whole = torch.cat([x.grad for x in layer.parts.values()], -1)
    assert error(projected.grad, whole) <= bound
    gradients = {name: torch.cat([x.grad for x in three[name]]) for name in names}
    gradients |= {name: x.grad for name, x in apart.tensors.items() if name not in names}
    for name, gradient in gradients.items():
        assert error(gradient, layer.tensors[name].grad) <= bound, name
