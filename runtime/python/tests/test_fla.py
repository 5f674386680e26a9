"""flash-linear-attention's functions served by Wyvern: results, what is declined, and the way back."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Call, make, reference_of
from reference import error
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
    monkeypatch.setattr(wyvern.fla, "_registered", False)
    monkeypatch.setattr(wyvern.fla, "_pairs", [])
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
