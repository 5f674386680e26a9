"""Tiny random models of transformers, generating with Wyvern what they generate with PyTorch."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers.models.kimi_linear",
    reason="transformers with Kimi Linear is not installed: pip install transformers",
)
import cpu_ratio

import wyvern.transformers as served

HYBRID = ["linear_attention", "full_attention", "linear_attention"]
COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "layer_types": HYBRID,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LINEAR = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# The model's module, its configuration's and its own class, what is its own in the configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        LINEAR | {"num_experts": 4, "head_dim": 32, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", LINEAR | {"head_dim": 32}),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_local_experts": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
        },
    ),
}
CALLS = {
    "qwen3_next": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "qwen3_5": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "kimi_linear": ("chunk_kda", "fused_recurrent_kda"),
}
WHOLE = {"qwen3_next": "gated_delta_net", "qwen3_5": "gated_delta_net", "kimi_linear": "kimi_delta"}
NEW_TOKENS = 20


def module_of(model: str) -> Any:
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def installed() -> list[str]:
    """The models of the installed transformers that have one of the functions, by their sources."""
    place = Path(importlib.import_module("transformers").__file__).parent / "models"
    return sorted(
        file.parent.name
        for file in place.glob("*/modeling_*.py")
        if any(f"\ndef {name}(" in file.read_text() for name in served._FUNCTIONS)
        and file.name == f"modeling_{file.parent.name}.py"
    )


INSTALLED = installed()


def tiny(model: str) -> Any:
    config, language_model, own = MODELS[model]
    torch.manual_seed(0)
    package = importlib.import_module("transformers")
    made = getattr(package, language_model)(getattr(package, config)(**COMMON | own))
    return made.float().eval()


def generate(model: Any, **options: Any) -> Any:
    """Of two prompts; the second is padded on the left."""
    prompt = torch.randint(0, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    return model.generate(
        prompt,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


@pytest.fixture(autouse=True)
def counted_from_zero(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without Wyvern every model computes by PyTorch, whether other libraries are installed or not."""
    for model in INSTALLED:
        module = module_of(model)
        for name in served._FUNCTIONS:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    monkeypatch.setattr(served._switch, "pairs", None)
    served.report(reset=True)
    yield
    served.disable()


@pytest.mark.parametrize(
    ("model", "whole"), [*((model, False) for model in MODELS), *((model, True) for model in WHOLE)]
)
def test_the_same_tokens(model: str, whole: bool) -> None:
    language_model = tiny(model)
    wanted = generate(language_model)
    assert not served.report().served
    with served.enable(layers=whole):
        got = generate(language_model)
    assert torch.equal(got.sequences, wanted.sequences)
    for logits, exact in zip(got.logits, wanted.logits, strict=True):
        assert (logits - exact).norm() < 1e-4 * exact.norm()
    chunked, recurrent = CALLS[model]
    layers = HYBRID.count("linear_attention")
    counted = served.report()
    one_by_one = {chunked: layers, recurrent: layers * (NEW_TOKENS - 1)}
    assert counted.served == ({WHOLE[model]: layers * NEW_TOKENS} if whole else one_by_one)
    assert not counted.declined


@pytest.mark.parametrize("model", WHOLE)
def test_whole_layers_generate_as_without_a_cache(model: str) -> None:
    """Every token from the states of the cache, or all of them again, which the library computes."""
    language_model = tiny(model)
    wanted = generate(language_model, use_cache=False)
    with served.enable():
        got = generate(language_model)
    assert torch.equal(got.sequences, wanted.sequences)
    for logits, exact in zip(got.logits, wanted.logits, strict=True):
        assert (logits - exact).norm() < 1e-4 * exact.norm()


@pytest.mark.parametrize("model", WHOLE)
def test_whole_layers_generate_by_beams(model: str) -> None:
    """Whose states change places between steps."""
    language_model = tiny(model)
    wanted = generate(language_model, num_beams=3)
    with served.enable():
        got = generate(language_model, num_beams=3)
    assert torch.equal(got.sequences, wanted.sequences)
    counted = served.report()
    assert counted.served == {WHOLE[model]: HYBRID.count("linear_attention") * NEW_TOKENS}
    assert not counted.declined


def norm_of(layer: Any) -> Any:
    return layer.o_norm if hasattr(layer, "o_norm") else layer.norm


def layer_and_cache(model: str) -> tuple[Any, Any]:
    """A linear layer of a model, with weights of the norm that are no ones, and what makes empty caches."""
    language_model = tiny(model)
    layer = next(x for x in language_model.modules() if type(x).__name__ in served._LAYERS.values())
    torch.nn.init.normal_(norm_of(layer).weight, mean=1.0, std=0.3)
    cache = importlib.import_module("transformers").DynamicCache
    return layer, lambda: cache(config=language_model.config)


def close(got: torch.Tensor, exact: torch.Tensor, bound: float = 1e-5) -> bool:
    return got.shape == exact.shape and bool((got - exact).norm() < bound * exact.norm())


LENGTHS = [(70, 5, 2, *[1] * 20), (2, 1, 2, 70), (1, 1, 1)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("model", WHOLE)
def test_whole_layers_leave_what_theirs_leave(model: str, lengths: tuple[int, ...]) -> None:
    """The output, and both states in the cache, after each part of a prompt and each step; padded on the left.

    Where theirs computes every other part neither shows that ours did: the cache keeps its tensors.
    """
    layer, cache = layer_and_cache(model)
    past, exact_past, mixed_past = cache(), cache(), cache()
    x, mask = torch.randn(2, sum(lengths), 64), torch.ones(2, sum(lengths))
    mask[1, :30] = 0
    begin, places = 0, set()
    with torch.no_grad():
        for i, length in enumerate(lengths):
            now = slice(begin, begin + length)
            part = {"hidden_states": x[:, now], "attention_mask": mask[:, now]}
            wanted = layer(**part, cache_params=exact_past)
            if i % 2:
                assert close(layer(**part, cache_params=mixed_past), wanted)
            with served.enable():
                assert close(layer(**part, cache_params=past), wanted)
                if i % 2 == 0:
                    assert close(layer(**part, cache_params=mixed_past), wanted)
            theirs, ours = exact_past.layers[0], past.layers[0]
            for kept in (ours, mixed_past.layers[0]):
                assert torch.equal(kept.conv_states[0], theirs.conv_states[0])
                assert close(kept.recurrent_states[0], theirs.recurrent_states[0])
            places.add((ours.conv_states[0].data_ptr(), ours.recurrent_states[0].data_ptr()))
            begin += length
    counted = served.report()
    assert counted.served == {WHOLE[model]: len(lengths) + (len(lengths) + 1) // 2}
    assert not counted.declined and len(places) == 1


def transpose_state(past: Any) -> None:
    """The same state, its rows and columns in the other order in memory."""
    states = past.layers[0].recurrent_states
    states[0] = states[0].mT.contiguous().mT


@pytest.mark.parametrize("change", [None, transpose_state])
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("model", WHOLE)
def test_steps_that_are_not_in_place(model: str, with_gradients: bool, change: Any) -> None:
    """The output and both states; of a step with gradients the backward pass is beyond the cache, theirs too."""
    layer, cache = layer_and_cache(model)
    pasts = [cache(), cache()]
    prompt, x, outputs = torch.randn(2, 9, 64), torch.randn(2, 1, 64), []
    for past, whole in zip(pasts, (False, True), strict=True):
        with torch.no_grad():
            layer(prompt, cache_params=past)
        if change is not None:
            change(past)
        with torch.set_grad_enabled(with_gradients), served.enable() if whole else contextlib.nullcontext():
            outputs.append(layer(x, cache_params=past).detach())
    assert served.report().served == {WHOLE[model]: 1} and not served.report().declined
    assert close(outputs[1], outputs[0])
    theirs, ours = (past.layers[0] for past in pasts)
    assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
    assert close(ours.recurrent_states[0], theirs.recurrent_states[0])


@pytest.mark.parametrize("model", WHOLE)
def test_a_step_that_is_declined_changes_no_state(model: str) -> None:
    """The library computes it, from the states as they were."""
    layer, cache = layer_and_cache(model)
    pasts = [cache(), cache()]
    with torch.no_grad():
        for past, whole in zip(pasts, (False, True), strict=True):
            layer(torch.ones(2, 9, 64), cache_params=past)
            past.layers[0].recurrent_states[0] = past.layers[0].recurrent_states[0].double()
            with served.enable() if whole else contextlib.nullcontext():
                layer(torch.ones(2, 1, 64), cache_params=past)
    (reason,) = served.report().declined[WHOLE[model]]
    assert reason.startswith("state")
    theirs, ours = (past.layers[0] for past in pasts)
    assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
    assert close(ours.recurrent_states[0], theirs.recurrent_states[0])


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_whole_layers_take_packs(model: str) -> None:
    """Whose convolution sees no other sequence; without seq_idx theirs does, which stays theirs."""
    layer, _ = layer_and_cache(model)
    x, ends = torch.randn(1, 70, 64), [0, 1, 33, 70]
    pack = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32)}
    lengths = torch.tensor(ends).diff()
    with torch.no_grad():
        wanted = torch.cat([layer(part) for part in x.split(lengths.tolist(), 1)], 1)
        with served.enable():
            seq_idx = torch.arange(3, dtype=torch.int32).repeat_interleave(lengths)[None]
            assert close(layer(x, **pack, seq_idx=seq_idx), wanted)
            assert served.report(reset=True).served == {"gated_delta_net": 1}
            layer(x, **pack)
    assert served.report().served == {"chunk_gated_delta_rule": 1}


def hook_convolution(layer: Any, past: Any) -> None:
    layer.conv1d._hf_hook = type("Hook", (), {"pre_forward": lambda *_: None, "post_forward": lambda *_: None})()


def change_norm(layer: Any, past: Any) -> None:
    norm_of(layer).register_forward_hook(lambda module, args, o: 2 * o)


def record(layer: Any, past: Any) -> None:
    past.activate_past_recording()


@pytest.mark.parametrize("change", [hook_convolution, change_norm, record])
@pytest.mark.parametrize("model", WHOLE)
def test_other_layers_are_as_without(model: str, change: Any) -> None:
    layer, cache = layer_and_cache(model)
    pasts = [cache(), cache()]
    x = torch.randn(1, 20, 64)
    for past in pasts:
        change(layer, past)
    with torch.no_grad():
        with served.enable(layers=False):
            wanted = layer(x, cache_params=pasts[0])
        with served.enable():
            assert torch.equal(layer(x, cache_params=pasts[1]), wanted)
    assert served.report().served == {CALLS[model][0]: 2}


def test_a_forward_of_others_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may do more than the model's, which is what Wyvern computes."""
    layer, _ = layer_and_cache("qwen3_5")
    own, x = type(layer).forward, torch.randn(1, 20, 64)

    @functools.wraps(own)
    def twice(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * own(*args, **kwargs)

    with served.enable(layers=False), torch.no_grad():
        wanted = layer(x)
    monkeypatch.setattr(type(layer), "forward", twice)
    served.report(reset=True)
    with served.enable(), torch.no_grad():
        assert torch.equal(layer(x), 2 * wanted)
    assert served.report().served == {"chunk_gated_delta_rule": 1}
    assert type(layer).forward is twice


def test_calls_that_are_not_whole() -> None:
    """Where wyvern.layers declines: by the operators; after disable() by the library alone."""
    layer, _ = layer_and_cache("qwen3_5")
    own, x = type(layer).forward, torch.randn(1, 20, 64)
    with served.enable():
        assert type(layer).forward is not own
        layer.norm.activation = "relu"
        with torch.no_grad():
            layer(x)
    counted = served.report()
    assert counted.served == {"chunk_gated_delta_rule": 1}
    (reason,) = counted.declined["gated_delta_net"]
    assert reason.startswith("norm_activation is 'relu'")
    assert type(layer).forward is own


@pytest.mark.parametrize("whole", [False, True])
def test_gradients_of_a_model(whole: bool) -> None:
    language_model = tiny("qwen3_next")
    tokens = torch.randint(0, 97, (1, 20), generator=torch.Generator().manual_seed(2))

    def gradients() -> list[torch.Tensor]:
        loss = language_model(tokens, labels=tokens).loss
        return list(torch.autograd.grad(loss, list(language_model.parameters()), allow_unused=True))

    wanted = gradients()
    with served.enable(layers=whole):
        got = gradients()
    assert served.report().served == {"gated_delta_net" if whole else "chunk_gated_delta_rule": 2}
    for gradient, exact in zip(got, wanted, strict=True):
        assert (gradient is None) == (exact is None)
        if exact is not None:
            assert (gradient - exact).norm() <= 1e-3 * exact.norm() + 1e-7


@pytest.mark.parametrize("model", WHOLE)
def test_gradients_of_whole_layers(model: str) -> None:
    """In float64, of the input and every parameter, those of their own layer, which computes in float32."""
    layer, _ = layer_and_cache(model)
    layer = layer.double()
    x = torch.randn(2, 40, 64, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(2, 40, 64, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x), leaves, seed)
    with served.enable():
        got = torch.autograd.grad(layer(x), leaves, seed)
    assert served.report().served == {WHOLE[model]: 1}
    for gradient, exact in zip(got, wanted, strict=True):
        assert close(gradient, exact, 1e-4)


def test_traced_layers_are_theirs() -> None:
    layer, _ = layer_and_cache("qwen3_5")
    x = torch.randn(1, 20, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = layer(x)
        with served.enable():
            assert close(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted)
    counted = served.report()
    assert counted.traced == {"chunk_gated_delta_rule": 1} and not counted.served


def test_traced_steps_are_theirs() -> None:
    """From the states that a prompt left which was not traced."""
    layer, cache = layer_and_cache("qwen3_5")
    past, exact_past = cache(), cache()
    x = torch.randn(2, 23, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        layer(x[:, :20], cache_params=exact_past)
        with served.enable():
            layer(x[:, :20], cache_params=past)
            compiled = torch.compile(layer, backend="eager")
            for t in range(20, 23):
                wanted = layer(x[:, t : t + 1], cache_params=exact_past)
                assert close(compiled(x[:, t : t + 1], cache_params=past), wanted)
                theirs, ours = exact_past.layers[0], past.layers[0]
                assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
                assert close(ours.recurrent_states[0], theirs.recurrent_states[0])
    counted = served.report()
    assert counted.traced == {"fused_recurrent_gated_delta_rule": 1}
    assert counted.served == {"gated_delta_net": 1 + 3} and not counted.declined


def test_what_is_declined_goes_to_the_model() -> None:
    module = module_of("qwen3_next")
    own = module.torch_chunk_gated_delta_rule
    q, k, v = (torch.randn(1, 5, 1, 300) for _ in range(3))
    gates = {"g": -torch.rand(1, 5, 1), "beta": torch.rand(1, 5, 1)}
    wanted, _ = own(q, k, v, **gates)
    with served.enable():
        assert module.torch_chunk_gated_delta_rule is not own
        o, _ = module.torch_chunk_gated_delta_rule(q, k, v, **gates, use_cache=True)
    assert torch.equal(o, wanted)
    (reason,) = served.report().declined["chunk_gated_delta_rule"]
    assert "K is 300" in reason
    assert module.torch_chunk_gated_delta_rule is own


def function_calls() -> list[tuple[str, str]]:
    return [
        (model, name) for model in INSTALLED for name in served._FUNCTIONS if hasattr(module_of(model), name)
    ]


@pytest.mark.parametrize(("model", "name"), function_calls())
def test_arguments_by_place_and_by_name(model: str, name: str) -> None:
    """Each argument is what the model's own function takes it for; those that are left out may be."""
    module = module_of(model)
    own = getattr(module, name)
    recurrent = "recurrent" in name
    tokens = 3 if recurrent else 70
    q, k, v = (torch.randn(2, tokens, 2, 32) for _ in range(3))
    decays = (2, tokens, 2, 32) if "kimi" in name else (2, tokens, 2)
    arguments = [q, k, v, -torch.rand(decays), torch.rand(2, tokens, 2)]
    if not recurrent:
        arguments.append(64)
    arguments += [torch.randn(2, 2, 32, 32), True, True]
    by_name = dict(zip(inspect.signature(own).parameters, arguments, strict=False))
    assert {"query", "key", "value", "g", "beta", "initial_state", "output_final_state"} <= by_name.keys()
    wanted = own(*arguments)
    with served.enable():
        replaced = getattr(module, name)
        assert replaced is not own
        mixed = dict(list(by_name.items())[6:])
        results = [replaced(*arguments), replaced(**by_name), replaced(*arguments[:6], **mixed)]
        with pytest.raises(TypeError, match="multiple values"):
            replaced(*arguments, value=v)
        with pytest.raises(TypeError, match="positional arguments"):
            replaced(*arguments, None)
    for result in results:
        for got, exact in zip(result, wanted, strict=True):
            assert (got - exact).norm() < 1e-4 * exact.norm()
    counted = served.report()
    assert list(counted.served.values()) == [3] and not counted.declined


def test_every_model_with_these_functions_is_served() -> None:
    assert set(INSTALLED) <= set(served._MODELS)


def test_the_comparison_of_times() -> None:
    """Both compute the same and are timed; how much faster is for a quiet machine to say."""
    arguments = ["70", "--rounds", "1", "--heads", "1", "2", "--batches", "1", "3"]
    rows = cpu_ratio.main(arguments)
    assert [row["what"] for row in rows] == ["prompt, T=70", "decoding, batch 1", "decoding, batch 3"]
    assert all(row["ratio"] > 0 for row in rows)
