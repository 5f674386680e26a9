"""wyvern.sglang against SGLang's contract: what fake_sglang.py computes, the names in SGLang's sources."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import fake_sglang
import pytest
import torch
import wyvern.sglang
from reference import error
from torch import Tensor

H, HV, K, V, SLOTS = 2, 4, 32, 32, 9
ENDS = [0, 70, 71, 200]
INDEX = [4, 0, -1, 7, 2]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """SGLang in small, and wyvern.sglang that has not seen it."""
    fake = fake_sglang.install(monkeypatch)
    monkeypatch.setattr(wyvern.sglang._switch, "pairs", None)
    monkeypatch.setattr(wyvern.sglang, "_made", {})
    wyvern.sglang.report(reset=True)
    yield fake
    wyvern.sglang.disable()


def pool_of(rows: int = SLOTS, *, steps: int | None = None) -> Tensor:
    """States ``[rows, HV, V, K]`` of one layer in pages of three; with steps a buffer of snapshots."""
    if steps is not None:
        return torch.randn(rows, steps, HV, V, K)
    return torch.randn(rows, 3, HV, V, K)[:, 1]


def dispatcher(sglang: SimpleNamespace, kda: bool, prefill: str = "triton") -> Any:
    if kda:
        return sglang.KDAKernelDispatcher("triton", "triton", "triton")
    return sglang.GDNKernelDispatcher("triton", prefill, None)


def compare(sglang: SimpleNamespace, kda: bool, role: str, method: str, given: dict[str, Any],
            changed: tuple[str, ...], counted: str, prefill: str = "triton") -> tuple[Any, Any]:  # fmt: skip
    """Wyvern's result and SGLang's, of one served call; named tensors end up the same."""
    theirs = engines.copied(given)
    wanted = getattr(getattr(dispatcher(sglang, kda, prefill), role), method)(**theirs)
    with wyvern.sglang.enable():
        kernel = getattr(dispatcher(sglang, kda, prefill), role)
        got = getattr(kernel, method)(**given)
    told = wyvern.sglang.report(reset=True)
    assert told.served == {counted: 1} and not told.declined, told
    for name in changed:
        assert error(given[name], theirs[name]) < 1e-5, name
    return got, wanted


def gates(kda: bool) -> dict[str, Tensor]:
    return {"A_log": torch.randn(HV), "dt_bias": torch.randn(HV * K if kda else HV)}


@pytest.mark.parametrize("kda", [False, True])
def test_decode(sglang: SimpleNamespace, kda: bool) -> None:
    """-1 is padding, and vLLM's 0 is not; slots that no sequence has keep their bits."""
    heads = HV if kda else H
    q, k, v = (torch.randn(1, 5, h, K) for h in (heads, heads, HV))
    given = {
        "q": q, "k": k, "v": v, "a": torch.randn(1, 5, HV * K) if kda else torch.randn(5, HV),
        "b": torch.randn(1, 5, HV) if kda else torch.randn(5, HV), **gates(kda), "ssm_states": pool_of(),
        "cache_indices": torch.tensor(INDEX, dtype=torch.int32), "query_start_loc": torch.arange(6),
    }  # fmt: skip
    if kda:
        given["lower_bound"] = -5.0
    before = given["ssm_states"].clone()
    name = "kda_decode" if kda else "gdn_decode"
    got, wanted = compare(sglang, kda, "decode_kernel", "decode", given, ("ssm_states",), name)
    assert got.shape == wanted.shape == (1, 5, HV, V) and error(got, wanted) < 1e-5
    assert not got[:, 2].any() and got[:, 1].any()
    others = [slot for slot in range(SLOTS) if slot not in INDEX]
    assert torch.equal(given["ssm_states"][others], before[others])
    assert not torch.equal(given["ssm_states"][0], before[0])


@pytest.mark.parametrize("kda", [False, True])
def test_packed_decode(sglang: SimpleNamespace, kda: bool) -> None:
    heads = HV if kda else H
    width = 2 * heads * K + HV * V
    given = {
        "mixed_qkv": torch.randn(5, width), "a": torch.randn(5, HV, K) if kda else torch.randn(5, HV),
        "b": torch.randn(5, HV), **gates(kda), "scale": 0.3, "ssm_states": pool_of(),
        "cache_indices": torch.tensor(INDEX, dtype=torch.int32), "num_v_heads": HV, "head_v_dim": V,
        "replayssm_write_pos": None,
    }  # fmt: skip
    name = "kda_packed_decode" if kda else "gdn_packed_decode"
    got, wanted = compare(sglang, kda, "decode_kernel", "packed_decode", given, ("ssm_states",), name)
    assert got.shape == wanted.shape == (1, 5, HV, V) and error(got, wanted) < 1e-5


def verified(kda: bool, tree: bool) -> dict[str, Any]:
    """Drafts of four tokens for three sequences, the last of which is padding."""
    N, steps = 3, 4
    heads = HV if kda else H
    q, k, v = (torch.randn(1, N * steps, h, K) for h in (heads, heads, HV))
    parent = torch.tensor([[99, 0, 0, 1], [99, 0, 1, 2], [99, 0, 0, 0]])  # the first is never set
    return {
        "q": q, "k": k, "v": v,
        "a": torch.randn(1, N * steps, HV * K) if kda else torch.randn(N * steps, HV),
        "b": torch.randn(N * steps, HV), **gates(kda), "ssm_states": pool_of(),
        "cache_indices": torch.tensor([4, 0, -1]),
        "query_start_loc": torch.arange(0, N * steps + 1, steps),
        "intermediate_states_buffer": pool_of(5, steps=steps),
        "intermediate_state_indices": torch.tensor([3, 1, 0]), "cache_steps": steps,
        "retrieve_parent_token": parent if tree else None,
    }  # fmt: skip


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("kda", [False, True])
def test_target_verify(
    sglang: SimpleNamespace, kda: bool, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stays as it was; the states after each token go to the buffer."""
    engines.need("parent", monkeypatch)
    given = verified(kda, tree)
    before = given["ssm_states"].clone()
    kept = given["intermediate_states_buffer"].clone()
    name = "kda_target_verify" if kda else "gdn_target_verify"
    role = "verify_kernel" if kda or not tree else "tree_verify_kernel"
    changed = ("intermediate_states_buffer",)
    got, wanted = compare(sglang, kda, role, "target_verify", given, changed, name)
    assert got.shape == wanted.shape and error(got, wanted) < 1e-5 and not got[:, 8:].any()
    assert torch.equal(given["ssm_states"], before)
    assert torch.equal(given["intermediate_states_buffer"][[2, 4]], kept[[2, 4]])
    if tree:
        assert given["retrieve_parent_token"][0, 0] == 99


def prompt(kda: bool) -> dict[str, Any]:
    heads = HV if kda else H
    q, k, v = (torch.randn(1, ENDS[-1], h, K) for h in (heads, heads, HV))
    return {
        "q": q, "k": k, "v": v, "ssm_states": pool_of(),
        "cache_indices": torch.tensor([4, 0, 7], dtype=torch.int32),
        "query_start_loc": torch.tensor(ENDS, dtype=torch.int32),
        "g": torch.randn(1, ENDS[-1], HV * K) if kda else -torch.rand(1, ENDS[-1], HV),
        "beta": torch.randn(1, ENDS[-1], HV) if kda else torch.rand(1, ENDS[-1], HV),
    }  # fmt: skip


def test_extend_of_gdn(sglang: SimpleNamespace) -> None:
    given = prompt(False) | {"num_state_checkpoints": 0, "track_state": None, "track_chunk_idx": None}
    got, wanted = compare(sglang, False, "extend_kernel", "extend", given, ("ssm_states",), "gdn_extend")
    assert len(got) == 3 and got[1] is None and error(got[0], wanted[0]) < 1e-5


@pytest.mark.parametrize("bound", [None, -5.0])
def test_extend_of_kda(sglang: SimpleNamespace, bound: float | None) -> None:
    given = prompt(True) | gates(True) | {"lower_bound": bound, "beta_is_raw": True, "is_spec_decode": False}
    got, wanted = compare(sglang, True, "extend_kernel", "extend", given, ("ssm_states",), "kda_extend")
    assert got.shape == wanted.shape and error(got, wanted) < 1e-5
    tracked = given | {"return_intermediate_states": True, "track_ssm_h_src": torch.empty(0)}
    got, wanted = compare(sglang, True, "extend_kernel", "extend", tracked, ("ssm_states",), "kda_extend")
    assert isinstance(got, tuple) and len(got) == 2 and error(got[0], wanted[0]) < 1e-5


@pytest.mark.parametrize("kda", [False, True])
@pytest.mark.parametrize(
    ("lengths", "hint"),
    [([70, 1, 129], 144), ([66, 67, 67], None), ([129], None), (None, None), (torch.tensor([70, 1, 129]), 144)],
    ids=["uneven", "even", "others", "unknown", "tensor"],
)
def test_lengths_on_the_host_are_a_hint(
    sglang: SimpleNamespace, kda: bool, lengths: Any, hint: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ENDS' sequences, or of others; the layer of the gated delta rule has them, the kernel of KDA."""
    given = prompt(kda) | (gates(True) | {"beta_is_raw": True} if kda else {})
    told = []
    name = "chunk_kda" if kda else "chunk_gated_delta_rule"
    own = getattr(wyvern.ops, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs.get("seqlens_hint"))
        return own(*args, **kwargs)

    monkeypatch.setattr(wyvern.ops, name, recording)
    with wyvern.sglang.enable():
        if kda:
            dispatcher(sglang, kda).extend_kernel.extend(**given, extend_seq_lens_cpu=lengths)
        else:
            backend, layer, batch, rows = prompts_of_a_layer(sglang, "triton", lengths=lengths)
            backend.forward_extend(layer=layer, forward_batch=batch, **rows)
            backend.mis_metadata = SimpleNamespace()  # SGLang's own method, whose kernel is served
            backend.forward_extend(layer, batch, *rows.values())
            backend.kernel_dispatcher.extend_kernel.extend(**given)
    assert told == ([hint] if kda else [hint, hint, None])
    assert not wyvern.sglang.report().declined


@pytest.mark.parametrize("every", [64, 128])
def test_checkpoints(sglang: SimpleNamespace, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.need("checkpoints", monkeypatch)
    counts = [(last - first) // every for first, last in zip(ENDS, ENDS[1:], strict=False)]
    given = prompt(False)
    given |= {
        "num_state_checkpoints": sum(counts), "state_checkpoint_every_n_tokens": every,
        "state_checkpoint_cu_starts": torch.tensor([0, *counts]).cumsum(0),
        "output": torch.full_like(given["v"], float("nan")),
    }  # fmt: skip
    changed = ("ssm_states", "output")
    got, wanted = compare(
        sglang, False, "extend_kernel", "extend", given, changed, "gdn_extend", "flashinfer"
    )
    assert error(got[0], wanted[0]) < 1e-5 and got[1] is None
    assert got[0].data_ptr() == given["output"].data_ptr()
    assert got[2].shape == wanted[2].shape == (1, sum(counts), HV, V, K) and error(got[2], wanted[2]) < 1e-5


def tracked(kda: bool) -> dict[str, Any]:
    """Chunks before which a state is asked for: the second of the first, none of the second, the third."""
    more = {
        "track_chunk_idx": torch.tensor([1, -1, 2], dtype=torch.int32),
        "track_state": torch.zeros(3, HV, V, K),
    }
    if kda:
        more |= gates(True) | {"lower_bound": -5.0, "beta_is_raw": True, "return_intermediate_states": True}
    return prompt(kda) | more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kda", [False, True])
def test_snapshots(
    sglang: SimpleNamespace, kda: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, whatever the dtype of the pool."""
    engines.need("checkpoints", monkeypatch)
    given = tracked(kda)
    given["ssm_states"] = given["ssm_states"].to(dtype)
    own = dispatcher(sglang, kda).extend_kernel
    theirs = engines.copied(given)
    wanted = own.extend(**theirs)
    # Of the gated delta rule SGLang reads what its kernel gives of all chunks: 2, 1 and 3 of them.
    states = theirs["track_state"] if kda else wanted[2][0][[1, 2, 5]]
    with wyvern.sglang.enable():
        kernel = dispatcher(sglang, kda).extend_kernel
        assert kernel.supports_track_state_snapshot
        got = kernel.extend(**given)
    assert wyvern.sglang.report().served == {"kda_extend" if kda else "gdn_extend": 1}
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    assert error(got[0], wanted[0]) < 1e-5
    assert error(given["ssm_states"], theirs["ssm_states"]) < tolerance
    assert error(given["track_state"][[0, 2]], states[[0, 2]]) < tolerance


def test_snapshots_that_are_declined(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernel gives the states before all chunks; the wanted ones are taken from them."""

    def refuses(*args: Any, **kwargs: Any) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(wyvern.ops, "chunk_gated_delta_rule", refuses)
    given = tracked(False)
    with wyvern.sglang.enable():
        _, _, h = dispatcher(sglang, False).extend_kernel.extend(**given)
    assert wyvern.sglang.report().declined == {"gdn_extend": {"not today": 1}}
    assert torch.equal(given["track_state"][[0, 2]], h[0][[1, 5]])


DECLINED = [
    ("gdn_extend", "inplace_update", {"inplace_update": False}),
    ("gdn_extend", "track_state", {"num_state_checkpoints": 1, "track_state": torch.empty(3, HV, V, K)}),
    ("kda_extend", "is_spec_decode", {"is_spec_decode": True}),
    ("kda_extend", "return_intermediate_states", {"return_intermediate_states": True}),
    ("gdn_packed_decode", "replayssm_write_pos", {"replayssm_write_pos": torch.zeros(5)}),
    ("gdn_target_verify", "cache_ring", {"cache_ring": True}),
    ("kda_target_verify", "fused_accept", {"fused_accept_state_indices": torch.zeros(3)}),
]


@pytest.mark.parametrize(("name", "reason", "wrong"), DECLINED, ids=[why for _, why, _ in DECLINED])
def test_what_is_declined_goes_to_sglang(
    sglang: SimpleNamespace, name: str, reason: str, wrong: dict[str, Any]
) -> None:
    kda, method = name.startswith("kda"), name.split("_", 1)[1]
    if method == "extend":
        given = prompt(kda) | (gates(True) | {"beta_is_raw": True} if kda else {})
    elif method == "target_verify":
        given = verified(kda, tree=False)
    else:
        given = {
            "mixed_qkv": torch.randn(5, 2 * H * K + HV * V), "a": torch.randn(5, HV),
            "b": torch.randn(5, HV), **gates(False), "scale": 0.3, "ssm_states": pool_of(),
            "cache_indices": torch.tensor(INDEX), "num_v_heads": HV, "head_v_dim": V,
        }  # fmt: skip
    role = {"extend": "extend_kernel", "target_verify": "verify_kernel"}.get(method, "decode_kernel")
    theirs = engines.copied(given)
    wanted = getattr(getattr(dispatcher(sglang, kda), role), method)(**theirs, **wrong)
    with wyvern.sglang.enable():
        got = getattr(getattr(dispatcher(sglang, kda), role), method)(**given, **wrong)
    told = wyvern.sglang.report()
    assert not told.served and reason in next(iter(told.declined[name]))
    first, second = (x[0] if isinstance(x, tuple) else x for x in (got, wanted))
    assert torch.equal(first, second) and torch.equal(given["ssm_states"], theirs["ssm_states"])


def test_dispatchers_find_their_kernels_unchanged(sglang: SimpleNamespace) -> None:
    """Of the same classes, with the same abilities, and one where it was one."""
    with wyvern.sglang.enable():
        kda, gdn = dispatcher(sglang, True), dispatcher(sglang, False, "flashinfer")
        with wyvern.sglang.enable():
            again = dispatcher(sglang, True)
    assert isinstance(kda.decode_kernel, sglang.TritonKDAKernel)
    assert kda.decode_kernel is kda.verify_kernel is kda.extend_kernel
    assert type(kda.decode_kernel) is type(again.decode_kernel)
    assert gdn.extend_kernel.uses_state_checkpoints and not gdn.extend_kernel.supports_packed_decode
    assert (
        gdn.tree_verify_kernel is gdn.decode_kernel and gdn.decode_kernel.supports_strided_target_verify_qkv
    )
    assert not gdn.extend_kernel.supports_track_state_snapshot


def test_switches(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompt(False)
    wyvern.sglang.plugin()
    assert wyvern.sglang.is_enabled()
    assert not isinstance(
        dispatcher(sglang, False).extend_kernel, wyvern.sglang._Served
    )  # no hooks applied yet
    sglang.HookRegistry.apply_hooks()
    kernel = dispatcher(sglang, False).extend_kernel
    kernel.extend(**given)
    assert wyvern.sglang.report(reset=True).served == {"gdn_extend": 1}
    monkeypatch.setenv("WYVERN_SGLANG", "0")
    kernel.extend(**given)
    monkeypatch.delenv("WYVERN_SGLANG")
    wyvern.sglang.disable()
    kernel.extend(**given)
    assert str(wyvern.sglang.report()) == "no calls" and not wyvern.sglang.is_enabled()


def test_deterministic_inference(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls by batch_invariant; what is declined is an error."""
    called: list[dict[str, Any]] = []

    def refuses(*args: Any, **kwargs: Any) -> None:
        called.append(kwargs)
        raise ValueError("not today")

    names = ("chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
    for name in names:
        monkeypatch.setattr(wyvern.sglang.ops, name, refuses)
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "1")
    q, v = torch.randn(1, 5, H, K), torch.randn(1, 5, HV, V)
    given = {
        "q": q, "k": q, "v": v, "a": torch.randn(5, HV), "b": torch.randn(5, HV), **gates(False),
        "ssm_states": pool_of(), "cache_indices": torch.tensor(INDEX), "query_start_loc": torch.arange(6),
    }  # fmt: skip
    prompt = {"q": q, "k": q, "v": v, "g": -torch.rand(1, 5, HV), "beta": torch.rand(1, 5, HV)} | {
        name: given[name] for name in ("ssm_states", "cache_indices", "query_start_loc")
    }
    wyvern.sglang.enable()
    served = dispatcher(sglang, kda=False)
    for kernel, method, arguments in (("decode", "decode", given), ("extend", "extend", prompt)):
        with pytest.raises(ValueError, match=f"gdn_{method}, and SGLang's own.*deterministic.*not today"):
            getattr(getattr(served, f"{kernel}_kernel"), method)(**arguments)
    assert [call["batch_invariant"] for call in called] == [True, True]
    assert "seqlens_hint" not in called[1]


def test_sglang_goes_on_without_hooks(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, fake_sglang.PLUGINS, None)
    with pytest.raises(ImportError, match=r"wyvern.sglang needs SGLang 0.5.23.*pip install"):
        wyvern.sglang.enable()
    with pytest.warns(UserWarning, match="wyvern.sglang needs SGLang 0.5.23"):
        wyvern.sglang.plugin()
    assert not wyvern.sglang.is_enabled()


SOURCES = {
    "gdn": ("kernels/gdn_triton.py", "TritonGDNKernel"),
    "kda": ("kernels/kda_triton.py", "TritonKDAKernel"),
}


def folder() -> Path:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]) / "srt" / "layers" / "attention" / "linear"


def layer_of_gdn() -> Any:
    C = 2 * H * K + HV * V
    return SimpleNamespace(
        layer_id=3, q_dim=H * K, k_dim=H * K, v_dim=HV * V, num_v_heads=HV, head_v_dim=V, head_k_dim=K,
        conv_weights=torch.randn(C, 4) / 2, bias=torch.randn(C) / 8, activation="silu", **gates(False),
    )  # fmt: skip


def prompts_of_a_layer(
    sglang: SimpleNamespace, prefill: str, tracks: bool = False, lengths: Any = None
) -> tuple[Any, Any, Any, dict[str, Tensor]]:
    """A backend, a layer, a batch of ENDS' sequences, the second one new, and rows of q, k, v, a and b.

    tracks: of the first and the last sequence the rows and the state before a chunk go to slots 1 and 3 too.
    """
    layer, every = layer_of_gdn(), 64 if prefill == "flashinfer" and tracks else 0
    T, C = ENDS[-1], 2 * H * K + HV * V
    cache = SimpleNamespace(conv=[torch.randn(SLOTS, C, 3)], temporal=pool_of())
    cache.temporal[0] = 0
    backend = sglang.GDNAttnBackend(dispatcher(sglang, False, prefill))
    backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda _: cache)
    backend.mis_metadata = None
    places = torch.tensor([1, 3])
    backend.forward_metadata = SimpleNamespace(
        mamba_cache_indices=torch.tensor([4, 0, 7], dtype=torch.int32),
        query_start_loc=torch.tensor(ENDS, dtype=torch.int32), has_mamba_track_mask=tracks,
        num_state_checkpoints=3 if every else 0, state_checkpoint_every_n_tokens=every,
        # After 64 tokens of the first and 128 of the last: of all chunks' 1 and 5, of checkpoints 0 and 2.
        track_chunk_idx=torch.tensor([1, -1, 2], dtype=torch.int32), track_ssm_h_batch_src=torch.tensor([0, 2]),
        track_ssm_h_src=torch.tensor([0, 2] if every else [1, 5]), track_ssm_h_dst=places,
        conv_states_mask_indices=places, track_conv_indices=torch.tensor([[61, 62, 63], [196, 197, 198]]),
    )  # fmt: skip
    batch = SimpleNamespace(
        extend_seq_lens_cpu=lengths, extend_prefix_lens=torch.tensor([5, 0, 9]),
        forward_mode=SimpleNamespace(is_target_verify=lambda: False),
    )  # fmt: skip
    rows = {"mixed_qkv": torch.randn(T, C), "a": torch.randn(T, HV), "b": torch.randn(T, HV)}
    return backend, layer, batch, rows


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("prefill", ["triton", "flashinfer"])
def test_prompts_of_layers(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, prefill: str, tracks: bool
) -> None:
    """Convolution, gates and prefill in one call, in the slots of both pools, with what SGLang keeps for later."""
    engines.need("checkpoints", monkeypatch)
    with wyvern.sglang.enable():
        backend, layer, batch, rows = prompts_of_a_layer(sglang, prefill, tracks)
        cache = backend.req_to_token_pool.mamba2_layer_cache(3)
        before, results = (cache.temporal.clone(), cache.conv[0].clone()), []
        for enabled in (True, False):
            if not enabled:
                wyvern.sglang.disable()
            cache.temporal, cache.conv[0] = (x.clone() for x in before)
            out = torch.full((1, ENDS[-1], HV, V), float("nan"))
            o = backend.forward_extend(layer, batch, **rows, linear_attn_output=out)
            told = wyvern.sglang.report(reset=True)
            assert told.served == ({"forward_extend": 1} if enabled else {}) and not told.declined, told
            if enabled:
                assert o.data_ptr() == out.data_ptr()
            results.append((o.clone(), cache.temporal, cache.conv[0]))
    (o, states, windows), (wanted, wanted_states, wanted_windows) = results
    assert o.shape == wanted.shape and error(o, wanted) < 1e-5 and error(states, wanted_states) < 1e-5
    assert torch.equal(windows, wanted_windows)


@pytest.mark.parametrize("why", ["scoring", "drafts", "chunks"])
def test_prompts_of_layers_that_are_declined(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """They go to SGLang's own method, whose call of the kernel is served."""
    with wyvern.sglang.enable():
        backend, layer, batch, rows = prompts_of_a_layer(sglang, "triton", tracks=why == "chunks")
        if why == "scoring":
            backend.mis_metadata = SimpleNamespace()
        elif why == "drafts":
            batch.forward_mode.is_target_verify = lambda: True
        else:
            engines.need("checkpoints", monkeypatch)
            backend.forward_metadata.track_chunk_idx = None
        backend.forward_extend(layer, batch, **rows)
    told = wyvern.sglang.report()
    assert told.served == {"gdn_extend": 1}, told
    assert list(told.declined) == (["forward_extend"] if why == "chunks" else []), told


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("rings", [False, True])
def test_decoding_of_layers(sglang: SimpleNamespace, joined: bool, rings: bool) -> None:
    """Convolution and recurrence in one call, in the slots of both pools; with ReplaySSM's rings by its kernel."""
    C, N, layer = (2 * H * K + HV * V), len(INDEX), layer_of_gdn()
    qkv, z = torch.randn(N, C), torch.randn(N, HV * V)
    a, b = torch.randn(N, HV), torch.randn(N, HV)
    given = ((torch.cat([qkv, z], 1), torch.cat([b, a], 1)), None, None) if joined else (qkv, a, b)
    before = pool_of(), torch.randn(SLOTS, C, 3)
    results = []
    for enabled in (True, False):
        states, windows = (x.clone() for x in before)
        cache = SimpleNamespace(conv=[windows], temporal=states)
        batch = SimpleNamespace(tracked=[], extend_seq_lens_cpu=None)
        with wyvern.sglang.enable():
            backend = sglang.GDNAttnBackend(dispatcher(sglang, False))
            if not enabled:
                wyvern.sglang.disable()
            index = torch.tensor(INDEX, dtype=torch.int32)
            backend.forward_metadata = SimpleNamespace(
                mamba_cache_indices=index, replayssm_write_pos=index if rings else None
            )
            backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda _, cache=cache: cache)
            o = backend.forward_decode(layer, batch, *given)
        assert [x[-1] for x in batch.tracked] == [3] and batch.tracked[0][0] is windows
        told = wyvern.sglang.report(reset=True)
        if enabled and not rings:
            assert told.served == {"forward_decode": 1} and not told.declined, told
        elif enabled:
            assert told.served == {"gdn_packed_decode": 1} and list(told.declined) == ["forward_decode"], told
        else:
            assert str(told) == "no calls"
        results.append((o if joined else (o, z), states, windows))
    (mine, states, windows), (theirs, wanted_states, wanted_windows) = results
    assert mine[0].shape == theirs[0].shape and error(mine[0], theirs[0]) < 1e-5
    assert torch.equal(mine[1], theirs[1])
    assert error(states, wanted_states) < 1e-5 and torch.equal(windows, wanted_windows)


@pytest.mark.parametrize("method", wyvern.sglang._GDN)
@pytest.mark.parametrize("gate", SOURCES)
def test_methods_are_sglangs(gate: str, method: str) -> None:
    file, name = SOURCES[gate]
    tree = ast.parse((folder() / file).read_text())
    (kind,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    (own,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == method]
    function = (wyvern.sglang._KDA if gate == "kda" else wyvern.sglang._GDN)[method]
    mine = inspect.signature(function).parameters
    places = [x for x, one in mine.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert places[1:] == [argument.arg for argument in own.args.args][1:]
    required = {
        one.arg for one, default in zip(own.args.kwonlyargs, own.args.kw_defaults, strict=True) if not default
    }
    needed = {x for x, one in mine.items() if one.kind is one.KEYWORD_ONLY and one.default is one.empty}
    assert needed <= required  # so that no call lacks what is needed here


@pytest.mark.parametrize(("file", "name"), [("gdn_backend.py", "GDN"), ("kda_backend.py", "KDA")])
def test_dispatchers_are_sglangs(file: str, name: str) -> None:
    """The hooked classes, the attributes that hold kernels, and what is passed to extend()."""
    tree = ast.parse((folder() / file).read_text())
    (kind,) = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == f"{name}KernelDispatcher"
    ]
    (init,) = [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assigned = {
        target.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and target.attr.endswith("_kernel")
    }
    assert {"decode_kernel", "extend_kernel", "verify_kernel"} <= assigned <= set(wyvern.sglang._KERNELS)
    calls = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "extend"
    ]
    asked = {"track_state", "track_chunk_idx", "num_state_checkpoints", "state_checkpoint_every_n_tokens"}
    assert any(asked <= call for call in calls)
    assert name == "GDN" or any("extend_seq_lens_cpu" in call for call in calls)


def test_the_layer_is_sglangs() -> None:
    tree = ast.parse((folder() / "gdn_backend.py").read_text())
    (layer,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GDNAttnBackend"
    ]
    functions = {node.name: node for node in layer.body if isinstance(node, ast.FunctionDef)}
    names = {name: [one.arg for one in function.args.args] for name, function in functions.items()}
    for name in ("forward_extend", "forward_decode"):
        assert names[name] == ["self", "layer", "forward_batch", "mixed_qkv", "a", "b"]
    extend = ast.unparse(functions["forward_extend"]) + ast.unparse(functions["_convolve_prefill"])
    for used in (
        "self.mis_metadata is not None", "mamba_cache_params.conv[0]", "mamba_cache_params.temporal",
        "conv_states[forward_metadata.conv_states_mask_indices] = mixed_qkv_to_track",
        "mixed_qkv[forward_metadata.track_conv_indices].transpose(1, 2)", "kwargs.get('linear_attn_output')",
        "has_initial_state=forward_batch.extend_prefix_lens > 0", "forward_metadata.num_state_checkpoints",
        "forward_metadata.state_checkpoint_every_n_tokens", "forward_metadata.track_ssm_h_src.numel() > 0",
        "forward_metadata.track_chunk_idx", "h_track_buf=h_track_buf",
        "self._track_mamba_state_extend(forward_batch, h, ssm_states, forward_metadata",
    ):  # fmt: skip
        assert used in extend, used
    decode = ast.unparse(functions["forward_decode"])
    for used in (
        "req_to_token_pool.mamba2_layer_cache(layer.layer_id)", "layer_cache.conv[0]", "layer_cache.temporal",
        "forward_metadata.mamba_cache_indices", "forward_metadata.replayssm_write_pos", "layer.conv_weights",
        "layer.bias", "layer.activation", "projected_qkvz, projected_ba = mixed_qkv",
        "_track_mamba_state_decode(forward_batch, conv_states, ssm_states, cache_indices, layer.layer_id)",
        "return (core_attn_out, z) if return_z else core_attn_out",
    ):  # fmt: skip
        assert used in decode, used
