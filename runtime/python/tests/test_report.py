"""Counts of several processes, added up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from wyvern import _report
from wyvern._report import Counts, Report

COUNTS = """
import sys, time
from wyvern._report import Counts
counts = Counts("engine")
counts.share()
for _ in range(int(sys.argv[1])):
    counts.served("prefill")
counts.declined("decode", "no slots")
print("counted", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("WYVERN_REPORTS", raising=False)
    yield
    folder = os.environ.get("WYVERN_REPORTS")
    if folder and Path(folder).name.startswith("wyvern-reports-"):
        _report._remove(folder, os.getpid())


def counting(times: int) -> subprocess.Popen[str]:
    """A process that has counted, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTS, str(times)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "counted\n"
    return process


def until(found: Callable[[], bool]) -> None:
    """Waits for another process to have written."""
    for _ in range(600):
        if found():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that in 30 s")


def test_all_processes_of_an_engine() -> None:
    """Those that go on and one that was killed; a reset takes off what has been counted, and no more."""
    counts = Counts("engine")
    counts.share()
    counts.served("prefill")
    other = Counts("another")
    running, killed = counting(3), counting(5)
    until(lambda: counts.report(False, own=False).processes == 3)
    killed.kill()
    killed.wait()
    told = counts.report(True, own=False)
    assert told.served == {"prefill": 9} and told.declined == {"decode": {"no slots": 2}}
    assert str(told).splitlines() == ["prefill: 9 served", "decode: 2 declined: no slots", "in 3 processes"]
    assert str(counts.report(False, own=False)) == "no calls"
    assert str(other.report(False, own=False)) == "no calls"
    third = counting(2)
    until(lambda: counts.report(False, own=False).served == {"prefill": 2})
    for process in (running, third):
        process.communicate("\n", timeout=60)
        assert process.returncode == 0
    folder = Path(os.environ["WYVERN_REPORTS"])
    assert folder.is_dir(), "a process that did not make the folder removed it"
    own = counts.report(False)
    assert not own.served and own.processes == 1


def test_a_child_of_fork_counts_for_itself() -> None:
    counts = Counts("engine")
    counts.share()
    counts.served("prefill")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        counts.served("decode")
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    until(lambda: "decode" in counts.report(False, own=False).served)
    assert counts.report(False, own=False).served == {"prefill": 1, "decode": 1}
    os.write(go[1], b".")
    assert os.waitpid(child, 0)[1] == 0


def test_the_folder_goes_with_its_process(tmp_path: Path) -> None:
    """One that is named stays."""
    program = "from wyvern._report import *; Counts('e').share(); print(os.environ['WYVERN_REPORTS'])"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    for more, stays in (({}, False), ({"WYVERN_REPORTS": str(tmp_path / "named")}, True)):
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **paths, **more}, capture_output=True,
            text=True, timeout=120, check=True,
        )  # fmt: skip
        assert Path(done.stdout.strip()).is_dir() is stays


def test_what_is_no_report_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WYVERN_REPORTS", str(tmp_path))
    (tmp_path / "engine-1.json").write_text('{"served": {"pre')
    (tmp_path / "engine-2.json").write_text(json.dumps({"served": {"prefill": 2}}))
    assert Counts("engine").report(False, own=False).served == {"prefill": 2}


def test_calls_that_went_into_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    capturing = iter([True, False, True])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    counts = Counts()
    for _ in range(3):
        counts.served("decode")
    told = counts.report(False)
    assert told == Report({"decode": 3}, {}, captured={"decode": 2})
    assert str(told) == "decode: 3 served, 2 of them into CUDA graphs, whose replays are not counted"
