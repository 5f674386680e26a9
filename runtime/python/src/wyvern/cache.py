"""The cache of compiled kernels, measurements and tuned plans: one SQLite file of the user's.

It is in $WYVERN_CACHE_DIR, else $XDG_CACHE_HOME/wyvern, else ~/.cache/wyvern. A process reads the
variable when it first computes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["clear", "entries", "path", "show", "stats"]


def path() -> str:
    """The cache's file."""
    return _run("path")["path"]


def stats() -> dict[str, Any]:
    """Counts of artifacts, measurements and winners, code_bytes, file_bytes, path and status."""
    return _run("stats")


def entries() -> dict[str, list[dict[str, Any]]]:
    """"winners", "measurements" and "artifacts", each a list of rows with their "id"."""
    return _run("list")


def show(entry: str) -> dict[str, Any]:
    """A row in full: by a winner's or measurement's id ("w1", "m1"), an artifact's key or its beginning."""
    return _run("show", entry)


def clear() -> None:
    """Removes everything stored. What this process has loaded already goes on; tuned plans do not."""
    from ._extension import extension

    _run("clear")
    extension().wyvern_extension_forget()


def _run(*arguments: str) -> dict[str, Any]:
    from ._command import run

    return run("cache", *arguments)
