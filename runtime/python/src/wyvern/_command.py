"""The `wyvern` command of the package: a program in the wheel, run in the place of Python or beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ._extension import nvrtc_folders
from ._files import COMMAND

_BAD_USAGE = 2


def environment() -> dict[str, str]:
    """That of this process, with NVRTC of NVIDIA's Python packages where the program finds it."""
    changed = dict(os.environ)
    folders = [changed["LD_LIBRARY_PATH"]] if changed.get("LD_LIBRARY_PATH") else []
    if folders := folders + nvrtc_folders():
        changed["LD_LIBRARY_PATH"] = ":".join(folders)
    return changed


def _program() -> str:
    """The program; RuntimeError where the package was installed without it."""
    if not os.path.exists(COMMAND):
        raise RuntimeError(
            "this installation of wyvern, from a clone, has no command `wyvern`, which tunes and manages the "
            "cache; add it with `pip install -v ./runtime/python -C cmake.define.WYVERN_COMMAND=ON`"
        )
    return COMMAND


def main() -> None:
    """The console script."""
    try:
        program = _program()
    except RuntimeError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": {"message": str(error), "exit_code": 1}}))
        sys.exit(f"wyvern: {error}")
    os.execve(program, ["wyvern", *sys.argv[1:]], environment())


def run(*arguments: str, quiet: bool = True) -> dict[str, Any]:
    """The JSON document of a verb. What it says on stderr is shown unless `quiet`.

    Raises ValueError for what the command calls bad input, RuntimeError for any other failure, with its
    sentence.
    """
    done = subprocess.run(
        [_program(), *arguments, "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        check=False,
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"`wyvern {arguments[0]}` ended with {done.returncode}") from None
    if error := document.get("error"):
        kind = ValueError if error["exit_code"] == _BAD_USAGE else RuntimeError
        raise kind(error["message"])
    return document
