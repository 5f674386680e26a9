"""Each example runs, and so do the lines of the README."""

from __future__ import annotations

import runpy
from itertools import takewhile
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", sorted((FOLDER / "examples").glob("*.py")), ids=lambda file: file.stem)
def test_example(file: Path) -> None:
    runpy.run_path(str(file), run_name="__main__")


def test_lines_of_the_readme() -> None:
    """Those after `pip install`: from import to a training step."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    code = takewhile(bool, lines[lines.index("    import torch, wyvern") :])
    exec(compile("\n".join(line[4:] for line in code), "README.md", "exec"), {})
