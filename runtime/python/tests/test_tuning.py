"""Tuned plans: what is tuned is what is called, and the policy says whether it is used."""

from __future__ import annotations

import os

import pytest
import torch
from conftest import make

import wyvern
from wyvern import ops


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's; this process has opened its own already."""
    monkeypatch.setenv("WYVERN_CACHE_DIR", str(tmp_path))


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
