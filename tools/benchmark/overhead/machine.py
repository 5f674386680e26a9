"""The programs of a build, started as often and in as many processes at once as a figure needs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class Machine:
    """A build, a device, and a folder whose caches are gone in the end."""

    def __init__(self, build: Path, device: str, python: str) -> None:
        self.build, self.device, self.python = build, device, python
        self._folder = tempfile.TemporaryDirectory(prefix="wyvern-overhead-")
        self._numbers = itertools.count()

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def folder(self) -> Path:
        """A new, empty one."""
        made = Path(self._folder.name) / str(next(self._numbers))
        made.mkdir()
        return made

    def program(self, name: str) -> Path:
        path = self.build / "bin" / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is not built")
        return path

    def start(self, name: str, *arguments: object, cache: Path | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            [self.program(name), *map(str, arguments)],
            env=self.environment(cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, cache: Path | None) -> dict[str, str]:
        more = {} if cache is None else {"WYVERN_CACHE_DIR": str(cache)}
        package = os.pathsep.join(filter(None, [str(self.build / "python"),
                                                os.environ.get("PYTHONPATH")]))  # fmt: skip
        return os.environ | more | {"PYTHONPATH": package}

    def ask(self, name: str, *arguments: object, cache: Path | None = None) -> dict:
        """The JSON document that a program prints."""
        return finish(self.start(name, *arguments, cache=cache))

    def ask_at_once(self, name: str, calls: list[tuple], cache: Path | None = None) -> list[dict]:
        """The same of many processes that run at the same time."""
        running = [self.start(name, *arguments, cache=cache) for arguments in calls]
        return [finish(process) for process in running]

    def ask_python(self, script: Path, *arguments: object, cache: Path | None = None) -> dict:
        return finish(subprocess.Popen([self.python, script, *map(str, arguments)],
                                       env=self.environment(cache), stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True))  # fmt: skip


def finish(process: subprocess.Popen) -> dict:
    """What a process prints, once it has ended well. Raises RuntimeError with its last words."""
    out, err = process.communicate()
    if process.returncode != 0:
        words = (err.strip() or out.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"exit code {process.returncode}: {words[:300]}")
    return json.loads(out)
