"""The tables of a run, in Markdown."""

from __future__ import annotations

import math

OURS = "wyvern"
BOUNDS = {"o": 5e-3, "final_state": 5e-3, "dg": 2e-2, "dbeta": 2e-2}
GRADIENT_BOUND = 8e-3


def number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def milliseconds(found: dict | None) -> str:
    """ "0.241 ± 0.002"; * where the call could not be captured in a graph."""
    if found is None:
        return "–"
    mark = "" if found["how"] == "graph" else "*"
    return f"{number(found['ms'])} ± {number(found['spread_ms'], 1)}{mark}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: list[str], lines: list[list[str]]) -> list[str]:
    return [_line(head), _line(["---"] * len(head)), *map(_line, lines)]


def _names(rows: list[dict]) -> list[str]:
    """The sides that were measured anywhere, ours first."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("sides", {})))
    return sorted(names, key=lambda name: not name.startswith(OURS))


def _has_target(row: dict) -> bool:
    """Targets are of an H200."""
    return row["must"] is not None and OURS in row.get("sides", {}) and "H200" in row["device"]


def _times(rows: list[dict], names: list[str]) -> list[str]:
    peers = [name for name in names if name != OURS]
    head = ["row", "Wyvern, ms", "% of floor", "TB/s", "TFLOP/s"]
    head += [f"{name}, ms (ratio, % of floor)" for name in peers]
    head += ["best peer / Wyvern", "must", "reach"]
    lines = []
    for row in rows:
        sides = row.get("sides", {})
        ours = sides.get(OURS, {})
        cells = [row["row"], milliseconds(sides.get(OURS))]
        cells += [number(ours.get(key)) for key in ("percent_of_floor", "tb_per_s", "tflop_per_s")]
        for name in peers:
            cell = milliseconds(sides.get(name))
            if name in sides:
                ratio = number(row.get("ratios", {}).get(name))
                cell += f" ({ratio}, {number(sides[name]['percent_of_floor'])})"
            cells.append(cell)
        best = row.get("best_ratio")
        cells += [number(best) + (f" ({row['best_peer']})" if best else "")]
        for target in (row["must"], row["reach"]):
            judged = target is not None and _has_target(row)
            met = "" if not judged else (" ✓" if ours["ms"] <= target else " ✗")
            cells.append(number(target) + met)
        lines.append(cells)
    return _table(head, lines)


def _bound(quantity: str) -> float:
    return BOUNDS.get(quantity, GRADIENT_BOUND)


def _within(error: float | None, quantity: str) -> bool:
    return error is not None and error <= _bound(quantity)


def _error(error: float | None, quantity: str) -> str:
    text = "not finite" if error is None else f"{error:.1e}"
    return text if _within(error, quantity) else text + " !"


def _errors(rows: list[dict], names: list[str]) -> list[str]:
    lines = []
    for row in rows:
        sides = row.get("sides", {})
        quantities = list(dict.fromkeys(q for side in sides.values() for q in side["errors"]))
        for quantity in quantities:
            cells = [row["row"], quantity, f"{_bound(quantity):.0e}"]
            found = {n: side["errors"] for n, side in sides.items() if quantity in side["errors"]}
            for name in names:
                cells.append(_error(found[name][quantity], quantity) if name in found else "–")
            peers = [e[quantity] for n, e in found.items() if not n.startswith(OURS)]
            peers = [error for error in peers if error is not None]
            ours = found.get(OURS, {}).get(quantity)
            # Two sides that both round the result to 16 bits agree to some digits only.
            worse = (
                "" if ours is None or not peers else ("yes" if ours <= 1.05 * min(peers) else "no")
            )
            lines.append([*cells, worse])
    return _table(["row", "of", "bound", *names, "Wyvern no worse"], lines)


def _calls(rows: list[dict], names: list[str]) -> list[str]:
    lines = []
    for row in rows:
        cells = [row["row"]]
        for name in names:
            found = row.get("sides", {}).get(name)
            if found is None:
                cells.append("–")
                continue
            memory = found["memory_bytes"]
            parts = [f"{found['host_us']:.0f} µs", milliseconds(found["call"] | {"how": "graph"})]
            parts += [f"{memory / 2**20:.0f} MiB"] if memory is not None else []
            parts.append(f"{found['first_call_s']:.1f} s")
            cells.append(", ".join(parts))
        lines.append(cells)
    return _table(["row", *names], lines)


def _reasons(rows: list[dict], kind: str) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.get(kind, {}).items():
            found.setdefault((name, reason), []).append(row["row"])
    return [
        f"* {name}: {reason}: {len(which)} rows ({', '.join(which[:3])}"
        f"{', ...' if len(which) > 3 else ''})"
        for (name, reason), which in found.items()
    ]


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def summary(rows: list[dict]) -> dict:
    """Counts and means over the rows that were measured."""
    ratios = [row["best_ratio"] for row in rows if row.get("best_ratio")]
    with_must = [row for row in rows if _has_target(row)]
    met = [row for row in with_must if row["sides"][OURS]["ms"] <= row["must"]]
    ours = [row["sides"][OURS]["errors"] for row in rows if OURS in row.get("sides", {})]
    return {
        "rows": len(rows),
        "measured": sum("sides" in row for row in rows),
        "with_a_peer": len(ratios),
        "geometric_mean_of_best_ratios": geometric_mean(ratios),
        "least_best_ratio": min(ratios, default=None),
        "slower_than_a_peer": [row["row"] for row in rows if (row.get("best_ratio") or 1) < 1],
        "with_a_target": len(with_must),
        "targets_met": len(met),
        "beyond_bounds": sum(not _within(e, q) for errors in ours for q, e in errors.items()),
    }


def render(document: dict) -> str:
    """The page of a run: what was measured, times, errors, host times, and what is missing."""
    rows = document["rows"]
    names = _names(rows)
    found = document["summary"]
    environment = document["environment"]
    lines = ["# Wyvern and its peers", ""]
    lines += [
        f"{environment['date']}, {environment['device']}, PyTorch {environment['torch']}.",
        "",
    ]
    for name, side in environment["sides"].items():
        versions = ", ".join(
            f"{package} {version}" for package, version in side["versions"].items()
        )
        lines.append(f"* {name}: {side['about']}" + (f" ({versions})" if versions else ""))
    for name, reason in environment["absent"].items():
        lines.append(f"* {name}: absent ({reason})")
    lines += [
        "",
        f"{found['measured']} of {found['rows']} rows measured, {found['with_a_peer']} of them "
        "beside a peer; best peer / Wyvern: geometric mean "
        f"{number(found['geometric_mean_of_best_ratios'])}, least "
        f"{number(found['least_best_ratio'])}; {found['targets_met']} of {found['with_a_target']} "
        f"targets met (they are of an H200); {found['beyond_bounds']} errors of Wyvern beyond "
        "their bounds.",
        "",
    ]
    lines += [
        "## Times",
        "",
        "Medians and median distances from them, caches displaced before each, "
        "sides in turn. Of graph replays; * of calls, where a call could not be captured.",
        "",
    ]
    lines += _times(rows, names)
    lines += [
        "",
        "## Errors",
        "",
        "Against float64 on the same inputs, rms of the difference over rms; ! beyond the bound.",
        "",
        *_errors(rows, names),
    ]
    lines += [
        "",
        "## Calls",
        "",
        "Host time to enqueue a call, ms of a call on the device, memory that a call takes beside "
        "its inputs, and the first call (compiling, tuning of its own"
        + ("; after a warm-up, which compiled most)." if environment.get("warm_up") else ")."),
        "",
    ]
    lines += _calls(rows, names)
    for kind, title in (("declined", "Not computed"), ("failed", "Failed")):
        if reasons := _reasons(rows, kind):
            lines += ["", f"## {title}", "", *reasons]
    plain = {(name, side["no_graph"]) for row in rows for name, side in row.get("sides", {}).items()
             if "no_graph" in side}  # fmt: skip
    if plain:
        lines += ["", "## Not captured", "", *sorted(f"* {name}: {why}" for name, why in plain)]
    if lost := [row for row in rows if "error" in row]:
        lines += ["", "## Rows lost", "", *(f"* {row['row']}: {row['error']}" for row in lost)]
    return "\n".join(lines) + "\n"
