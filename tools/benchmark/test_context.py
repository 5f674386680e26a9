"""The comparison over several GPUs, by two processes on a CPU, and by one that is one of eight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
SCRIPT = Path(__file__).resolve().parent / "context.py"


def run(command: list[str], out: Path) -> tuple[str, list[dict]]:
    """What the script prints, and its rows."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *command, "--runs", "1", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())["rows"]


def check_calls(calls: list[dict], name: str) -> None:
    sides = {(row["part"], row["side"]) for row in calls}
    assert sides == {(part, side) for part in ("forward", "step") for side in ("alone", "wyvern")}
    for row in calls:
        assert row["row"] == name
        o, dq = row["errors"]
        assert o < 5e-3 and dq < 8e-3


def test_measures_ranks_beside_one_process(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    command += ["--sets", "small", "--rows", "gdn", "--decay", "weak", "--collectives"]
    told, rows = run(command, tmp_path / "context.json")
    assert told.count("P=2") == len(rows)
    exchanges = {(row["row"], row["side"]) for row in rows if row["part"] == "exchange"}
    assert {("all_gather-1048576", "ten"), ("all_to_all-65536", "call")} < exchanges
    check_calls([row for row in rows if row["part"] != "exchange"], "gdn-4of4-1x512-D16-weak")


def test_measures_one_rank_of_eight(tmp_path: Path) -> None:
    command = [str(SCRIPT), "--virtual", "8", "--sets", "small", "--rows", "kda", "--decay", "weak"]
    told, rows = run(command, tmp_path / "context.json")
    assert told.count("P=8") == len(rows)
    check_calls(rows, "kda-4of4-1x512-D16-weak")
