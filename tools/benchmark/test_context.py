"""The comparison over several GPUs, by two processes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
SCRIPT = Path(__file__).resolve().parent / "context.py"


def test_measures_ranks_beside_one_process(tmp_path: Path) -> None:
    out = tmp_path / "context.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command += ["--sets", "small", "--rows", "gdn", "--decay", "weak", "--runs", "1", "--collectives", "-o", str(out)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert done.stdout.count("P=2") == len(rows)

    exchanges = {(row["row"], row["side"]) for row in rows if row["part"] == "exchange"}
    assert {("all_gather-1048576", "ten"), ("all_to_all-65536", "call")} < exchanges
    calls = {(row["part"], row["side"]): row for row in rows if row["part"] != "exchange"}
    assert set(calls) == {(part, side) for part in ("forward", "step") for side in ("alone", "wyvern")}
    for row in calls.values():
        assert row["row"] == "gdn-4of4-1x512-D16-weak"
        o, dq = row["errors"]
        assert o < 5e-3 and dq < 8e-3

