"""pytest plugin: a library's own tests, unchanged, with Wyvern in the place of its operators.

peer_tests.py loads it and passes on, as JSON in $WYVERN_PEER_TESTS, what :class:`Settings` holds. What
became of each test is appended to a file, one JSON object a line, as :class:`Record` has it.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch

from . import adapters, fla, vllm


@dataclass
class Settings:
    peer: str  # fla, flashinfer or vllm
    mode: str  # swap or enable
    device: str
    records: str  # the file that records go to
    most_tokens: int  # tests of more tokens are left out; 0: none is
    every: int  # of a test's cases every so many is run
    limit: float  # seconds for a test; 0: no limit


@dataclass
class Record:
    test: str
    result: str  # a key of peer_tests.RESULTS
    why: str
    calls: int  # of operators, served by Wyvern
    seconds: float


class TooLong(Exception):
    """A test took more than its limit."""


settings = Settings(**json.loads(os.environ["WYVERN_PEER_TESTS"]))
if settings.device == "cuda" and not torch.cuda.is_available():
    raise pytest.UsageError("PyTorch finds no GPU")
# Now: the tests' conftest.py and the tests take the library's functions from its modules when imported.
modules = {("fla", "swap"): fla, ("fla", "enable"): fla, ("vllm", "enable"): vllm}
peer = modules.get((settings.peer, settings.mode), adapters).start(settings.mode, settings.device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.split("[")[0]
        if 0 < settings.most_tokens < tokens(item):
            left_out.append(item)
            write(item, "left out", f"more than {settings.most_tokens} tokens", 0, 0.0)
            continue
        if seen[test] % settings.every:
            left_out.append(item)
            write(item, "left out", f"every {settings.every}th case is run", 0, 0.0)
        seen[test] += 1
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    config.hook.pytest_deselected(items=left_out)
    if settings.device == "cpu":
        for item in items:  # the CPU stands in for the GPU that such marks ask for
            item.own_markers[:] = [mark for mark in item.own_markers if not asks_for_cuda(mark)]


def asks_for_cuda(mark: Any) -> bool:
    return mark.name == "skipif" and "CUDA required" in mark.kwargs.get("reason", "")


def tokens(item: pytest.Item) -> int:
    """How many tokens a test's parameters name, 0 where they name none."""
    given = getattr(getattr(item, "callspec", None), "params", {})
    for name in ("seq_lens", "cu_seqlens"):
        if isinstance(given.get(name), (list, tuple)):
            lengths = given[name]
            return int(sum(lengths) if name == "seq_lens" else lengths[-1])
    batch = given.get("B") or given.get("batch_size") or 1
    return int(batch * (given.get("T") or given.get("seq_len") or 1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong(f"more than {settings.limit:g} s")

    torch.set_default_device(None)  # whatever the test before has left
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, settings.limit)
    try:
        with peer.around_a_test():
            return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        served, declined, own = peer.take_counts()
        result, why = judge(item, report, call, served, declined, own)
        write(item, result, why, served, call.duration)
    return report


def judge(
    item: pytest.Item,
    report: pytest.TestReport,
    call: pytest.CallInfo[None],
    served: int,
    declined: list[str],
    own: list[str],
) -> tuple[str, str]:
    """What became of a test, and why.

    declined: the reasons of calls that Wyvern left to the library. own: the library's operators that ran.
    """
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return "skipped", reason.removeprefix("Skipped: ")
    if len(own) > len(declined):
        return "fell back", f"{', '.join(sorted(set(own)))} ran, and no call was declined"
    name = getattr(item, "originalname", item.name)
    if not report.passed and name in peer.DIFFERS:
        return "differs", peer.DIFFERS[name]
    if declined and not (peer.WANTS_REFUSALS and report.passed):
        return "declined", f"{'; '.join(sorted(set(declined)))} (the test {report.outcome})"
    if report.passed:
        return ("passed", "") if served or declined else ("no call", "")
    error = call.excinfo
    assert error is not None
    if isinstance(error.value, TooLong):
        return "too long", str(error.value)
    if settings.device == "cpu" and (kernel := gpu_code(error)):
        return "needs a GPU", f"{kernel}, which the library has for GPUs only"
    return "failed", " ".join(str(error.exconly()).split())[:300]


def gpu_code(error: pytest.ExceptionInfo[BaseException]) -> str | None:
    """The library's module whose call of Triton or CUDA raised an error, if that is what it was."""
    modules = [str(entry.frame.f_globals.get("__name__", "")) for entry in error.traceback]
    if not any(name.startswith(("triton.", "torch.cuda")) for name in modules):
        return None
    return next((name for name in reversed(modules) if name.startswith("fla.")), "triton")


def write(item: pytest.Item, result: str, why: str, calls: int, seconds: float) -> None:
    with open(settings.records, "a") as file:
        file.write(json.dumps(asdict(Record(item.nodeid, result, why, calls, seconds))) + "\n")
