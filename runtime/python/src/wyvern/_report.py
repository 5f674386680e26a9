"""What was served, counted by process, and told of all processes of an engine.

A front-end process names a folder in its environment, which the processes that it starts inherit; each writes
its counts there, and a report adds them up. Processes of other machines have other folders.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ._torch import torch

_VARIABLE = "WYVERN_REPORTS"
_PAUSE = 0.2  # seconds, at least, from one writing of a process's counts to the next


@dataclass(frozen=True)
class Report:
    """Counts of calls since the start or the last reset.

    served: by function. declined: by function, then by reason; those went to the library's own function.
    traced: by function, the calls that torch.compile or torch.export traced: what they compiled has the
    library's own function, at each of its calls. captured: by function, those of served that were recorded in
    CUDA graphs, whose replays are not counted. processes: how many have counted something.
    """

    served: dict[str, int]
    declined: dict[str, dict[str, int]]
    traced: dict[str, int] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)
    processes: int = 1

    def __str__(self) -> str:
        lines = [self._served_line(name) for name in sorted(self.served)]
        lines += [f"{name}: {count} traced, so not served" for name, count in sorted(self.traced.items())]
        for name, reasons in sorted(self.declined.items()):
            lines += [f"{name}: {count} declined: {why}" for why, count in sorted(reasons.items())]
        if lines and self.processes > 1:
            lines.append(f"in {self.processes} processes")
        return "\n".join(lines) or "no calls"

    def _served_line(self, name: str) -> str:
        line = f"{name}: {self.served[name]} served"
        captured = self.captured.get(name, 0)
        return (
            f"{line}, {captured} of them into CUDA graphs, whose replays are not counted"
            if captured
            else line
        )


_TOLD = [one.name for one in fields(Report) if one.name != "processes"]


class Counts:
    """What :class:`Report` tells, from all threads.

    library: whose calls they are; with it the counts of an engine's processes are shared.
    """

    def __init__(self, library: str | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[str, Any]] = {name: {} for name in _TOLD}
        self._thread = threading.local()
        self._shared = None if library is None else _Shared(library, self._snapshot)
        os.register_at_fork(after_in_child=self._forget)

    def traced(self, name: str) -> None:
        self._add("traced", name)

    def served(self, name: str) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._add("captured", name)
        self._add("served", name)

    def declined(self, name: str, reason: str) -> None:
        self._add("declined", name, reason)

    def share(self) -> None:
        """Has the processes that this one starts, and this one, share their counts from now on."""
        if self._shared is not None:
            self._shared.begin()

    def report(self, reset: bool, own: bool = True) -> Report:
        """own: of this process alone; else of all that share theirs."""
        mine = self._snapshot(reset)
        others = [] if own or self._shared is None else self._shared.others(reset)
        total: dict[str, Any] = {}
        for counts in (mine, *others):
            _merge(total, counts)
        counted = sum(any(counts.values()) for counts in (mine, *others))
        return Report(**total, processes=max(counted, 1))

    @property
    def falls_back(self) -> bool:
        """Whether this thread is in a function that computes what was declined."""
        return getattr(self._thread, "falls_back", False)

    @falls_back.setter
    def falls_back(self, value: bool) -> None:
        self._thread.falls_back = value

    def _add(self, kind: str, *names: str) -> None:
        with self._lock:
            counts = self._counts[kind]
            for name in names[:-1]:
                counts = counts.setdefault(name, {})
            counts[names[-1]] = counts.get(names[-1], 0) + 1
        if self._shared is not None:
            self._shared.changed()

    def _snapshot(self, reset: bool = False) -> dict[str, Any]:
        told: dict[str, Any] = {}
        with self._lock:
            _merge(told, self._counts)
            if reset:
                self._counts = {name: {} for name in _TOLD}
        if reset and self._shared is not None:
            self._shared.changed()
        return told

    def _forget(self) -> None:
        """In a child of fork(), which counts for itself."""
        self._lock = threading.Lock()
        self._counts = {name: {} for name in _TOLD}


def _merge(total: dict[str, Any], more: dict[str, Any], sign: int = 1) -> None:
    """Adds numbers of the same names, in dictionaries inside too; what comes to 0 is left out."""
    for name, value in more.items():
        if isinstance(value, dict):
            _merge(total.setdefault(name, {}), value, sign)
        elif total.get(name, 0) + sign * value:
            total[name] = total.get(name, 0) + sign * value
        else:
            total.pop(name, None)


class _Shared:
    """The counts of a library in the processes that have one folder. Files are replaced as a whole."""

    def __init__(self, library: str, snapshot: Callable[[], dict[str, Any]]) -> None:
        self._library = library
        self._snapshot = snapshot
        self._start_over()
        self._before: dict[str, dict[str, Any]] = {}  # by file, what a reset has taken off
        os.register_at_fork(after_in_child=self._start_over)

    def _start_over(self) -> None:
        self._news = threading.Event()
        self._starting = threading.Lock()
        self._writer: threading.Thread | None = None

    def begin(self) -> None:
        """Names a folder where no process above has named one; it is this one's, to remove at the end."""
        if named := os.environ.get(_VARIABLE):
            with contextlib.suppress(OSError):
                os.makedirs(named, exist_ok=True)
        else:
            folder = tempfile.mkdtemp(prefix="wyvern-reports-")
            os.environ[_VARIABLE] = folder
            atexit.register(_remove, folder, os.getpid())

    def changed(self) -> None:
        if self._news.is_set() or not os.environ.get(_VARIABLE):
            return
        self._news.set()
        with self._starting:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="wyvern-report", daemon=True)
                self._writer.start()

    def others(self, reset: bool) -> list[dict[str, Any]]:
        """Of every other process, ended ones too, since the last reset."""
        found = []
        folder = os.environ.get(_VARIABLE)
        for file in sorted(Path(folder).glob(f"{self._library}-*.json")) if folder else []:
            if file != self._own_file():
                with contextlib.suppress(OSError, ValueError):
                    counts = json.loads(file.read_text())
                    since: dict[str, Any] = {name: {} for name in _TOLD}
                    _merge(since, counts)
                    _merge(since, self._before.get(file.name, {}), -1)
                    since["declined"] = {name: why for name, why in since["declined"].items() if why}
                    found.append(since)
                    if reset:
                        self._before[file.name] = counts
        return found

    def _own_file(self) -> Path:
        return Path(os.environ[_VARIABLE]) / f"{self._library}-{os.getpid()}.json"

    def _write(self) -> None:
        """The thread's loop: after a change what there is then; nothing where nothing changes."""
        pause = threading.Event()
        while self._news.wait():
            pause.wait(_PAUSE)  # others come meanwhile
            self._news.clear()
            with contextlib.suppress(OSError):  # the folder is gone, or full
                file = self._own_file()
                made = file.with_suffix(".new")
                made.write_text(json.dumps(self._snapshot()))
                made.replace(file)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
