"""Tables of what was measured: times and calls, log-probabilities, invariance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine_rows import ENGINE, WYVERN, Row
from measures import THROUGHPUT, differences

Runs = dict[tuple[str, str], dict[str, Any]]  # by row and side


def tables(rows: list[Row], runs: Runs, engine: str) -> str:
    parts = [_speed(rows, runs, engine), _logprobs(rows, runs, engine)]
    parts += [_invariance(rows, runs), _lost(rows, runs)]
    return "\n\n".join(part for part in parts if part)


def _table(head: str, lines: Iterable[str]) -> str:
    found = list(lines)
    columns = head.count("|") - 1
    return "\n".join([head, "|" + " --- |" * columns, *found]) if found else ""


def _done(runs: Runs, row: str, side: str) -> dict[str, Any] | None:
    run = runs.get((row, side))
    return None if run is None or "error" in run else run


def _engine_of(row: Row, runs: Runs) -> tuple[str, dict[str, Any]] | None:
    """The engine's run that a row is compared with, and the name of its row."""
    for name in (row.name, f"{row.model}/{row.against}"):
        if (run := _done(runs, name, ENGINE)) is not None:
            return name, run
    return None


def _speed(rows: list[Row], runs: Runs, engine: str) -> str:
    names = list(THROUGHPUT)
    speeds = " | ".join(f"{name}, tokens/s" for name in names)
    head = f"| row | with | start, s | {speeds} | served | declined |"
    lines = []
    for row in rows:
        theirs = _engine_of(row, runs)
        for side in row.sides:
            run = _done(runs, row.name, side)
            if run is None:
                continue
            cells = []
            for name in names:
                value = run.get("speed", {}).get(name)
                cell = "–" if value is None else f"{value:,.0f}"
                base = theirs[1].get("speed", {}).get(name) if theirs and side == WYVERN else None
                cells.append(f"{cell} ({value / base:.3f})" if value and base else cell)
            served, declined = _calls(run)
            who = engine if side == ENGINE else "Wyvern"
            lines.append(
                f"| {row.name} | {who} | {run['start_s']:.1f} | {' | '.join(cells)} | {served} | {declined} |"
            )
    return _table(head, lines)


def _calls(run: dict[str, Any]) -> tuple[str, str]:
    ranks = run.get("report", {}).get("ranks", [])
    served: dict[str, int] = {}
    declined: dict[str, int] = {}
    for rank in ranks:
        for name, count in rank["served"].items():
            served[name] = served.get(name, 0) + count
        for name, reasons in rank["declined"].items():
            for why, count in reasons.items():
                declined[f"{name}: {why}"] = declined.get(f"{name}: {why}", 0) + count
    told = [", ".join(f"{name} {count}" for name, count in sorted(one.items())) for one in (served, declined)]
    return told[0] or "–", told[1] or "–"


def _logprobs(rows: list[Row], runs: Runs, engine: str) -> str:
    head = "| log-probabilities | beside | prompts: mean | largest | answers: mean | largest |"
    lines = []
    for row in rows:
        theirs, ours = _engine_of(row, runs), _done(runs, row.name, WYVERN)
        if theirs and ours:
            lines += _apart(f"{row.name}, Wyvern", f"{theirs[0]}, {engine}", ours, theirs[1])
        eager, graphs = _done(runs, row.name, ENGINE), _done(runs, f"{row.model}/base", ENGINE)
        if row.option == "eager" and eager and graphs:  # the yardstick
            lines += _apart(f"{row.name}, {engine}", f"{row.model}/base, {engine}", eager, graphs)
    return _table(head, lines)


def _apart(one: str, other: str, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """A line, or none where one of them has no log-probabilities."""
    if "logprobs" not in ours or "logprobs" not in theirs:
        return []
    cells = []
    for part in ("prompts", "answers"):
        apart = [
            abs(a - b)
            for x, y in zip(ours["logprobs"][part], theirs["logprobs"][part], strict=True)
            for a, b in zip(x, y, strict=True)
        ]
        cells += [f"{sum(apart) / len(apart):.2e}", f"{max(apart):.2e}"]
    return [f"| {one} | {other} | {' | '.join(cells)} |"]


def _invariance(rows: list[Row], runs: Runs) -> str:
    """Of each run how many cases have the bits of the request alone, and whether runs have each other's."""
    head = "| invariance | with | cases of equal bits | other bits: prompt | answer | largest difference |"
    lines = []
    alone: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        for side in row.sides:
            run = _done(runs, row.name, side)
            if run is None or "invariance" not in run:
                continue
            found = run["invariance"]
            cases = {**found["cases"], "again": found["again"]}
            lines.append(_case(row.name, side, cases))
            if side == WYVERN and row.settings.invariant:
                for (model, name), first in alone.items():
                    if model == row.model:
                        apart = {"alone": differences(first, found["alone"])}
                        lines.append(_case(f"{row.name} beside {name}, alone", side, apart))
                alone[row.model, row.name] = found["alone"]
    return _table(head, lines)


def _case(name: str, side: str, cases: dict[str, dict[str, float]]) -> str:
    equal = sum(not case["prompt"] and not case["answer"] for case in cases.values())
    most = {part: max(case[part] for case in cases.values()) for part in ("prompt", "answer", "largest")}
    return (
        f"| {name} | {side} | {equal} of {len(cases)} | {most['prompt']} | {most['answer']} "
        f"| {most['largest']:.2e} |"
    )


def _lost(rows: list[Row], runs: Runs) -> str:
    return "\n".join(
        f"{row.name}, {side}: {runs[row.name, side]['error']}"
        for row in rows
        for side in row.sides
        if "error" in runs.get((row.name, side), {})
    )
