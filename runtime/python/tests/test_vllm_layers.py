"""wyvern.vllm's layers as a whole, against vLLM's in small (fake_vllm.py), and the names that they take from vLLM."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engines
import fake_vllm
import pytest
import test_vllm
import torch
import wyvern.vllm
from reference import error
from torch import Tensor
from wyvern import _vllm_layers, ops

H, HV, D, SLOTS, TAPS, DRAFTS = 2, 4, 32, 16, 4, 2
vllm = test_vllm.vllm


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM's forward context, whose metadata a test sets."""
    made = SimpleNamespace(attn_metadata=None)
    engines.install(
        monkeypatch, "vllm.forward_context", get_forward_context=lambda: made,
        is_forward_context_available=lambda: True,
    )  # fmt: skip
    yield made


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(prompts: list[tuple[int, int, bool]], decoding: list[int], drafts: list[tuple[list[int], int, int]]) -> Any:
    """Metadata of a step as vLLM's builder makes it.

    prompts: tokens, slot, whether it goes on. decoding: slots. drafts: slots by token, tokens, accepted before.
    """
    lengths = [1] * len(decoding) + [tokens for tokens, _, _ in prompts]
    starts = ints(0, *torch.tensor(lengths).cumsum(0).tolist()) if lengths else None
    # A column of vLLM's table of blocks.
    slots = ints(*decoding, *(slot for _, slot, _ in prompts))[:, None].repeat(1, 3)[:, 0] if lengths else None
    goes_on = torch.tensor([True] * len(decoding) + [starts for _, _, starts in prompts])
    peeled = 0 if drafts else len(decoding)
    tokens, drafted = sum(lengths), sum(count for _, count, _ in drafts)
    step = SimpleNamespace(
        num_prefills=len(prompts) + (len(decoding) if drafts else 0), num_decodes=peeled, num_decode_tokens=peeled,
        num_spec_decodes=len(drafts), num_actual_tokens=tokens + drafted, num_spec_decode_tokens=drafted,
        num_prefill_tokens=tokens - peeled,
        spec_sequence_masks=torch.tensor([True]) if drafts else None, checkpoint=None,
        flashinfer_checkpoint_plan=None, non_spec_query_start_loc=starts, non_spec_state_indices_tensor=slots,
        has_initial_state=goes_on, prefill_query_start_loc=None, prefill_state_indices=None,
        prefill_has_initial_state=None, spec_query_start_loc=None, spec_state_indices_tensor=None,
        num_accepted_tokens=None, spec_token_indx=None, non_spec_token_indx=None, nums_dict=None,
    )  # fmt: skip
    if prompts:
        step.prefill_query_start_loc = starts[peeled:] - peeled
        step.prefill_state_indices = slots[peeled:]
        step.prefill_has_initial_state = goes_on[peeled:]
    if drafts:
        order = torch.randperm(tokens + drafted) if tokens else torch.arange(drafted)
        step.spec_token_indx = order[:drafted].sort().values
        step.non_spec_token_indx = order[drafted:].sort().values
        step.spec_query_start_loc = ints(0, *torch.tensor([count for _, count, _ in drafts]).cumsum(0).tolist())
        table = torch.tensor([[*columns, -1] for columns, _, _ in drafts], dtype=torch.int32)
        step.spec_state_indices_tensor = table[:, :-1]
        step.num_accepted_tokens = ints(*(accepted for _, _, accepted in drafts))
    return step


PROMPTS = [(70, 5, True), (1, 6, False), (0, 0, False), (129, 7, False)]
VERIFIED = [([8, 9, 10], 3, 2), ([11, 12, 13], 2, 1), ([0, 0, 0], 1, 1)]
STEPS = {
    "decode": ([], [3, 0, 4, 15], []),
    "prompts": (PROMPTS, [], []),
    "prompts_and_decode": (PROMPTS, [3, 0, 4], []),
    "drafts": ([], [], VERIFIED),
    "drafts_and_prompts": (PROMPTS, [3], VERIFIED),
}


def layer_of(kind: type, dtype: torch.dtype, tokens_first: bool) -> Any:
    """A layer with pages of random states and windows, as long as drafts need."""
    heads = (HV, HV) if kind.__name__.startswith("Kimi") else (H, HV)
    C, L = (2 * heads[0] + heads[1]) * D, TAPS - 1 + DRAFTS
    size = HV * D * D
    pool = torch.randn(SLOTS, size + 64)[:, :size].unflatten(1, (HV, D, D))
    windows = torch.randn(SLOTS, L, C) if tokens_first else torch.randn(SLOTS, C, L)
    rates = HV * D if heads[0] == HV else HV
    made = kind(
        0.5 * torch.randn(C, TAPS).to(dtype), torch.randn(HV), torch.randn(rates), torch.randn(D),
        [windows.to(dtype), pool], 1e-5,
    )  # fmt: skip
    return made.requires_grad_(False)


def rows_of(kind: type, method: str, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a method is given, with two rows of padding behind the tokens; o is not finite before."""
    T = tokens + 2
    kimi = kind.__name__.startswith("Kimi")
    width = (3 * HV if kimi else 2 * H + HV) * D
    qkv = torch.randn(T, width + 32).to(dtype)[:, :width]
    gate, out = torch.randn(T, HV, D).to(dtype), torch.full((T, HV, D), float("nan")).to(dtype)
    if kimi:
        g = torch.randn(1, T, HV, D).to(dtype)
        beta = torch.randn(1, T, HV).to(dtype)
        return {"mixed_qkv": qkv, "g1": g, "g2": gate, "beta": beta, "core_attn_out": out[None]}
    given = {"mixed_qkv": qkv, "b": torch.randn(T, HV).to(dtype), "a": torch.randn(T, HV).to(dtype)}
    if method == "_forward_core_fused_norm":
        given["output_gate"] = gate
    return given | {"core_attn_out": out}


METHODS = [
    ("QwenGatedDeltaNetAttention", "_forward_core"),
    ("QwenGatedDeltaNetAttention", "_forward_core_fused_norm"),
    ("KimiGatedDeltaNetAttention", "_forward"),
    ("KimiK3DeltaAttention", "_forward"),
]


def both(
    vllm: SimpleNamespace, context: SimpleNamespace, name: str, method: str, step: Any, dtype: torch.dtype,
    tokens_first: bool = True, states: torch.dtype = torch.float32,
) -> tuple[Any, Any, dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Layers of vLLM's class and of Wyvern's after the same step, and what they were given."""
    kind = getattr(vllm, name)
    theirs = layer_of(kind, dtype, tokens_first)
    theirs.kv_cache[1] = theirs.kv_cache[1].to(states)
    with wyvern.vllm.enable():
        mine = layer_of(kind, dtype, tokens_first)
        assert type(mine) is not kind
        mine.load_state_dict(theirs.state_dict())
        mine.conv1d, mine.norm = theirs.conv1d, theirs.norm
        mine.kv_cache = [x.clone() for x in theirs.kv_cache]
        given = rows_of(kind, method, step.num_actual_tokens, dtype)
        copied = engines.copied(given)
        context.attn_metadata = {theirs.prefix: step}
        getattr(mine, method)(**given)
    getattr(theirs, method)(**copied)
    return mine, theirs, given, copied


@pytest.mark.parametrize(("name", "method"), METHODS)
@pytest.mark.parametrize("kind", STEPS)
def test_a_step(vllm: SimpleNamespace, context: SimpleNamespace, name: str, method: str, kind: str) -> None:
    """o of its tokens, states and windows are vLLM's; what the step does not have stays."""
    for dtype, tolerance, tokens_first in ((torch.float32, 2e-5, True), (torch.bfloat16, 6e-3, False)):
        step = step_of(*STEPS[kind])
        mine, theirs, given, copied = both(vllm, context, name, method, step, dtype, tokens_first)
        told = wyvern.vllm.report(reset=True)
        assert list(told.served.values()) == [1] and not told.declined, told
        o, wanted = (x["core_attn_out"].view(-1, HV, D)[: step.num_actual_tokens] for x in (given, copied))
        assert o.isfinite().all() and error(o, wanted) < tolerance
        assert given["core_attn_out"].view(-1, HV, D)[step.num_actual_tokens :].isnan().all()
        assert error(mine.kv_cache[1], theirs.kv_cache[1]) < tolerance
        assert torch.equal(mine.kv_cache[0], theirs.kv_cache[0])


def test_calls_of_operators(vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for prompts, with what vLLM knows of their lengths, and one for tokens that decode."""
    called: list[tuple[str, dict[str, Any]]] = []
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        own = getattr(ops, name)

        def recorded(*args: Any, name: str = name, own: Any = own, **kwargs: Any) -> Any:
            called.append((name, kwargs))
            return own(*args, **kwargs)

        monkeypatch.setattr(ops, name, recorded)
    step = step_of(*STEPS["prompts_and_decode"])
    step.nums_dict = {8: {"nums": -(-torch.tensor([1, 1, 1, 70, 1, 0, 129]) // 8)}}
    both(vllm, context, "QwenGatedDeltaNetAttention", "_forward_core", step, torch.bfloat16)
    (chunk, prompts), (recurrent, tokens) = called
    assert (chunk, recurrent) == ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    assert prompts["seqlens_hint"] == ops.hint_of_uneven(136, 200, 4)
    assert prompts["out"].data_ptr() != tokens["out"].data_ptr() and "norm_weight" not in prompts


def test_without_metadata(vllm: SimpleNamespace, context: SimpleNamespace) -> None:
    """While vLLM measures its memory nothing is computed, and its kernels are warmed up."""
    with wyvern.vllm.enable():
        layer = layer_of(vllm.QwenGatedDeltaNetAttention, torch.float32, True)
        given = rows_of(type(layer), "_forward_core", 3, torch.float32)
        for context.attn_metadata in (None, {"another layer": None}):
            layer._forward_core(**given)
        assert layer.warmed == 2 and given["core_attn_out"].isnan().all()


def test_runs_of_tokens(vllm: SimpleNamespace, context: SimpleNamespace) -> None:
    """Kimi K3's drafts and other tokens may each be one run of the step's, which says where it starts."""
    step = step_of(*STEPS["drafts_and_prompts"])
    step.non_spec_token_start, step.spec_token_start = step.num_spec_decode_tokens, 0
    order = torch.arange(step.num_actual_tokens)
    step.spec_token_indx, step.non_spec_token_indx = order.split(
        [step.num_spec_decode_tokens, step.num_actual_tokens - step.num_spec_decode_tokens]
    )
    mine, theirs, given, copied = both(vllm, context, "KimiK3DeltaAttention", "_forward", step, torch.float32)
    assert list(wyvern.vllm.report().served.values()) == [1]
    tokens = step.num_actual_tokens
    o, wanted = (x["core_attn_out"][0, :tokens] for x in (given, copied))
    assert error(o, wanted) < 2e-5 and error(mine.kv_cache[1], theirs.kv_cache[1]) < 2e-5
    assert torch.equal(mine.kv_cache[0], theirs.kv_cache[0])


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", ["decode", "drafts", "prompts_and_decode"])
@pytest.mark.parametrize(("name", "method"), METHODS)
def test_qwen_decodes_narrow_states_by_vllms_kernel(
    vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, method: str,
    kind: str, invariant: bool,
) -> None:  # fmt: skip
    """Of all steps and layers no others, and not where bits must not depend on the batch."""
    if invariant:
        if "Qwen" not in name:
            pytest.skip("it is served by function")
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    both(vllm, context, name, method, step_of(*STEPS[kind]), torch.bfloat16, states=torch.bfloat16)
    told = wyvern.vllm.report()
    declined = kind == "decode" and "Qwen" in name and not invariant
    assert ("16-bit states" in str(told.declined)) == declined, told
    assert bool(told.served) != declined, told


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("decode", {"kda_decode_backend": "cuda"}, "takes less time"),
        ("drafts", {"use_recoverssm": True}, "RecoverSSM"),
        ("prompts", {"batch_invariant": True}, "by function"),
        ("decode", {"batch_invariant": True}, "by function"),
    ],
)
def test_kimi_k3_keeps_what_is_its_own(
    vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str,
    changed: dict[str, Any], why: str,
) -> None:  # fmt: skip
    for name, value in changed.items():
        if name == "batch_invariant":
            monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
            continue
        monkeypatch.setattr(vllm.KimiK3DeltaAttention, name, value)
    step = step_of(*STEPS[kind])
    mine, theirs, *_ = both(vllm, context, "KimiK3DeltaAttention", "_forward", step, torch.float32)
    told = wyvern.vllm.report()
    assert not told.served and why in str(told.declined) and torch.equal(mine.kv_cache[1], theirs.kv_cache[1])


def test_checkpoints_of_kimi_k3(
    vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a sequence, after the tokens that the step says."""
    step = step_of([(128, 5, True), (192, 6, False)], [3], [])
    step.checkpoint = SimpleNamespace(checkpoint_offsets=ints(0, 64, 192))
    buffer = torch.full((9, HV, D, D), float("nan"))
    manager = SimpleNamespace(get_simultaneous=lambda *specs: [None, None, buffer, None])
    engines.install(monkeypatch, "vllm.v1.worker.workspace", current_workspace_manager=lambda: manager)
    kind = vllm.KimiK3DeltaAttention
    monkeypatch.setattr(kind, "_flashkda_buffer_specs", [None] * 4, raising=False)
    monkeypatch.setattr(kind, "_checkpoint_exporter", fake_vllm.Exporter(), raising=False)
    given = both(vllm, context, kind.__name__, "_forward", step, torch.bfloat16)[2]
    assert not wyvern.vllm.report().declined
    (told,) = kind._checkpoint_exporter.exported
    states = told["recurrent_checkpoint"]
    assert states.shape[0] == 3 and states[0].isnan().all() and "recurrent_rows" not in told
    assert torch.equal(told["raw_qkv"], given["mixed_qkv"][: step.num_actual_tokens])
    assert error(states[2], told["recurrent_state"][6]) < 5e-3


def test_checkpoints(vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states that the plan asks for, in vLLM's buffer, and the rows of all tokens in front of them."""
    step = step_of([(128, 5, True), (192, 6, False)], [3], [])
    step.checkpoint = object()
    step.flashinfer_checkpoint_plan = SimpleNamespace(every_n_tokens=64, num_checkpoints=5, rows=ints(0, 3))
    buffer = torch.full((9, HV, D, D), float("nan"))
    manager = SimpleNamespace(get_simultaneous=lambda spec: [buffer[: spec[0][0]]])
    engines.install(monkeypatch, "vllm.v1.worker.workspace", current_workspace_manager=lambda: manager)
    kind = vllm.QwenGatedDeltaNetAttention
    monkeypatch.setattr(kind, "_checkpoint_buffer_spec", ((9, HV, D, D), torch.float32), raising=False)
    monkeypatch.setattr(kind, "_checkpoint_exporter", fake_vllm.Exporter(), raising=False)
    given = both(vllm, context, kind.__name__, "_forward_core", step, torch.bfloat16)[2]
    assert not wyvern.vllm.report().declined
    (told,) = kind._checkpoint_exporter.exported
    assert told["checkpoint"] is step.checkpoint and told["recurrent_rows"] is step.flashinfer_checkpoint_plan.rows
    assert told["cu_seqlens"] is step.non_spec_query_start_loc
    assert torch.equal(told["raw_qkv"], given["mixed_qkv"][: step.num_actual_tokens])
    assert told["conv_state"].shape == (SLOTS, given["mixed_qkv"].shape[1], TAPS - 1 + DRAFTS)
    states = told["recurrent_checkpoint"]
    assert states.shape[0] == 5 and states.isfinite().all() and buffer[5:].isnan().all()
    # The second sequence's last is its final state, which is in its page.
    assert error(states[4], told["recurrent_state"][6]) < 5e-3


def test_what_is_declined_goes_to_vllm(vllm: SimpleNamespace, context: SimpleNamespace) -> None:
    """As a whole, before anything is written; why is counted."""
    step = step_of(*STEPS["drafts"])
    step.num_decodes = 1
    mine, theirs, given, copied = both(
        vllm, context, "QwenGatedDeltaNetAttention", "_forward_core", step, torch.float32
    )
    told = wyvern.vllm.report()
    assert not told.served and told.declined["forward_core"] == {"tokens decode beside drafts": 1}
    assert torch.equal(mine.kv_cache[1], theirs.kv_cache[1])
    o, wanted = (x["core_attn_out"][: step.num_actual_tokens] for x in (given, copied))
    assert torch.equal(o, wanted)


def test_a_step_is_not_computed_twice(
    vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is declined after other tokens have changed their pages is an error."""

    def declined(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no such heads")

    monkeypatch.setattr(_vllm_layers, "decode", declined)
    with pytest.raises(_vllm_layers.PartError, match="no such heads"):
        both(
            vllm, context, "QwenGatedDeltaNetAttention", "_forward_core", step_of(*STEPS["prompts_and_decode"]),
            torch.float32,
        )  # fmt: skip


def test_graphs_are_left_as_by_vllms(
    vllm: SimpleNamespace, context: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that vLLM runs between pieces of a graph runs there in Wyvern's class too."""
    told: list[str] = []

    def breaks(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            told.append(function.__name__)
            return function(*args, **kwargs)

        call.__wrapped__ = function
        call.__name__ = function.__name__
        return call

    module = sys.modules[fake_vllm.KIMI]
    kind = type("KimiGatedDeltaNetAttention", (vllm.KimiGatedDeltaNetAttention,), {})
    kind._forward = breaks(vllm.KimiGatedDeltaNetAttention._forward)
    monkeypatch.setattr(module, "KimiGatedDeltaNetAttention", kind)
    monkeypatch.setattr(module, "eager_break_during_capture", breaks, raising=False)
    with wyvern.vllm.enable():
        layer = layer_of(kind, torch.float32, True)
        context.attn_metadata = {layer.prefix: step_of(*STEPS["decode"])}
        layer._forward(**rows_of(kind, "_forward", 4, torch.float32))
    assert told == ["_forward"] and wyvern.vllm.report().served == {"forward": 1}


def test_names_are_vllms() -> None:
    """Fields of the metadata, and what layers have."""
    fields = {
        node.target.id
        for node in test_vllm.defined(
            test_vllm.source_of("vllm.v1.attention.backends.gdn_attn"), ast.ClassDef, "GDNAttentionMetadata"
        ).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(vars(step_of(*STEPS["decode"]))) <= fields
    source = inspect.getsource(_vllm_layers)
    for name, (path, methods) in wyvern.vllm._METHODS.items():
        if not name.endswith("GatedDeltaNetAttention"):
            continue
        trees = test_vllm.source_of(path)
        kind = ast.unparse(test_vllm.defined(trees, ast.ClassDef, name))
        used = {"conv1d", "A_log", "dt_bias", "o_norm" if name.startswith("Kimi") else "norm"}
        used |= {"gate_lower_bound"} if name.startswith("Kimi") else {"_warmup_prefill_kernels", "_checkpoint_exporter"}
        assert all(f".{one}" in source and f"self.{one}" in kind for one in used), name
        assert "self.kv_cache" in kind and "self.prefix" in kind
