"""The times of vLLM's layers: their classes and metadata, and Wyvern's side of small layers on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "vllm_layers.py"


def test_wyvern_serves_every_step(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    out = tmp_path / "layers.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(out.read_text())
    steps = {(row["model"], row["step"]) for row in told["rows"]}
    assert steps == {(model, step) for model in ("qwen", "kimi") for step in ("decode 4", "drafts 4", "mixed")}
    assert told["served"] == {"forward_core": 3, "forward": 3} and not told["declined"]
