"""What `wyvern tune --preset` tunes is what models call: after it each of their plans is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from wyvern import _command

MODELS = Path(__file__).parent / "preset_models.py"
TOKENS = 96
# FLA's layers decode up to 64 tokens at a time, so that these are a prefill.
PRESETS = [
    ("transformers", "gated_delta_rule", "qwen3-next-80b"),
    ("transformers", "gated_delta_rule", "qwen3.5-0.8b"),
    ("transformers", "kda", "kimi-linear-48b"),
    ("fla", "kda", "kimi-linear-48b"),
    ("fla", "gated_delta_rule", "fla-gdn-1.3b"),
    ("fla", "delta_rule", "fla-deltanet-1.3b"),
    ("fla", "gated_delta_product", "fla-gated-deltaproduct"),
]
# Each is tuned and run in a process of its own: a short suite has one of each library.
if "WYVERN_TESTS_FULL" not in os.environ:
    PRESETS = PRESETS[1:4:2]
CALLS = {"first prefill", "continued prefill", "training, forward", "training, backward", "decoding"}
NEEDED = {"transformers": "transformers.models.kimi_linear", "fla": "fla.ops"}


@pytest.mark.parametrize(("library", "op", "preset"), PRESETS)
def test_every_call_is_exact(
    library: str, op: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NEEDED[library], reason=f"{library} is not installed")
    monkeypatch.setenv("WYVERN_CACHE_DIR", str(tmp_path))
    tuned = _command.run(
        "tune", op, "--preset", preset, "--tokens", str(TOKENS), "--device", "cpu", "--budget", "2s"
    )
    assert all(call["stored"] for call in tuned["calls"])
    keys = {call["call"]: call["problem"]["key"] for call in tuned["calls"]}
    problem = tuned["problem"]
    sizes = [str(problem[name]) for name in ("H", "HV", "K", "V")]
    done = subprocess.run(
        [sys.executable, str(MODELS), library, preset, *sizes, str(TOKENS)],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    used = {one["problem"]: one["origin"] for one in json.loads(done.stdout)}
    assert used == {keys[f"{library}: {name}"]: "exact" for name in CALLS}
