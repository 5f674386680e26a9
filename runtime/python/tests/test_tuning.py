"""Tuned plans: what is tuned is what is called, and the policy says whether it is used."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from conftest import make
from torch import Tensor, nn

import wyvern
from wyvern import _command, ops


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's; this process has opened its own already."""
    monkeypatch.setenv("WYVERN_CACHE_DIR", str(tmp_path))


def test_tune_leaves_out_what_always_has_its_default_plan() -> None:
    call = make(ops.fused_recurrent_delta_rule, T=3)
    with torch.no_grad(), pytest.raises(ValueError, match="nothing to tune"):
        wyvern.tune(lambda: call.function(**call.tensors, batch_invariant=True), progress=False)


def test_tune_finds_what_a_step_calls() -> None:
    call = make(ops.fused_recurrent_delta_rule, T=3)

    def step():
        o, state = call()
        return o.sum() + state.sum()

    documents = wyvern.tune(step, budget=0.5, progress=False)
    assert all(x.grad is None for x in call.leaves())
    assert [document["problem"]["pass"] for document in documents] == ["recurrent", "backward"]
    for document in documents:
        assert document["operator"] == "delta_rule" and document["device"] == "cpu"
        assert document["problem"]["initial_state"] and document["problem"]["output_final_state"]
        assert document["stored"]
    assert len(wyvern.cache.entries()["winners"]) == 2
    assert wyvern.prepared() == []  # what was prepared may have a better plan now
    step().backward()
    in_use = {one["problem"] for one in wyvern.prepared()}
    assert in_use == {document["problem"]["key"] for document in documents}
    wyvern.cache.clear()
    assert wyvern.cache.stats()["winners"] == 0


def test_tune_knows_pools_of_states() -> None:
    call = make(ops.fused_recurrent_gated_delta_rule, T=3)
    tensors = {name: x.detach() for name, x in call.tensors.items() if name != "initial_state"}
    B, _, HV, V = tensors["v"].shape
    pool = torch.randn(B + 2, HV, tensors["k"].shape[3], V)
    slots = torch.arange(B + 2, dtype=torch.int32).flip(0)[:B]
    columns = slots[:, None].repeat(1, 3)
    steps = torch.empty(B, 3, *pool.shape[1:])
    calls = [
        dict(state=pool, state_index=slots),
        dict(state=pool, state_index=columns, num_accepted=torch.ones(B, dtype=torch.int32)),
        dict(state=pool, state_index=slots, disable_state_update=True, intermediate_states=steps,
             intermediate_index=torch.arange(B, dtype=torch.int32)),
    ]  # fmt: skip
    for options in calls:
        with torch.no_grad():
            documents = wyvern.tune(lambda: call.function(**tensors, **options), budget=0.5, progress=False)  # noqa: B023
            call.function(**tensors, **options)
        assert [one["stored"] for one in documents] == [True]
        assert documents[0]["problem"]["key"] in {one["problem"] for one in wyvern.prepared()}


class Model(nn.Module):
    """A delta rule between projections, with what a model may have of state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.qkv = nn.Linear(8, 48)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, labels: Tensor | None = None, **options: Any) -> dict[str, Any]:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.dropout(self.qkv(x)).unflatten(-1, (3, 1, 16)).unbind(2)
        rule = ops.fused_recurrent_delta_rule if x.shape[1] == 1 else ops.chunk_delta_rule
        k = nn.functional.normalize(k, dim=-1)
        o, _ = rule(q, k, v, v.new_full(v.shape[:3], 0.5), **options)
        return {"loss": None if labels is None else (o - labels).square().mean(), "logits": o}

    def generate(self, x: Tensor, max_new_tokens: int, **options: Any) -> None:
        assert not self.training and not torch.is_grad_enabled()
        self(x, **options)
        for _ in range(max_new_tokens - 1):
            self(x[:, -1:], **options)


def state_of(model: nn.Module) -> list[Any]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    named = {**model.state_dict(), **gradients}
    values = {name: None if x is None else x.clone() for name, x in named.items()}
    return [values, [module.training for module in model.modules()], torch.get_rng_state()]


def test_tune_of_a_model_says_what_was_gained() -> None:
    model = Model()
    model.qkv.eval()
    x, labels = torch.randn(2, 70, 8), torch.randn(2, 70, 1, 16)
    model(x)["logits"].sum().backward()
    before = state_of(model)
    tuned = wyvern.tune(model, {"x": x, "labels": labels}, budget=0.3, progress=False)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0, equal_nan=True)

    met = {(one["problem"]["pass"], one["problem"]["T"]): one["calls"] for one in tuned}
    assert met == {("forward", 70): 3, ("backward", 70): 1, ("recurrent", 1): 1}
    heading, *lines, last = str(tuned).splitlines()
    assert heading.split("  ")[0] == "problem" and heading.endswith("default / tuned")
    assert [line.split()[0] for line in lines] == [one["problem"]["key"] for one in tuned]
    for line, one in zip(lines, tuned, strict=True):
        default, best, gain = map(float, line.split()[-3:])
        assert default == pytest.approx(one["default_ms"], rel=1e-3)
        assert best == pytest.approx(one["tuned_ms"], rel=1e-3)
        assert gain == pytest.approx(one["default_ms"] / one["tuned_ms"], rel=1e-3)
    total = sum(one["calls"] * one["tuned_ms"] for one in tuned)
    assert last.startswith("all calls")
    assert float(last.split()[-2]) == pytest.approx(total, rel=1e-3)

    model(x)
    (used,) = wyvern.prepared()
    heading, line = str(wyvern.prepared()).splitlines()
    assert heading.split() == ["problem", "device", "origin", "plan"]
    plan = [step["template"] for step in used["plan"]]
    assert line.split() == [used["problem"], "cpu", used["origin"], *plan]


@pytest.fixture
def tuned_problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields of what the command is told to tune; it says that nothing was gained."""
    told: list[str] = []

    def run(*arguments: str, quiet: bool) -> dict[str, Any]:
        fields = arguments[arguments.index("--problem") + 1]
        told.append(fields)
        return {"problem": {"key": fields}, "device": "cpu", "default_ms": 1.0, "tuned_ms": 1.0}

    monkeypatch.setattr(_command, "run", run)
    return told


X = torch.randn(1, 5, 8)
LABELS = torch.randn(1, 5, 1, 16)


@pytest.mark.parametrize(
    "batch",
    [
        (X,),
        (X, LABELS),
        ({"x": X, "labels": LABELS, "scale": 0.5},),
        ((X, LABELS),),
        ([X, LABELS],),
    ],
    ids=["tensor", "arguments", "dict", "tuple", "list"],
)
def test_batches_of_a_model(batch: tuple[Any, ...], tuned_problems: list[str]) -> None:
    """A model in evaluation mode is trained too, and one without parameters to train is not."""
    model = Model().eval()
    wyvern.tune(model, *batch)
    scaled = isinstance(batch[0], dict)
    assert ["scale=0.5" in fields for fields in tuned_problems] == [scaled] * 3
    tuned_problems.clear()
    wyvern.tune(model.requires_grad_(False), *batch)
    assert len(tuned_problems) == 2 and not any("backward" in fields for fields in tuned_problems)


def test_another_generate_is_left_out(tuned_problems: list[str]) -> None:
    class Other(Model):
        def generate(self, prompt: str) -> None:
            raise AssertionError

    with pytest.warns(UserWarning, match="Other.generate does not take x, max_new_tokens"):
        wyvern.tune(Other(), X)
    assert len(tuned_problems) == 2


def test_a_model_of_transformers(tuned_problems: list[str]) -> None:
    """Its loss alone has a gradient, and a generation goes on after a token that ends it."""
    pytest.importorskip("transformers.models.kimi_linear", reason="transformers is not installed")
    from test_transformers import tiny

    model = tiny("qwen3_next")
    ids = torch.randint(0, 97, (1, 70))
    with wyvern.transformers.enable():
        model.generation_config.eos_token_id = model(ids).logits[0, -1].argmax().item()
        tuned = wyvern.tune(model, {"input_ids": ids, "labels": ids, "use_cache": False})
    kinds = ("pass=backward", "pass=recurrent", "output_final_state=1", "keep_output=1", "initial_state=0")
    met = [next(kind for kind in kinds if kind in one) for one in tuned_problems]
    # The third is a prefill, the others are forward passes of training and without gradients.
    assert sorted(met) == sorted(kinds)
    assert [one["calls"] for one in tuned] == [2] * 5  # two layers


def test_tune_of_something_else() -> None:
    with pytest.raises(ValueError, match="nothing to tune"):
        wyvern.tune(torch.ones, 3)


def test_cache() -> None:
    assert os.environ["WYVERN_CACHE_DIR"] in wyvern.cache.path()
    with pytest.raises(ValueError, match="w7"):
        wyvern.cache.show("w7")


def test_policy() -> None:
    """Both give the same result; a name that is none is refused."""
    call = make(ops.fused_recurrent_delta_rule, T=3)
    with torch.no_grad():
        wanted = call()[0]
        with wyvern.policy("off"):
            assert torch.equal(call()[0], wanted)
        assert torch.equal(call()[0], wanted)
    with pytest.raises(ValueError, match="'on'"):
        wyvern.policy("on")
