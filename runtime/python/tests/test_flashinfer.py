"""FlashInfer's names and layouts, against the recurrence in float64."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from engines import gates_of, install, walk
from reference import error
from torch import Tensor
from wyvern import flashinfer

K = V = 32
LENGTHS = [70, 0, 130, 64]
N, TOTAL = len(LENGTHS), sum(LENGTHS)
SLOTS = [5, 1, 0, 6]


def prefill_call(device: str, heads: tuple[int, int] = (2, 4), dtype: Any = torch.float32) -> dict[str, Any]:
    """Random arguments, of so many query and value heads; keys have the fewer of them."""
    HV = max(heads)
    q, k = torch.randn(TOTAL, heads[0], K), torch.randn(TOTAL, min(heads), K)
    call = {
        "q": q.to(dtype),
        "k": torch.nn.functional.normalize(k, dim=-1).to(dtype),
        "v": torch.randn(TOTAL, heads[1], V).to(dtype),
        "g": torch.rand(TOTAL, HV),
        "beta": torch.rand(TOTAL, HV),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0),
    }
    return {name: x.to(device) for name, x in call.items()}


def prefill_wanted(
    call: dict[str, Any], start: Tensor | None = None, every: int = 0
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """o, the final states and those after every so many tokens, in float64."""
    exact = {name: x.cpu() for name, x in call.items()}
    HV = max(exact["q"].shape[1], exact["v"].shape[1])
    q, k, v = (exact[name].repeat_interleave(HV // exact[name].shape[1], 1)[None] for name in "qkv")
    ones = torch.ones(1, TOTAL, HV)
    g = ones.log() if exact.get("g") is None else exact["g"].double().log()[None]
    beta = ones if exact.get("beta") is None else exact["beta"][None]
    states = torch.zeros(N, HV, V, K).double() if start is None else start.double().cpu()
    final, kept = states.clone(), []

    def leave(n: int, t: int, after: Tensor) -> None:
        final[n] = after
        if every and (t + 1) % every == 0:
            kept.append(after)

    o = walk(q, k, v, g, beta, exact["cu_seqlens"], lambda n: states[n], leave)
    return o[0], final, kept


@pytest.mark.parametrize("heads", [(2, 4), (4, 2), (2, 2)])
def test_prefill_of_a_pool_in_place(device: str, heads: tuple[int, int]) -> None:
    call = prefill_call(device, heads)
    call["g"][3] = 0
    pool = torch.randn(7, max(heads), V, K, device=device)
    before = pool.clone()
    slots = torch.tensor(SLOTS, device=device, dtype=torch.int8)
    o, states = flashinfer.chunk_gated_delta_rule(
        **call, initial_state=pool, output_final_state=True, output_state=pool, state_indices=slots
    )
    wanted, final, _ = prefill_wanted(call, before[SLOTS])
    assert states is pool
    assert error(o, wanted) < 1e-5 and error(pool[SLOTS], final) < 1e-5
    others = [2, 3, 4]
    assert torch.equal(pool[others], before[others])


@pytest.mark.parametrize("given", ["neither", "g", "beta"])
def test_prefill_without_states(device: str, given: str) -> None:
    call = prefill_call(device)
    for name in ("g", "beta"):
        if name != given:
            del call[name]
    output = torch.full_like(call["v"], float("nan"))
    with_defaults = flashinfer.chunk_gated_delta_rule(**call, output=output)
    assert with_defaults is output and error(output, prefill_wanted(call)[0]) < 1e-5
    o, states = flashinfer.chunk_gated_delta_rule(**call, output_final_state=True)
    assert torch.equal(o, output) and error(states, prefill_wanted(call)[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("started", [False, True])
def test_prefill_leaves_states_in_a_given_tensor(device: str, dtype: torch.dtype, started: bool) -> None:
    call = prefill_call(device)
    start = (torch.randn(N, 4, V, K, device=device) / 4).to(dtype) if started else None
    left = torch.full((N, 4, V, K), 3.0, device=device).to(dtype)
    o, states = flashinfer.chunk_gated_delta_rule(
        **call, initial_state=start, output_final_state=True, output_state=left
    )
    wanted, final, _ = prefill_wanted(call, None if start is None else start.float())
    some = [n for n in range(N) if LENGTHS[n]]
    eps = torch.finfo(dtype).eps
    assert states is left and error(o, wanted) < 1e-5
    assert error(left[some].float(), final[some]) < max(1e-5, eps)
    assert (left[1].float() == 3).all()  # a sequence without tokens leaves its row


def test_prefill_of_a_pool_with_strided_slots(device: str) -> None:
    call = prefill_call(device)
    memory = torch.randn(7, 8, V, K, device=device)
    before, pool = memory.clone(), memory[:, ::2]
    slots = torch.tensor(SLOTS, device=device)
    arguments = {**call, "initial_state": pool, "state_indices": slots}
    wanted, final, _ = prefill_wanted(call, before[SLOTS][:, ::2])
    assert error(flashinfer.chunk_gated_delta_rule(**arguments), wanted) < 1e-5
    assert torch.equal(memory, before)
    o, _ = flashinfer.chunk_gated_delta_rule(**arguments, output_final_state=True, output_state=pool)
    assert error(o, wanted) < 1e-5 and error(pool[SLOTS], final) < 1e-5
    assert torch.equal(memory[:, 1::2], before[:, 1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("start", [None, torch.float32, torch.bfloat16])
def test_prefill_keeps_states_inside_sequences(device: str, dtype: Any, start: Any) -> None:
    call = prefill_call(device)
    if start is not None:
        start = torch.randn(N, 4, V, K, device=device).to(start)
    rows = [n // 64 for n in LENGTHS]
    checkpoints = torch.full((sum(rows) + 1, 4, V, K), 7.0, device=device).to(dtype)
    flashinfer.chunk_gated_delta_rule(
        **call,
        initial_state=start,
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=torch.tensor([0, *rows]).cumsum(0),
        checkpoint_every_n_tokens=64,
    )
    kept = torch.stack(prefill_wanted(call, start, 64)[2])
    assert error(checkpoints[:-1].float(), kept) < max(1e-5, torch.finfo(dtype).eps)
    assert (checkpoints[-1].float() == 7).all()


def test_checkpoints_have_the_bits_of_a_prefix(device: str) -> None:
    call = prefill_call(device, dtype=torch.bfloat16)
    checkpoints = torch.empty(4, 4, V, K, device=device)
    starts = torch.tensor([0, *(n // 64 for n in LENGTHS)]).cumsum(0)
    flashinfer.chunk_gated_delta_rule(
        **call,
        state_checkpoints=checkpoints,
        checkpoint_cu_starts=starts,
        checkpoint_every_n_tokens=64,
        use_cp=False,
    )
    prefix = {name: x[70:134] for name, x in call.items()} | {
        "cu_seqlens": torch.tensor([0, 64], device=device)
    }
    _, state = flashinfer.chunk_gated_delta_rule(**prefix, output_final_state=True, use_cp=False)
    assert torch.equal(state[0], checkpoints[1])


def test_prefill_normalizes_where_asked(device: str) -> None:
    call = prefill_call(device)
    call["q"], call["k"] = 3 * call["q"], 5 * call["k"]
    o = flashinfer.chunk_gated_delta_rule(**call, use_qk_l2norm_in_kernel=True)
    for name in "qk":
        call[name] = torch.nn.functional.normalize(call[name], dim=-1)
    assert error(o, prefill_wanted(call)[0]) < 1e-5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens": None}, "cu_seqlens is missing"),
        ({"checkpoint_every_n_tokens": -64}, "checkpoint_every_n_tokens is -64"),
        ({"checkpoint_every_n_tokens": 100}, "checkpoint_every_n_tokens is 100"),
        ({"checkpoint_every_n_tokens": 64}, "must both be provided"),
        ({"checkpoint_cu_starts": torch.zeros(5)}, "must be None where checkpoint_every_n_tokens is 0"),
        ({"state_indices": torch.arange(N), "output_final_state": True}, "explicit output_state pool"),
    ],
)
def test_wrong_arguments_of_prefill(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flashinfer.chunk_gated_delta_rule(**prefill_call("cpu") | changed)


B, H, HV = 3, 2, 4


def decode_call(device: str, T: int, dtype: Any = torch.float32) -> dict[str, Any]:
    call = {
        "q": torch.randn(B, T, H, K, dtype=dtype),
        "k": torch.randn(B, T, H, K, dtype=dtype),
        "v": torch.randn(B, T, HV, V, dtype=dtype),
        "A_log": torch.randn(HV),
        "a": torch.randn(B, T, HV, dtype=dtype),
        "dt_bias": torch.randn(HV).bfloat16(),
        "b": torch.randn(B, T, HV, dtype=dtype),
    }
    return {name: x.to(device) for name, x in call.items()}


def decode_wanted(call: dict[str, Any], start: list[Tensor | None]) -> tuple[Tensor, list[list[Tensor]]]:
    """o, and the states after each token by sequence."""
    exact = {name: x.cpu() for name, x in call.items()}
    after: list[list[Tensor]] = [[] for _ in start]
    gates = gates_of(None, True, True, True, exact["A_log"], exact["dt_bias"], None)

    def begin(n: int) -> Tensor | None:
        return None if start[n] is None else start[n].cpu()

    names = ("q", "k", "v", "a", "b")
    o = walk(
        *(exact[name] for name in names), None, begin, lambda n, t, state: after[n].append(state), **gates
    )
    return o, after


@pytest.mark.parametrize("pretranspose", [False, True])
def test_decode_of_a_batch(device: str, pretranspose: bool) -> None:
    call = decode_call(device, 1)
    state = torch.randn(B, HV, V, K, device=device)
    wanted, after = decode_wanted(call, list(state.clone()))
    output = torch.empty(B, 1, HV, V, device=device, dtype=torch.bfloat16)
    if pretranspose:
        o, left = flashinfer.gated_delta_rule_decode_pretranspose(**call, state=state, output=output)
        result = state
    else:
        given = state.transpose(-1, -2).contiguous()
        o, left = flashinfer.gated_delta_rule_decode(**call, state=given, output=output)
        result = given.transpose(-1, -2)
    assert o is output and left.data_ptr() == (state if pretranspose else given).data_ptr()
    assert error(o.float(), wanted) < 5e-3
    assert error(result, torch.stack([x[0] for x in after])) < 1e-5


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("to", [None, [2, 1, -1]])
def test_decode_of_a_pool(device: str, T: int, to: list[int] | None) -> None:
    call = decode_call(device, T)
    pool = torch.randn(6, HV, V, K, device=device)
    before, slots = pool.clone(), [5, -1, 0]
    wanted, after = decode_wanted(call, [before[5], None, before[0]])
    o, left = flashinfer.gated_delta_rule_decode_pretranspose(
        **call,
        state=None,
        initial_state=pool,
        initial_state_indices=torch.tensor(slots, device=device),
        output_state_indices=None if to is None else torch.tensor(to, device=device, dtype=torch.int32),
    )
    assert left is pool and error(o, wanted) < 1e-5 and not o[1].any()
    written = {5: 0, 0: 2} if to is None else {2: 0}
    for slot in range(6):
        if slot in written:
            assert error(pool[slot], after[written[slot]][-1]) < 1e-5
        else:
            assert torch.equal(pool[slot], before[slot])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [4, 6])
@pytest.mark.parametrize("disable", [None, False])
def test_verifying_keeps_states(device: str, dtype: Any, steps: int, disable: bool | None) -> None:
    call = decode_call(device, 4)
    pool = torch.randn(6, HV, V, K, device=device).to(dtype)
    before, slots = pool.clone(), torch.tensor([5, -1, 0], device=device, dtype=torch.int32)
    buffer = torch.full((B + 1, steps, HV, V, K), 9.0, device=device).to(dtype)
    output = torch.full((B, 4, HV, V), 2.0, device=device)
    o, _ = flashinfer.gated_delta_rule_mtp(
        **call, initial_state=pool, initial_state_indices=slots, output=output,
        intermediate_states_buffer=buffer, disable_state_update=disable,
    )  # fmt: skip
    wanted, after = decode_wanted(call, [before[5], None, before[0]])
    bound = max(1e-5, torch.finfo(dtype).eps)
    assert o is output and error(o[[0, 2]], wanted[[0, 2]]) < 1e-5
    assert (o[1] == 2).all()  # padding leaves a given output
    for n in (0, 2):
        assert error(buffer[n, :4].float(), torch.stack(after[n])) < bound
    assert (buffer[[1, 3]] == 9).all() and (buffer[:, 4:] == 9).all()
    if disable is None:
        assert torch.equal(pool, before)
    else:
        assert torch.equal(pool[[5, 0]], buffer[[0, 2], 3]) and torch.equal(pool[1:5], before[1:5])


def test_verifying_scatters_states(device: str) -> None:
    call = decode_call(device, 2)
    pool = torch.randn(8, HV, V, K, device=device)
    before = pool.clone()
    slots = torch.tensor([0, 1, 2], device=device)
    each = torch.tensor([[3, 4], [5, -1], [6, 2]], device=device, dtype=torch.int32)
    o, _ = flashinfer.gated_delta_rule_mtp(
        **call,
        initial_state=pool,
        initial_state_indices=slots,
        ssm_state_indices=each,
        disable_state_update=False,
    )
    wanted, after = decode_wanted(call, list(before[:3]))
    assert error(o, wanted) < 1e-5
    for n, t, slot in ((0, 0, 3), (0, 1, 4), (1, 0, 5), (2, 0, 6), (2, 1, 2)):
        assert error(pool[slot], after[n][t]) < 1e-5
    untouched = [0, 1, 7]
    assert torch.equal(pool[untouched], before[untouched])


def test_wrong_arguments_of_decoding() -> None:
    call = decode_call("cpu", 2)
    pool, slots = torch.randn(4, HV, V, K), torch.arange(B)
    arguments = {**call, "initial_state": pool, "initial_state_indices": slots}
    each = torch.zeros(B, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="disable_state_update must be False"):
        flashinfer.gated_delta_rule_mtp(**arguments, ssm_state_indices=each)
    with pytest.raises(ValueError, match="cache_replayssm"):
        flashinfer.gated_delta_rule_mtp(**arguments, cache_replayssm=True)
    with pytest.raises(ValueError, match="or state alone"):
        flashinfer.gated_delta_rule_decode_pretranspose(**call, state=None)
    with pytest.raises(ValueError, match="without initial_state_indices"):
        flashinfer.gated_delta_rule_decode_pretranspose(**call, state=pool[:B], output_state_indices=slots)


def test_flashinfers_functions_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(name: str) -> Any:
        return lambda *args, **kwargs: ("own", name)

    for path in sorted(set(flashinfer._MODULES.values())):
        names = [name for name, module in flashinfer._MODULES.items() if module == path]
        install(monkeypatch, path, **{name: own(name) for name in names})
    monkeypatch.setattr(flashinfer._switch, "pairs", None)
    prefill = importlib.import_module("flashinfer.gdn_prefill")
    flashinfer.report(reset=True)
    call = prefill_call("cpu")
    with flashinfer.enable():
        assert flashinfer.is_enabled()
        o = prefill.chunk_gated_delta_rule(**call)
        assert prefill.chunk_gated_delta_rule(**call | {"cu_seqlens": None}) == (
            "own",
            "chunk_gated_delta_rule",
        )
    assert error(o, prefill_wanted(call)[0]) < 1e-5
    assert prefill.chunk_gated_delta_rule(**call) == ("own", "chunk_gated_delta_rule")
    told = flashinfer.report(reset=True)
    assert told.served == {"chunk_gated_delta_rule": 1}
    assert told.declined == {
        "chunk_gated_delta_rule": {"cu_seqlens is missing; it must be [N + 1], of a packed batch": 1}
    }


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "_MODULES", {"chunk_gated_delta_rule": "flashinfer_is_not_here"})
    monkeypatch.setattr(flashinfer._switch, "pairs", None)
    with pytest.raises(ImportError, match="pip install -U flashinfer-python"):
        flashinfer.enable()
    assert not flashinfer.is_enabled()


@pytest.mark.parametrize("name", sorted(flashinfer._MODULES))
def test_names_are_those_of_flashinfer(name: str) -> None:
    module = pytest.importorskip(flashinfer._MODULES[name], reason="FlashInfer is not installed")
    theirs = inspect.signature(getattr(module, name)).parameters
    ours = inspect.signature(getattr(flashinfer, name)).parameters
    assert list(ours) == list(theirs)
    assert [x.default for x in ours.values()] == [x.default for x in theirs.values()]
