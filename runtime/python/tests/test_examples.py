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


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds far from what is measured, which a call that prepares, copies or checks too much breaks."""
    import host_time

    host_time.main()
    ratios = [float(line.split()[-5]) for line in capsys.readouterr().out.splitlines()]
    assert max(ratios[1:3]) < 4 and max(ratios[3:]) < 12, ratios
