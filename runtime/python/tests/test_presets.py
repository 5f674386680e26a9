"""What `wyvern tune --preset` tunes is what models call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from wyvern import _command

MODELS = Path(__file__).parent / "preset_models.py"
TOKENS = 96
TRANSFORMERS = [
    ("gated_delta_rule", "qwen3-next-80b"),
    ("gated_delta_rule", "qwen3.5-0.8b"),
    ("kda", "kimi-linear-48b"),
]
FLA = [
    ("kda", "kimi-linear-48b", "padded"),
    ("kda", "kimi-linear-48b", "packed"),
    ("kda", "kimi-linear-48b", "unbounded"),
    *(
        (op, preset, life)
        for op, preset in (
            ("gated_delta_rule", "fla-gdn-1.3b"),
            ("delta_rule", "fla-deltanet-1.3b"),
            ("gated_delta_product", "fla-gated-deltaproduct"),
        )
        for life in ("padded", "packed")
    ),
]
# Each is run, and those of transformers tuned, in a process of its own.
if "WYVERN_TESTS_FULL" not in os.environ:
    TRANSFORMERS = TRANSFORMERS[1:2]
    FLA = [("gated_delta_rule", "fla-gdn-1.3b", "packed")]
CALLS = {"first prefill", "continued prefill", "training, forward", "training, backward", "decoding"}
SHORT = {"short first prefill", "short continued prefill"}


def lived(library: str, preset: str, problem: dict[str, Any], served: str, *life: str) -> dict[str, str]:
    """The origins of the plans that a model of the preset uses, by problem; served: operators or layers."""
    sizes = [str(problem[name]) for name in ("H", "HV", "K", "V")]
    done = subprocess.run(
        [sys.executable, str(MODELS), library, preset, *sizes, str(TOKENS), served, *life],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {one["problem"]: one["origin"] for one in json.loads(done.stdout)}


@pytest.mark.parametrize(("op", "preset"), TRANSFORMERS)
def test_every_call_is_exact(
    op: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.models.kimi_linear", reason="transformers is not installed")
    monkeypatch.setenv("WYVERN_CACHE_DIR", str(tmp_path))
    tuned = _command.run(
        "tune", op, "--preset", preset, "--tokens", str(TOKENS), "--device", "cpu", "--budget", "2s"
    )
    assert all(call["stored"] for call in tuned["calls"])
    keys = {call["call"]: call["problem"]["key"] for call in tuned["calls"]}
    packed = {f"{name}, packed" for name in CALLS if name.startswith("training")} if op != "kda" else set()
    used = lived("transformers", preset, tuned["problem"], "operators")
    assert used == {keys[f"transformers: {name}"]: "exact" for name in CALLS | packed}
    names = {f"transformers, layers: {name}" for name in CALLS | packed}
    if op == "kda":  # whose layers know no pack
        names |= {f"transformers: {name}" for name in CALLS if name.startswith("training")}
    used = lived("transformers", preset, tuned["problem"], "layers")
    assert used == {keys[name]: "exact" for name in names}


@pytest.mark.parametrize(("op", "preset", "life"), FLA)
def test_the_calls_of_layers(op: str, preset: str, life: str, tmp_path: Path) -> None:
    """By their problems, without tuning: in so short a time none is begun."""
    pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    manifest = tmp_path / "problems.jsonl"
    manifest.write_text(json.dumps({"operator": op, "preset": preset, "tokens": TOKENS}))
    document = _command.run(
        "tune", "--manifest", str(manifest), "--device", "cpu", "--budget", "0.1s",
        "--within", "0.1s",
    )  # fmt: skip
    problems = {call["call"]: call["problem"] for call in document["not_begun"]}
    style = "fla, no lower bound" if life == "unbounded" else "fla"
    packed = ", packed" if life == "packed" else ""
    used = lived("fla", preset, problems["fla: first prefill"], "operators", life)
    assert set(used) == {problems[f"{style}: {name}{packed}"]["key"] for name in CALLS | SHORT}
    if op == "delta_rule":  # whose norm has no gate
        return
    # Those of transformers' layers are not listed twice.
    styles = (style.replace("fla", "fla, layers"), "transformers, layers")
    if op == "gated_delta_product":  # which has no recurrent pass
        decoding = problems["fla, layers: continued prefill"]["key"].replace("/tokens=128", "/tokens=1")
    else:
        decoding = problems[f"{styles[0]}: decoding"]["key"]
    keys = {decoding}
    for name in CALLS - {"decoding"}:
        listed = (problems.get(f"{one}: {name}{packed}") for one in styles)
        key = next(problem["key"] for problem in listed if problem is not None)
        keys.add(key)
        if "prefill" in name:  # and a short one, which is no other call
            keys.add(key.replace("/tokens=128", "/tokens=64"))
    used = lived("fla", preset, problems["fla: first prefill"], "layers", life)
    assert set(used) == keys
