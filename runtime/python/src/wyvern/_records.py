"""Lists of records that print as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Cell = str | float | None  # text to the left of its column, a number to the right; None: not known


class Records(list[dict[str, Any]]):
    """A list of dictionaries whose text is a table: a heading, and a line for each of them."""

    def _heading(self) -> tuple[str, ...]:
        raise NotImplementedError

    def _lines(self) -> list[tuple[Cell, ...]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        return _table(self._heading(), self._lines())


class Prepared(Records):
    """What :func:`wyvern.prepared` gives."""

    def _heading(self) -> tuple[str, ...]:
        return ("problem", "device", "origin", "plan")

    def _lines(self) -> list[tuple[Cell, ...]]:
        lines: list[tuple[Cell, ...]] = []
        for one in sorted(self, key=lambda one: (one["device"], one["problem"])):
            plan = " ".join(step["template"] for step in one["plan"])
            lines.append((one["problem"], one["device"], one["origin"], plan))
        return lines


def _table(heading: tuple[str, ...], lines: Sequence[tuple[Cell, ...]]) -> str:
    columns = []
    for name, *cells in zip(heading, *lines, strict=True):
        texts = [name, *(_text(cell) for cell in cells)]
        width = max(map(len, texts))
        left = all(isinstance(cell, str) for cell in cells)
        columns.append([text.ljust(width) if left else text.rjust(width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else f"{cell:.4g}"
