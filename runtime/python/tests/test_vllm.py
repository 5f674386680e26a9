"""wyvern.vllm against vLLM's contract: what fake_vllm.py computes, and the names in vLLM's sources."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import fake_vllm
import pytest
import torch
import wyvern.vllm
from reference import error
from torch import Tensor
from wyvern import _vllm_invariance, ops

H, HV, K, V, SLOTS = 2, 4, 32, 32, 9
ENDS = [0, 70, 71, 200]  # of a prefill


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM in small, and wyvern.vllm that has not seen it."""
    own = fake_vllm.install(monkeypatch)
    monkeypatch.setattr(wyvern.vllm._switch, "pairs", None)
    wyvern.vllm.report(reset=True)
    yield own
    wyvern.vllm.disable()


def pool_of(heads: int = HV, dtype: torch.dtype = torch.float32) -> Tensor:
    """States ``[SLOTS, heads, V, K]``, whose slots are strided as in vLLM's pages."""
    size = heads * V * K
    return torch.randn(SLOTS, size + 64).to(dtype)[:, :size].unflatten(1, (heads, V, K))


def packed_rows(N: int, heads: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    """q, k, v of N tokens as the first columns of wider rows."""
    width = 2 * heads[0] * K + heads[1] * V
    return torch.randn(N, width + 32).to(dtype)[:, :width]


def tokens(T: int, heads: tuple[int, int] = (H, HV), kda: bool = False) -> dict[str, Tensor]:
    q, k, v = (torch.randn(1, T, h, K) for h in (heads[0], heads[0], heads[1]))
    shape = (1, T, heads[1], K) if kda else (1, T, heads[1])
    return {"q": q, "k": k, "v": v, "g": torch.randn(shape), "beta": torch.randn(1, T, heads[1])}


def gate(heads: int, kda: bool = False) -> dict[str, Tensor]:
    return {"A_log": torch.randn(heads), "dt_bias": torch.randn(heads * K if kda else heads)}


def same(mine: Any, theirs: Any, tolerance: float) -> None:
    """Tensors and tuples of them of the same shapes and nearly the same numbers."""
    assert type(mine) is type(theirs)
    if isinstance(mine, tuple):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other, tolerance)
    elif mine is not None:
        assert mine.shape == theirs.shape
        assert error(mine, theirs) < tolerance


def serve(
    module: str, name: str, given: dict[str, Any], counted: str | None = None,
    changed: tuple[str, ...] = (), tolerance: float = 1e-5,
) -> Any:  # fmt: skip
    """What a served call gives: that, and what it leaves in tensors, as without Wyvern."""
    theirs = engines.copied(given)
    wanted = getattr(sys.modules[module], name)(**theirs)
    with wyvern.vllm.enable():
        got = getattr(sys.modules[module], name)(**given)
    told = wyvern.vllm.report(reset=True)
    assert told.served == {counted or name: 1} and not told.declined, told
    same(got, wanted, tolerance)
    for tensor in changed:
        assert error(given[tensor], theirs[tensor]) < tolerance, tensor
    pool = given.get("initial_state")
    if "initial_state" in changed:
        assert got[1] is pool
        assert torch.equal(pool[0], theirs["initial_state"][0])
    return got


INDEX = [4, 0, -1, 7, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_decode(vllm: SimpleNamespace, dtype: torch.dtype) -> None:
    given = {
        "mixed_qkv": packed_rows(5, (H, HV), dtype), "a": torch.randn(5, HV).to(dtype),
        "b": torch.randn(5, 2 * HV).to(dtype)[:, HV:], **gate(HV), "scale": 0.2,
        "initial_state": pool_of(), "out": torch.full((5, 1, HV, V), float("nan"), dtype=dtype),
        "ssm_state_indices": torch.tensor(INDEX), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    untouched = given["initial_state"].clone()
    out = given["out"]
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    serve(
        fake_vllm.FLA, "fused_recurrent_gated_delta_rule_packed_decode", given,
        changed=("initial_state", "out"), tolerance=tolerance,
    )  # fmt: skip
    assert not out[1:3].any()
    others = [slot for slot in range(SLOTS) if slot not in (4, 7, 2)]
    assert torch.equal(given["initial_state"][others], untouched[others])


@pytest.mark.parametrize("invariant", [False, True])
def test_packed_decode_with_narrow_states(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, invariant: bool
) -> None:
    """They are vLLM's, which takes less time, but where bits must not depend on the batch."""
    if invariant:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    given = {
        "mixed_qkv": packed_rows(5, (H, HV)), "a": torch.randn(5, HV), "b": torch.randn(5, HV), **gate(HV),
        "scale": 0.2, "initial_state": pool_of().bfloat16(), "out": torch.full((5, 1, HV, V), float("nan")),
        "ssm_state_indices": torch.tensor(INDEX), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    theirs = engines.copied(given)
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    with wyvern.vllm.enable():
        getattr(sys.modules[fake_vllm.FLA], name)(**given)
    told = wyvern.vllm.report()
    if invariant:
        assert told.served == {name: 1} and not told.declined
    else:
        assert not told.served and "16-bit states" in str(told.declined[name])
    getattr(fake_vllm, name)(**theirs)
    assert error(given["out"], theirs["out"]) < 1e-5
    assert error(given["initial_state"].float(), theirs["initial_state"].float()) < 3e-3


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("columns", [0, 1])
def test_update(vllm: SimpleNamespace, kda: bool, columns: int) -> None:
    """A token a sequence; more rows of indices than sequences, as a captured graph has."""
    x = tokens(5, kda=kda)
    index = torch.tensor([*INDEX, 3, 3], dtype=torch.int32)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], "a": x["g"][0].flatten(1) if kda else x["g"][0],
        "b": x["beta"][0], **gate(HV, kda), "initial_state": pool_of(), "cu_seqlens": torch.arange(6),
        "ssm_state_indices": index[:, None] if columns else index, "use_qk_l2norm_in_kernel": True,
        "is_kda": kda,
    }  # fmt: skip
    serve(fake_vllm.FLA, "fused_sigmoid_gating_delta_rule_update", given, changed=("initial_state",))


def test_recurrent_of_computed_gates(vllm: SimpleNamespace) -> None:
    x = tokens(5)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], "g": -x["g"].abs(), "beta": x["beta"].sigmoid(),
        "initial_state": pool_of(), "cu_seqlens": torch.arange(6), "ssm_state_indices": torch.tensor(INDEX),
        "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    serve(fake_vllm.FLA, "fused_recurrent_gated_delta_rule", given, changed=("initial_state",))
    given = {**given, "g": -torch.rand(1, 5, HV, K), "initial_state": pool_of()}
    serve(f"{fake_vllm.FLA}.kda", "fused_recurrent_kda", given, changed=("initial_state",))


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi_k3_decodes(vllm: SimpleNamespace, bound: float | None) -> None:
    x = tokens(5, (HV, HV), kda=True)
    common = {**gate(HV, kda=True), "lower_bound": bound, "initial_state": pool_of()}
    raw = {"raw_g": x["g"], "raw_beta": x["beta"]}
    packed = {
        "mixed_qkv": packed_rows(5, (HV, HV)), **raw, **common, "state_indices": torch.tensor(INDEX),
        "out": torch.full((1, 5, HV, V), float("nan")),
    }  # fmt: skip
    module = f"{fake_vllm.K3}.ops.third_party.kda"
    for out, changed in ((packed["out"], ("initial_state", "out")), (None, ("initial_state",))):
        name = "fused_recurrent_kda_packed_decode"
        serve(module, name, packed | {"out": out}, f"kimi_k3_{name}", changed)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], **raw, **common, "cu_seqlens": torch.arange(6),
        "ssm_state_indices": torch.tensor(INDEX),
    }  # fmt: skip
    serve(module, "fused_recurrent_kda", given, "kimi_k3_fused_recurrent_kda", ("initial_state",))


@pytest.mark.parametrize("raw", [False, True])
def test_glm5next_decodes(vllm: SimpleNamespace, raw: bool) -> None:
    x = tokens(5, (HV, HV), kda=True)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], "g": x["g"] if raw else -x["g"].abs(),
        "beta": x["beta"] if raw else x["beta"].sigmoid(), "initial_state": pool_of(),
        "cu_seqlens": torch.arange(6), "ssm_state_indices": torch.tensor(INDEX), "sigmoid_beta": raw,
        "compute_gate": raw, "out": torch.full_like(x["v"], float("nan")),
    }  # fmt: skip
    if raw:
        bias = gate(HV, kda=True)
        given |= {"a_log": bias["A_log"].view(1, 1, HV, 1), "g_bias": bias["dt_bias"]}
    serve(
        f"{fake_vllm.GLM}.nvidia.ops.third_party.kda",
        "fused_recurrent_kda",
        given,
        "glm5next_fused_recurrent_kda",
        ("initial_state", "out"),
    )


# Slots of three sequences of up to four tokens, and how many of the last drafts each accepted.
DRAFTS = {"ends": [0, 4, 5, 8], "index": [[1, 2, 3, 4], [5, 0, 6, 7], [8, 8, 8, 8]], "accepted": [3, 1, 2]}


@pytest.mark.parametrize("model", ["qwen", "kimi_k3", "glm5next", "bailing"])
def test_drafts(vllm: SimpleNamespace, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's state goes to its column's slot; the last sequence is null."""
    engines.need("num_accepted", monkeypatch)
    index = torch.tensor(DRAFTS["index"], dtype=torch.int32)
    index[2] = 0
    kda = model != "qwen"
    x = tokens(8, (HV, HV) if kda else (H, HV), kda)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], "initial_state": pool_of(),
        "cu_seqlens": torch.tensor(DRAFTS["ends"], dtype=torch.int32), "ssm_state_indices": index,
        "num_accepted_tokens": torch.tensor(DRAFTS["accepted"], dtype=torch.int32),
    }  # fmt: skip
    bias = gate(HV, kda)
    if model == "qwen":
        given |= {"a": x["g"][0], "b": x["beta"][0], **bias, "use_qk_l2norm_in_kernel": True}
        serve(fake_vllm.FLA, "fused_sigmoid_gating_delta_rule_update", given, changed=("initial_state",))
    elif model == "bailing":
        given |= {
            "g": -x["g"].abs(),
            "beta": x["beta"].sigmoid(),
            "scale": 0.2,
            "use_qk_l2norm_in_kernel": True,
        }
        serve(f"{fake_vllm.FLA}.kda", "fused_recurrent_kda_fwd", given, changed=("initial_state",))
    elif model == "kimi_k3":
        given |= {"raw_g": x["g"], "raw_beta": x["beta"], **bias, "lower_bound": -5.0}
        serve(
            f"{fake_vllm.K3}.ops.third_party.kda", "fused_recurrent_kda", given,
            "kimi_k3_fused_recurrent_kda", ("initial_state",),
        )  # fmt: skip
    else:
        given |= {
            "g": x["g"], "beta": x["beta"], "sigmoid_beta": True, "compute_gate": True,
            "a_log": bias["A_log"], "g_bias": bias["dt_bias"],
        }  # fmt: skip
        serve(
            f"{fake_vllm.GLM}.nvidia.ops.third_party.kda",
            "fused_recurrent_kda",
            given,
            "glm5next_fused_recurrent_kda",
            ("initial_state",),
        )


CUSTOM_OPS = "vllm._custom_ops"
FUSED_DECODE = "fused_gdn_decode_post_conv_mtp"


def fused_decode(
    drafts: bool, dtype: torch.dtype = torch.float32, state: torch.dtype = torch.float32
) -> dict[str, Any]:
    """What the fused decode is given: slices of projected rows, one token of each of five sequences or
    DRAFTS. Some sequences are null by their slot or their count, and a token's column may hold no slot."""
    ends = DRAFTS["ends"] if drafts else list(range(6))
    index = torch.tensor(DRAFTS["index"] if drafts else [[slot] for slot in INDEX], dtype=torch.int32)
    accepted = torch.tensor(DRAFTS["accepted"] if drafts else [1, 1, 1, 0, 1], dtype=torch.int32)
    if drafts:
        index[0, 1] = 0
        index[2] = 0
    T = ends[-1]
    qkv, values = 2 * H * K + HV * V, HV * V
    mixed_qkv, z = torch.randn(T, qkv + values).to(dtype).split([qkv, values], -1)
    b, a = torch.randn(T, 2 * HV).to(dtype).chunk(2, -1)
    return {
        "mixed_qkv": mixed_qkv, "a": a, "b": b, **gate(HV), "state_indices": index,
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32), "num_accepted_tokens": accepted,
        "state": pool_of(dtype=state), "output_gate": z.unflatten(-1, (HV, V)),
        "norm_weight": torch.randn(V).to(dtype), "out": torch.full((T, HV, V), float("nan"), dtype=dtype),
        "scale": 0.2, "norm_eps": 1e-3,
    }  # fmt: skip


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [False, True])
def test_fused_decode_with_norm(
    vllm: SimpleNamespace, drafts: bool, dtype: torch.dtype, state: torch.dtype, activation: str, device: str
) -> None:
    with torch.device(device):
        given = fused_decode(drafts, dtype, state) | {"output_gate_activation": activation}
    untouched = given["state"].clone()
    tolerance = 1e-5 if dtype is state is torch.float32 else 5e-3
    got = serve(CUSTOM_OPS, FUSED_DECODE, given, changed=("state", "out"), tolerance=tolerance)
    assert got is given["out"]
    null, written = (slice(5, 8), [1, 3, 4, 5]) if drafts else ([1, 2, 3], [4, 2])
    assert not got[null].any()
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert torch.equal(given["state"][others], untouched[others])
    assert all((given["state"][slot] != untouched[slot]).any() for slot in written)


def test_fused_decode_by_its_defaults(vllm: SimpleNamespace) -> None:
    """Without a buffer for o; a weight in float32 beside tokens in bfloat16."""
    given = fused_decode(True, torch.bfloat16) | {"norm_weight": torch.randn(V)}
    for name in ("out", "scale", "norm_eps"):
        del given[name]
    got = serve(CUSTOM_OPS, FUSED_DECODE, given, changed=("state",), tolerance=5e-3)
    assert got.is_contiguous() and got.dtype is torch.bfloat16


@pytest.mark.parametrize("wrong", ["gate", "out"])
def test_a_fused_decode_that_is_declined(vllm: SimpleNamespace, wrong: str) -> None:
    """Before the pool changes: vLLM's function starts from what it was."""
    given = fused_decode(True)
    given |= {
        "gate": {"output_gate": given["output_gate"].double()},
        "out": {"out": torch.empty(8, HV, 2 * V)[..., :V]},
    }[wrong]
    theirs = engines.copied(given)
    with wyvern.vllm.enable():
        getattr(sys.modules[CUSTOM_OPS], FUSED_DECODE)(**given)
    told = wyvern.vllm.report()
    assert told.declined.keys() == {FUSED_DECODE} and not told.served
    getattr(fake_vllm, FUSED_DECODE)(**theirs)
    assert torch.equal(given["state"], theirs["state"]) and torch.equal(given["out"], theirs["out"])


def test_the_layer_takes_the_fused_decode_from_its_module() -> None:
    """At each call, so that the replacement there is what is called."""
    (tree,) = source_of(fake_vllm.LAYERS)
    choice = ast.unparse(defined([tree], ast.FunctionDef, "fused_mtp_decode_impl"))
    assert f"return ops.{FUSED_DECODE}" in choice
    assert "from vllm import _custom_ops as ops" in ast.unparse(tree)
    assert "fused_mtp_decode_impl()(" in ast.unparse(tree)


def prompt(kda: bool = False, raw: bool = False) -> dict[str, Any]:
    """What a prefill is given of three sequences."""
    x = tokens(ENDS[-1], (HV, HV) if kda else (H, HV), kda)
    if not raw:
        x["beta"] = x["beta"].sigmoid()
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
        if not kda:
            x["g"] = -x["g"].abs()
    return x | {
        "initial_state": torch.randn(3, HV, V, K),
        "cu_seqlens": torch.tensor(ENDS, dtype=torch.int32),
    }


def test_prefill(vllm: SimpleNamespace) -> None:
    given = prompt() | {"output_final_state": True}
    serve(fake_vllm.LAYERS, "fi_chunk_gated_delta_rule", given | {"use_qk_l2norm_in_kernel": False})
    serve(fake_vllm.LAYERS, "fi_chunk_gated_delta_rule", given | {"output_final_state": False})
    wide = torch.full((ENDS[-1] + 5, HV, V), float("nan"))  # rows of a padded batch
    given["core_attn_out"] = wide[: ENDS[-1]]
    serve(
        fake_vllm.FLA,
        "chunk_gated_delta_rule",
        given | {"use_qk_l2norm_in_kernel": True},
        changed=("core_attn_out",),
    )
    assert wide[ENDS[-1] :].isnan().all()
    given = prompt(kda=True) | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    serve(f"{fake_vllm.FLA}.kda", "chunk_kda", given | {"g": -given["g"].abs()})


@pytest.mark.parametrize(
    ("lengths", "hint"), [([1, 1, 70, 1, 129], 144), ([66, 67, 67], None)], ids=["uneven", "even"]
)
@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize("batches", [1, 2])
def test_lengths_on_the_host_are_a_hint(
    vllm: SimpleNamespace, lengths: list[int], hint: int | None, kda: bool, batches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the metadata whose cu_seqlens a call has, with sequences in front that are decoded; vLLM has a list
    of metadata where it splits a batch."""
    given = prompt(kda) | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if kda:
        given["g"] = -given["g"].abs()
    blocks = -(-torch.tensor(lengths) // 8)
    mine = SimpleNamespace(prefill_query_start_loc=given["cu_seqlens"], nums_dict={8: {"nums": blocks}})
    others = SimpleNamespace(prefill_query_start_loc=given["cu_seqlens"].clone(), nums_dict=None)
    metadata: Any = [{"attention": others}, {"first": others, "second": mine}]
    context = SimpleNamespace(attn_metadata=metadata if batches == 2 else metadata[1])
    known = engines.install(
        monkeypatch, "vllm.forward_context", is_forward_context_available=lambda: context is not None,
        get_forward_context=lambda: context,
    )  # fmt: skip
    told = []
    name = "chunk_kda" if kda else "chunk_gated_delta_rule"
    own = getattr(ops, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs["seqlens_hint"])
        return own(*args, **kwargs)

    monkeypatch.setattr(ops, name, recording)
    path = f"{fake_vllm.FLA}.kda" if kda else fake_vllm.FLA
    serve(path, name, given)
    serve(path, name, given | {"cu_seqlens": given["cu_seqlens"].clone()})
    context.attn_metadata = None  # warm-up
    serve(path, name, given)
    known.is_forward_context_available = lambda: False
    serve(path, name, given)
    assert told == [hint, None, None, None]


def test_the_metadata_is_vllms() -> None:
    """Its fields, the blocks of the convolution, and the context that it is found in."""
    trees = source_of("vllm.v1.attention.backends.gdn_attn")
    fields = {
        node.target.id
        for node in defined(trees, ast.ClassDef, "GDNAttentionMetadata").body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert fields >= {"prefill_query_start_loc", "non_spec_query_start_loc", "nums_dict"}
    (tree,) = source_of("vllm.v1.attention.backends.utils")
    blocks = ast.unparse(defined([tree], ast.FunctionDef, "compute_causal_conv1d_metadata"))
    assert "nums = -(-seqlens // BLOCK_M)" in blocks and "nums_dict[BLOCK_M]['nums'] = nums" in blocks
    trees = source_of("vllm.forward_context")
    for name in ("get_forward_context", "is_forward_context_available"):
        defined(trees, ast.FunctionDef, name)


def test_prefill_of_a_layer(vllm: SimpleNamespace) -> None:
    """Made after enable(), it is of Wyvern's class, which is vLLM's too."""
    given = prompt() | {"output_final_state": True}
    before = vllm.ChunkGatedDeltaRule()
    with wyvern.vllm.enable():
        layer = vllm.ChunkGatedDeltaRule()
        assert type(layer) is vllm.registry["ChunkGatedDeltaRule"] and isinstance(layer, type(before))
        got = layer(**given)
        assert wyvern.vllm.report(reset=True).served == {"ChunkGatedDeltaRule": 1}
        order = list(inspect.signature(vllm.ChunkGatedDeltaRule.forward).parameters)[1:9]
        assert sorted(order) == sorted(given)
        same(layer(*(given[name] for name in order)), got, 1e-9)
        before(**given)  # by the function that it calls
        assert wyvern.vllm.report(reset=True).served == {
            "ChunkGatedDeltaRule": 1,
            "chunk_gated_delta_rule": 1,
        }
    same(got, layer(**given), 1e-5)
    assert str(wyvern.vllm.report()) == "no calls"


@pytest.mark.parametrize("bound", [None, -5.0])
def test_prefill_of_kda(vllm: SimpleNamespace, bound: float | None) -> None:
    """GLM's function has a bound always, which counts with safe_gate alone."""
    given = prompt(kda=True) | gate(HV, kda=True) | {"output_final_state": True, "lower_bound": bound}
    given |= {"raw_g": given.pop("g"), "g_bias": given.pop("dt_bias")}
    name = "chunk_kda_with_fused_gate"
    serve(f"{fake_vllm.FLA}.kda", name, given)
    glm = given | {"safe_gate": bound is not None, "lower_bound": -5.0}
    serve(f"{fake_vllm.GLM}.nvidia.ops.third_party.kda", name, glm, f"glm5next_{name}")
    given |= {"raw_beta": given.pop("beta"), "use_qk_l2norm_in_kernel": True}
    given["out"] = torch.full_like(given["v"], float("nan"))
    serve(f"{fake_vllm.K3}.ops.third_party.kda", name, given, f"kimi_k3_{name}", ("out",))


def flashkda(checkpoints: bool) -> dict[str, Any]:
    given = prompt(kda=True, raw=True) | gate(HV, kda=True) | {"lower_bound": -5.0}
    given |= {
        "out": torch.full_like(given["v"], float("nan")), "workspace": torch.empty(0),
        "final_state": torch.full_like(given["initial_state"], float("nan")),
    }  # fmt: skip
    if checkpoints:
        given["checkpoint_offsets"] = torch.tensor([48, 0, 112])
        given["checkpoint_state"] = torch.full_like(given["initial_state"], 7.0)
    return given


@pytest.mark.parametrize("checkpoints", [False, True])
def test_flashkda_of_kimi_k3(
    vllm: SimpleNamespace, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checkpoints:
        engines.need("checkpoints", monkeypatch)
    changed = ("out", "final_state", *(["checkpoint_state"] if checkpoints else []))
    given = flashkda(checkpoints)
    serve(f"{fake_vllm.K3}.kda", "_flashkda_prefill", given, "kimi_k3_flashkda_prefill", changed)
    if checkpoints:
        assert (given["checkpoint_state"][1] == 7).all()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_flashkda_of_glm5next(
    vllm: SimpleNamespace, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checkpoints:
        engines.need("checkpoints", monkeypatch)
    given = flashkda(checkpoints)
    made = [given.pop(name) for name in ("A_log", "dt_bias", "lower_bound")]
    for name in ("workspace", "final_state", "checkpoint_state"):
        given.pop(name, None)
    if checkpoints:
        given["checkpoint"] = SimpleNamespace(checkpoint_offsets=given.pop("checkpoint_offsets"))
        given |= {name: torch.randn(2) for name in ("raw_qkv", "conv_state", "recurrent_state")}
    wanted_layer = vllm.Glm5NextLinearAttention(*made)
    with torch.no_grad():
        wanted = wanted_layer._flashkda_prefill(**engines.copied(given))
        with wyvern.vllm.enable():
            layer = vllm.Glm5NextLinearAttention(*made)
            got = layer._flashkda_prefill(**given)
            same(layer._flashkda_prefill(**given | {"out": None}), wanted, 1e-5)
    told = wyvern.vllm.report()
    assert told.served == {"glm5next_flashkda_prefill": 2} and not told.declined, told
    same(got, wanted, 1e-5)
    assert got[0].data_ptr() == given["out"].data_ptr()
    exported = [one._checkpoint_exporter.exported for one in (layer, wanted_layer)]
    assert [len(one) for one in exported] == ([2, 1] if checkpoints else [0, 0])
    if checkpoints:
        mine, theirs = exported[0][0], exported[1][0]
        assert mine.keys() == theirs.keys() and mine["checkpoint"] is given["checkpoint"]
        rows = [0, 2]  # offset 0: no checkpoint
        assert error(mine["recurrent_checkpoint"][rows], theirs["recurrent_checkpoint"][rows]) < 1e-5
        for name in ("raw_qkv", "conv_state", "recurrent_state"):
            assert mine[name] is given[name]


@pytest.mark.parametrize("every", [64, 128])
def test_checkpoints(vllm: SimpleNamespace, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.need("checkpoints", monkeypatch)
    counts = [(last - first) // every for first, last in zip(ENDS, ENDS[1:], strict=False)]
    starts = torch.tensor([0, *counts]).cumsum(0)
    given = prompt() | {
        "output_final_state": True, "checkpoint_every_n_tokens": every, "checkpoint_cu_starts": starts,
        "state_checkpoints": torch.full((sum(counts), HV, V, K), float("nan")),
    }  # fmt: skip
    serve(fake_vllm.LAYERS, "fi_chunk_gated_delta_rule", given, changed=("state_checkpoints",))


def test_fp32_checkpoints_of_bf16_states(vllm: SimpleNamespace) -> None:
    """As vLLM asks for with prefix caching and FlashInfer's backend, its default on Hopper."""
    counts = [(last - first) // 64 for first, last in zip(ENDS, ENDS[1:], strict=False)]
    given = prompt() | {
        "output_final_state": True, "checkpoint_every_n_tokens": 64,
        "checkpoint_cu_starts": torch.tensor([0, *counts]).cumsum(0),
        "state_checkpoints": torch.full((sum(counts), HV, V, K), float("nan")),
    }  # fmt: skip
    given["initial_state"] = given["initial_state"].bfloat16()
    serve(fake_vllm.LAYERS, "fi_chunk_gated_delta_rule", given, changed=("state_checkpoints",))


def test_what_is_declined_goes_to_vllm(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, also where vLLM's function calls another that is served."""
    given = prompt() | {"output_final_state": True}

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise ValueError("not today")

    with wyvern.vllm.enable():
        layer = vllm.ChunkGatedDeltaRule()
        monkeypatch.setattr(ops, "chunk_gated_delta_rule", refuses)
        got = layer(**given)
        told = wyvern.vllm.report(reset=True)
        assert told.declined == {"ChunkGatedDeltaRule": {"not today": 1}} and not told.served
        x = tokens(5)
        function = sys.modules[fake_vllm.LAYERS].fused_sigmoid_gating_delta_rule_update
        update = {
            "q": x["q"], "k": x["k"], "v": x["v"], "a": x["g"], "b": x["beta"], **gate(HV),
            "cu_seqlens": torch.arange(6), "ssm_state_indices": torch.tensor(INDEX),
            "initial_state": pool_of(),
        }  # fmt: skip
        for wrong in ({"inplace_final_state": False}, {"beta": 2.0}, {"threshold": 1.0}):
            function(**update, **wrong)
        assert sum(wyvern.vllm.report().declined[function.__name__].values()) == 3
        assert all("must be" in why for why in wyvern.vllm.report().declined[function.__name__])
    same(got, layer(**given), 1e-9)


def test_rows_of_other_heads_are_declined(vllm: SimpleNamespace) -> None:
    given = {
        "mixed_qkv": torch.randn(5, 7), "a": torch.randn(5, HV), "b": torch.randn(5, HV), **gate(HV),
        "scale": 0.2, "initial_state": pool_of(), "out": torch.empty(5, 1, HV, V),
        "ssm_state_indices": torch.tensor(INDEX),
    }  # fmt: skip
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    with wyvern.vllm.enable(), pytest.raises(ValueError, match=r"mixed_qkv has shape \[5, 7\]"):
        getattr(sys.modules[fake_vllm.FLA], name)(**given)
    assert wyvern.vllm.report().declined.keys() == {name}


def test_switches(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """disable(), WYVERN_VLLM=0, another plugin's class, a vLLM of another version, none."""
    names = {path: dict(sys.modules[path].__dict__) for path in fake_vllm.MODULES}
    theirs = type("Theirs", (), {})
    vllm.registry["Glm5NextLinearAttention"] = theirs
    with wyvern.vllm.enable():
        assert wyvern.vllm.is_enabled()
        for path, functions in wyvern.vllm._FUNCTIONS.items():
            for name in functions.keys() & fake_vllm.MODULES[path].keys():
                assert getattr(sys.modules[path], name) is not names[path][name]
        monkeypatch.setenv("WYVERN_VLLM", "0")
        assert not wyvern.vllm.is_enabled()
        vllm.ChunkGatedDeltaRule()(**prompt(), output_final_state=False)
    assert str(wyvern.vllm.report()) == "no calls"
    assert {path: dict(sys.modules[path].__dict__) for path in fake_vllm.MODULES} == names
    assert vllm.registry["Glm5NextLinearAttention"] is theirs


def test_vllm_goes_on_without_what_is_missing(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in fake_vllm.MODULES:
        if path != fake_vllm.FLA:
            monkeypatch.setitem(sys.modules, path, None)  # importing it fails
    with wyvern.vllm.enable():
        assert len(wyvern.vllm._switch.pairs or []) == len(fake_vllm.MODULES[fake_vllm.FLA])
    monkeypatch.setitem(sys.modules, fake_vllm.FLA, None)
    monkeypatch.setattr(wyvern.vllm._switch, "pairs", None)
    with pytest.raises(ImportError, match=r"wyvern.vllm needs vLLM 0.33.*pip install"):
        wyvern.vllm.enable()
    with pytest.warns(UserWarning, match="wyvern.vllm needs vLLM 0.33"):
        wyvern.vllm.plugin()
    assert not wyvern.vllm.is_enabled()


def test_vllm_goes_on_where_another_version_has_changed(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes that cannot be registered stay; functions are served."""
    monkeypatch.delattr(sys.modules["vllm.model_executor.custom_op"], "op_registry_oot")
    with pytest.warns(UserWarning, match="wyvern leaves vllm.models.glm5next.*op_registry_oot"):
        wyvern.vllm.plugin()
    assert wyvern.vllm.is_enabled()
    assert sys.modules[fake_vllm.FLA].chunk_gated_delta_rule is not vllm.chunk_gated_delta_rule
    layer = vllm.ChunkGatedDeltaRule()
    assert type(layer) is vllm.ChunkGatedDeltaRule


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), AssertionError("no"), OSError(13, "denied")])
def test_no_error_leaves_the_plugin(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails() -> Any:
        raise error

    monkeypatch.setattr(wyvern.vllm._switch, "_find", fails)
    with pytest.warns(UserWarning, match="Wyvern serves nothing in this process"):
        wyvern.vllm.plugin()
    assert not wyvern.vllm.is_enabled()


PACKAGE = """
import vllm.imported
vllm.imported.names.append(__name__)
"""
PROGRAM = """
import sys, torch, wyvern.vllm
wyvern.vllm.plugin()
assert wyvern.vllm.is_enabled() and not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")], "imported"
import {FLA}, later
import vllm.imported
assert vllm.imported.names == ["{FLA}.chunk", "{FLA}"], vllm.imported.names
package = sys.modules["{FLA}"]
for place in (package, package.chunk, later):
    assert place.chunk_gated_delta_rule is package.chunk_gated_delta_rule
    assert hasattr(place.chunk_gated_delta_rule, "__wrapped__")
wyvern.vllm.disable()
import {FLA}.kda
for place, name in ((package, "chunk_gated_delta_rule"), (later, "chunk_gated_delta_rule"), (package.kda, "chunk_kda")):
    assert not hasattr(getattr(place, name), "__wrapped__")
wyvern.vllm.enable()
assert hasattr(package.kda.chunk_kda, "__wrapped__") and hasattr(later.chunk_gated_delta_rule, "__wrapped__")
"""


def test_the_plugin_imports_nothing(tmp_path: Path) -> None:
    """Modules have their functions replaced when they are imported, wherever these are by then."""
    folder = tmp_path.joinpath(*fake_vllm.FLA.split("."))
    folder.mkdir(parents=True)
    for above in list(folder.parents)[: len(fake_vllm.FLA.split(".")) - 1]:
        (above / "__init__.py").touch()
    (tmp_path / "vllm" / "imported.py").write_text("names = []\n")
    function = "def {}(q, k, v, g, beta, initial_state=None, cu_seqlens=None): return None\n"
    (folder / "chunk.py").write_text(PACKAGE + function.format("chunk_gated_delta_rule"))
    (folder / "__init__.py").write_text("from .chunk import chunk_gated_delta_rule\n" + PACKAGE)
    (folder / "kda.py").write_text(PACKAGE + function.format("chunk_kda"))
    (tmp_path / "later.py").write_text(f"from {fake_vllm.FLA} import chunk_gated_delta_rule\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{FLA}", fake_vllm.FLA)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_the_reason_is_in_the_error_on_gpus(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own error, of its type, which says why Wyvern declined too."""

    class TritonError(Exception):
        def __init__(self, source: str, line: int) -> None:
            super().__init__(f"{source}:{line}")

    def fails(*args: Any, **kwargs: Any) -> None:
        raise TritonError("kernel", 7)

    monkeypatch.setattr("wyvern._serving.on_cpu", lambda *args, **kwargs: False)
    monkeypatch.setattr(sys.modules[fake_vllm.FLA], "chunk_gated_delta_rule", fails)
    given = {**prompt(), "beta": torch.randn(1, 3, 2)}
    with wyvern.vllm.enable(), pytest.raises(TritonError, match="^kernel:7") as raised:
        sys.modules[fake_vllm.FLA].chunk_gated_delta_rule(**given)
    (reasons,) = wyvern.vllm.report().declined.values()
    (why,) = reasons
    assert why in "".join(traceback.format_exception(raised.value))


def pages(dtype: torch.dtype, tokens_first: bool) -> tuple[Tensor, Tensor]:
    """States ``[SLOTS, HV, V, K]`` and the rows ``[SLOTS, C, 3]`` before sequences, which share pages."""
    C = 3 * HV * K
    state, rows = 4 * HV * V * K, 3 * C * dtype.itemsize
    memory = torch.zeros(SLOTS, state + rows + 64, dtype=torch.uint8)
    states = memory[:, :state].view(torch.float32).unflatten(1, (HV, V, K))
    before = memory[:, state : state + rows].view(dtype)
    before = before.unflatten(1, (3, C)).mT if tokens_first else before.unflatten(1, (C, 3))
    states.copy_(torch.randn(states.shape))
    before.copy_(torch.randn(before.shape))
    return states, before


@pytest.mark.parametrize("tokens_first", [True, False])
@pytest.mark.parametrize(("biased", "normed"), [(False, True), (True, False)])
def test_kimi_k3_decodes_whole_layers(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, biased: bool, normed: bool, tokens_first: bool
) -> None:
    """With the convolution in front and the norm behind, from pages of states and rows; null slots stay."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        states, before = pages(dtype, tokens_first)
        kept = states.clone(), before.clone()
        x = tokens(5, (HV, HV), kda=True)
        given = {
            "x": packed_rows(5, (HV, HV), dtype), "weight": 0.5 * torch.randn(3, 4, HV * K),
            "bias": 0.5 * torch.randn(3 * HV * K) if biased else None, "conv_state": before,
            "raw_g": x["g"].to(dtype), "raw_beta": x["beta"].to(dtype), **gate(HV, kda=True), "lower_bound": -5.0,
            "state_indices": torch.tensor(INDEX, dtype=torch.int32), "state": states,
            "out": torch.full((1, 5, HV, V), float("nan"), dtype=dtype),
        }  # fmt: skip
        if normed:
            given |= {"output_gate": torch.randn(5, HV, V).to(dtype), "norm_weight": torch.randn(V)}
        serve(CUSTOM_OPS, "fused_kda_decode", given, changed=("state", "conv_state", "out"), tolerance=tolerance)
        others = [slot for slot in range(SLOTS) if slot not in (4, 7, 2)]
        for now, then in zip((states, before), kept, strict=True):
            assert torch.equal(now[others], then[others])
        assert not given["out"][0, 1:3].any()


def test_weights_of_a_fused_decode_are_turned_once() -> None:
    weight = torch.randn(3, 4, 8)
    taps = wyvern.vllm._taps_of(weight)
    assert torch.equal(taps.view(3, 8, 4), weight.mT) and wyvern.vllm._taps_of(weight) is taps
    weight.mul_(2)
    assert torch.equal(wyvern.vllm._taps_of(weight).view(3, 8, 4), weight.mT)


def test_fused_decodes_are_counted(vllm: SimpleNamespace) -> None:
    states, before = pages(torch.float32, tokens_first=True)
    x = tokens(5, (HV, HV), kda=True)
    with wyvern.vllm.enable():
        o = sys.modules[CUSTOM_OPS].fused_kda_decode(
            packed_rows(5, (HV, HV)), torch.randn(3, 4, HV * K), None, before, x["g"], x["beta"],
            **gate(HV, kda=True), state_indices=torch.tensor(INDEX), state=states,
        )  # fmt: skip
        sys.modules["vllm.utils.flashinfer"].flashinfer_fused_kda_decode(x=torch.randn(3, 8))
    assert o.isfinite().all() and o.any()
    told = wyvern.vllm.report()
    assert told.declined.keys() == {"fused_kda_decode", "flashinfer_fused_kda_decode"} and not told.served


def test_pages_that_warm_up(vllm: SimpleNamespace) -> None:
    """vLLM warms its update up with a state of whole pages ``[1, elements]``; index 0 is null."""
    x = tokens(1)
    given = {
        "q": x["q"], "k": x["k"], "v": x["v"], "a": x["g"], "b": x["beta"], **gate(HV),
        "initial_state": torch.randn(1, HV * V * K + 64), "inplace_final_state": True,
        "cu_seqlens": torch.tensor([0, 1], dtype=torch.int32),
        "ssm_state_indices": torch.zeros(1, 1, dtype=torch.int32), "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    before = given["initial_state"].clone()
    name = "fused_sigmoid_gating_delta_rule_update"
    with wyvern.vllm.enable():
        o, state = getattr(sys.modules[fake_vllm.FLA], name)(**given)
    assert wyvern.vllm.report().served == {name: 1}
    assert not o.any() and state is given["initial_state"] and torch.equal(state, before)


@pytest.fixture
def invariant(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """VLLM_BATCH_INVARIANT, and what wyvern.ops is called with."""
    called: list[dict[str, Any]] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(kwargs)
            return function(*args, **kwargs)

        return call

    for name in (
        "chunk_gated_delta_rule",
        "chunk_kda",
        "fused_recurrent_gated_delta_rule",
        "fused_recurrent_kda",
    ):
        monkeypatch.setattr(ops, name, recorded(getattr(ops, name)))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    return called


def test_calls_of_an_invariant_engine(
    vllm: SimpleNamespace, invariant: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All by batch_invariant: a sequence has the same bits alone; what is declined is an error."""
    given = prompt() | {"output_final_state": True}
    alone = {name: given[name][:, ENDS[2] :] for name in ("q", "k", "v", "g", "beta")} | {
        "initial_state": given["initial_state"][2:], "cu_seqlens": torch.tensor([0, ENDS[3] - ENDS[2]]),
        "output_final_state": True,
    }  # fmt: skip
    module = sys.modules[fake_vllm.FLA]
    with wyvern.vllm.enable():
        o, state = module.chunk_gated_delta_rule(**given)
        one, after = module.chunk_gated_delta_rule(**alone)
        assert torch.equal(o[:, ENDS[2] :], one) and torch.equal(state[2:], after)
        x = tokens(5, kda=True)
        kda = {name: x[name] for name in ("q", "k", "v", "g", "beta")} | {
            "initial_state": pool_of(), "cu_seqlens": torch.arange(6),
            "ssm_state_indices": torch.tensor(INDEX), "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip
        sys.modules[f"{fake_vllm.FLA}.kda"].fused_recurrent_kda(**kda)
        sys.modules[CUSTOM_OPS].fused_gdn_decode_post_conv_mtp(**fused_decode(False))
        assert len(invariant) == 4 and all(call["batch_invariant"] is True for call in invariant)
        wrong = {**given, "beta": torch.randn(1, 3, 2)}
        with pytest.raises(
            ValueError, match="chunk_gated_delta_rule, and vLLM's own.*VLLM_BATCH_INVARIANT.*beta"
        ):
            module.chunk_gated_delta_rule(**wrong)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
        module.chunk_gated_delta_rule(**given)
        assert invariant[-1]["batch_invariant"] is False


def test_tokens_that_decode_beside_prompts(
    vllm: SimpleNamespace, invariant: list[dict[str, Any]]
) -> None:
    """Kimi's layers pass them through prefill; they get the bits of a step in which all decode."""
    dtype = torch.bfloat16
    ends = [0, 1, 2, 70, 71, 200]
    mixed_qkv = packed_rows(ends[-1], (HV, HV), dtype)
    x = tokens(ends[-1], (HV, HV), kda=True)
    common = {**gate(HV, kda=True), "lower_bound": -5.0}
    bias = {"A_log": common["A_log"], "g_bias": common["dt_bias"], "lower_bound": -5.0}
    single = [0, 1, 3]
    rows = [ends[n] for n in single]
    pool = pool_of()
    q, k, v = (
        x.unflatten(-1, (HV, -1)).unsqueeze(0)
        for x in mixed_qkv.split([HV * K, HV * K, HV * V], dim=-1)
    )
    g, beta = x["g"].to(dtype), x["beta"].to(dtype)
    module = sys.modules[f"{fake_vllm.K3}.ops.third_party.kda"]
    with wyvern.vllm.enable():
        o, state = module.chunk_kda_with_fused_gate(
            q=q, k=k, v=v, raw_g=g, raw_beta=beta, **bias, initial_state=pool[1:6].clone(),
            output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        )  # fmt: skip
        alone, _ = module.fused_recurrent_kda_packed_decode(
            mixed_qkv=mixed_qkv[rows], raw_g=g[:, rows], raw_beta=beta[:, rows], **common,
            initial_state=pool, state_indices=torch.tensor([n + 1 for n in single]),
        )  # fmt: skip
    assert o.isfinite().all() and o.any()
    assert torch.equal(o[0, rows], alone.view(len(rows), HV, V))
    assert torch.equal(state[single], pool[[n + 1 for n in single]])


def test_an_invariant_engine_accepts_these_models(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AttentionBackend:
        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return False

    class GDNAttentionBackend(AttentionBackend):
        pass

    class KimiK3KDAAttentionBackend(GDNAttentionBackend):
        pass

    path = "vllm.v1.attention.backends.gdn_attn"
    engines.install(monkeypatch, path, GDNAttentionBackend=GDNAttentionBackend)
    kinds = (GDNAttentionBackend, KimiK3KDAAttentionBackend, AttentionBackend)
    for _ in range(2):
        with wyvern.vllm.enable():
            assert [kind.supports_batch_invariance() for kind in kinds] == [True, True, False]
        assert not any(kind.supports_batch_invariance() for kind in kinds)
        monkeypatch.setattr(wyvern.vllm._switch, "pairs", None)


@pytest.mark.parametrize(
    ("start", "count", "last", "cut"),
    [
        (0, 1000, 1000, 1000),  # the prompt's end
        (0, 1024, 2500, 1024),
        (0, 1000, 2500, 960),
        (960, 63, 2500, 0),  # not even a chunk is left of the budget
        (50, 100, 2500, 78),  # after a start that was cut elsewhere
        (0, 128, 129, 64),  # the last token alone would be decoded
        (64, 64, 129, 0),
        (2500, 1, 2500, 1),  # decoding
    ],
)
def test_where_prompts_are_cut(start: int, count: int, last: int, cut: int) -> None:
    assert _vllm_invariance.tokens_until_cut(start, count, last) == cut


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("asked", [False, True])
def test_the_scheduler_of_an_invariant_engine(
    vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mode: str, asked: bool
) -> None:
    class Scheduler:
        def __init__(self, mode: str) -> None:
            self.has_mamba_layers = True
            self.need_mamba_block_aligned_split = mode == "align"

        def _mamba_block_aligned_split(
            self, request: Any, num_new_tokens: int, num_new_local_computed_tokens: int = 0,
            num_external_computed_tokens: int = 0,
        ) -> int:  # fmt: skip
            return min(num_new_tokens, 600)

    engines.install(monkeypatch, "vllm.v1.core.sched.scheduler", Scheduler=Scheduler)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(asked)))
    request = SimpleNamespace(num_computed_tokens=64, num_prompt_tokens=5000, num_tokens=5000)
    with wyvern.vllm.enable():
        one = Scheduler(mode)
        assert one.need_mamba_block_aligned_split is (asked or mode == "align")
        own = 600 if mode == "align" else 700
        got = one._mamba_block_aligned_split(request, 700, 64, num_external_computed_tokens=0)
        assert got == ((128 + own) // 64 * 64 - 128 if asked else own)


def parameters_of(function: ast.FunctionDef) -> dict[str, Any]:
    """Names and defaults, or inspect's empty, of what may be given by place, in its order."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    defaults = [inspect.Parameter.empty] * (len(arguments) - len(function.args.defaults))
    defaults += [eval(ast.unparse(default), {}) for default in function.args.defaults]  # 128**-0.5
    return {argument.arg: default for argument, default in zip(arguments, defaults, strict=True)}


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    found = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in found if one.kind is one.POSITIONAL_OR_KEYWORD}


def source_of(path: str) -> list[ast.Module]:
    """A module's source, or a package's files, where vLLM is installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    place = Path(spec.submodule_search_locations[0]).joinpath(*path.split(".")[1:])
    files = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    return [ast.parse(file.read_text()) for file in files]


def defined(trees: list[ast.Module], kind: type[ast.AST], name: str) -> Any:
    (found,) = [node for tree in trees for node in tree.body if isinstance(node, kind) and node.name == name]
    return found


FUNCTIONS = [(path, name) for path, names in wyvern.vllm._FUNCTIONS.items() for name in names]


@pytest.mark.parametrize(("path", "name"), FUNCTIONS)
def test_names_and_defaults_are_vllms(path: str, name: str) -> None:
    """Each is known here, and those of fake_vllm's functions are the same."""
    if path == "vllm.utils.flashinfer":  # made by a function, so of any arguments
        (tree,) = source_of(path)
        assert any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
        return
    theirs = parameters_of(defined(source_of(path), ast.FunctionDef, name))
    assert not unknown(wyvern.vllm._FUNCTIONS[path][name], theirs)
    if name in fake_vllm.MODULES[path]:
        assert parameters(fake_vllm.MODULES[path][name]) == theirs


def unknown(served: Any, names: Iterable[str]) -> list[str]:
    if isinstance(served, wyvern.vllm._Declined):  # whatever it is given
        return []
    return [name for name in names if served.ours(name) is None and name not in wyvern.vllm._UNUSED]


@pytest.mark.parametrize(("path", "name"), FUNCTIONS)
def test_names_are_known(path: str, name: str) -> None:
    """Of fake_vllm's functions, and no two of a function are one argument here."""
    served, own = wyvern.vllm._FUNCTIONS[path][name], fake_vllm.MODULES[path].get(name)
    assert own is not None
    names = list(parameters(own))
    assert not unknown(served, names)
    if isinstance(served, wyvern.vllm._Declined):
        return
    ours = [served.ours(x) for x in names if served.ours(x) is not None]
    assert len(set(ours)) == len(ours)


def test_arguments_of_another_vllm(vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known here is declined where it says something."""
    module, own = sys.modules[f"{fake_vllm.K3}.kda"], fake_vllm.k3_flashkda_prefill

    def newer(*args: Any, checkpoint_indptr: Tensor | None = None, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    added = inspect.Parameter("checkpoint_indptr", inspect.Parameter.KEYWORD_ONLY, default=None)
    signature = inspect.signature(own)
    newer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_flashkda_prefill", newer)
    given = flashkda(False)
    with wyvern.vllm.enable():
        got = module._flashkda_prefill(**engines.copied(given), checkpoint_indptr=None)
        wanted = module._flashkda_prefill(**given, checkpoint_indptr=torch.tensor([0]))
    told = wyvern.vllm.report()
    name = "kimi_k3_flashkda_prefill"
    assert told.served == {name: 1} and list(told.declined[name].values()) == [1]
    assert "checkpoint_indptr is given" in next(iter(told.declined[name]))
    same(got, wanted, 1e-5)


@pytest.mark.parametrize("wrong", ["strided", "small", "dtype"])
def test_a_buffer_that_does_not_fit_is_declined(vllm: SimpleNamespace, wrong: str) -> None:
    """Before the pool changes: vLLM's function starts from what it was."""
    given = {
        "mixed_qkv": packed_rows(5, (H, HV)), "a": torch.randn(5, HV), "b": torch.randn(5, HV), **gate(HV),
        "scale": 0.2, "initial_state": pool_of(), "ssm_state_indices": torch.tensor(INDEX),
        "out": {
            "strided": torch.empty(5, 1, HV, 2 * V)[..., :V], "small": torch.empty(4, 1, HV, V),
            "dtype": torch.empty(5, 1, HV, V, dtype=torch.float64),
        }[wrong],
    }  # fmt: skip
    theirs = engines.copied(given)
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    with wyvern.vllm.enable():
        function = getattr(sys.modules[fake_vllm.FLA], name)
        if wrong == "small":
            with pytest.raises(ValueError, match=r"out has shape \[4, 1, 4, 32\]"):
                function(**given)
        else:
            function(**given)
    told = wyvern.vllm.report()
    assert told.declined.keys() == {name} and not told.served
    if wrong != "small":
        getattr(fake_vllm, name)(**theirs)
        assert torch.equal(given["initial_state"], theirs["initial_state"])
        assert torch.equal(given["out"], theirs["out"])


@pytest.mark.parametrize("name", wyvern.vllm._METHODS)
def test_methods_are_vllms(name: str) -> None:
    path, methods = wyvern.vllm._METHODS[name]
    kind = defined(source_of(path), ast.ClassDef, name)
    for method, (described, served) in methods.items():
        own = {one.name: one for one in kind.body if isinstance(one, ast.FunctionDef)}
        assert not unknown(served, parameters_of(own[described]))
        if served.whole:
            (made,) = inspect.signature(getattr(getattr(fake_vllm, name), method)).parameters.keys(),
            assert list(made) == list(parameters_of(own[method]))
