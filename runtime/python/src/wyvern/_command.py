"""The `wyvern` command of the package: replaces this process by the program in the wheel."""

from __future__ import annotations

import os
import sys

from ._extension import nvrtc_folders
from ._files import COMMAND


def environment() -> dict[str, str]:
    """That of this process, with NVRTC of NVIDIA's Python packages where the program finds it."""
    changed = dict(os.environ)
    folders = [changed["LD_LIBRARY_PATH"]] if changed.get("LD_LIBRARY_PATH") else []
    if folders := folders + nvrtc_folders():
        changed["LD_LIBRARY_PATH"] = ":".join(folders)
    return changed


def main() -> None:
    os.execve(COMMAND, ["wyvern", *sys.argv[1:]], environment())
