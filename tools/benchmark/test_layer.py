"""The comparison of a layer's region, by small rows on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
SCRIPT = Path(__file__).resolve().parent / "layer.py"


def test_measures_both_passes(tmp_path: Path) -> None:
    out = tmp_path / "layer.json"
    command = [sys.executable, str(SCRIPT), "--small", "--device", "cpu", "--runs", "1", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["row"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {f"layer-{name}{part}" for name in ("gdn-1of2-1x70", "kda-2of2-3x40") for part in ("", "-both")}
    assert done.stdout.count("wyvern") == len(rows)
    for name, row in rows.items():
        errors = row["errors"]
        assert errors["o"] < 5e-3 and row["ratio"] == 1
        gradients = {"dq", "dk", "dv", "dz", "dw_q", "dw_k", "dw_v"} if name.endswith("both") else set()
        if "3x40" in name:  # of which two sequences are checked, and weights' gradients are of all
            gradients = {one for one in gradients if "w" not in one}
        assert set(errors) == {"o"} | gradients
        assert all(errors[one] < (2e-2 if "w" in one or one == "dz" else 8e-3) for one in gradients)
