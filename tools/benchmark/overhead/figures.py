"""The figures: what is measured, how, and what it should be."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machine import ROOT, Machine

# What is tuned: a model's shape on a GPU, a small one on a CPU, where tuning takes the cores.
TUNED = {
    "cuda": ["gated_delta_rule", "--shape", "T=2048,H=16,HV=32,K=128"],
    "cpu": ["gated_delta_rule", "--shape", "T=256,H=2,K=64"],
}
WRITERS, ROWS_EACH = 64, 20
COLD_PROCESSES = 16
MOST_NOISE = 0.2  # beyond it a comparison of two plans says nothing
TOO_NOISY = "too much noise to judge"


@dataclass
class Figure:
    """One line of the table. `met` is None where there is no target for this device."""

    name: str
    target: str
    measured: str
    met: bool | None
    values: dict = field(default_factory=dict)
    note: str = ""


@dataclass
class Effort:
    """How often things are done."""

    processes: int = 5
    budget: float = 20
    pairs: int = 1
    seeds: int = 20


def _first_calls(machine: Machine, passes: str, caches: list[Path]) -> tuple[float, dict, str]:
    """The median milliseconds of a process with each cache, less those of a second call on a CPU,
    where a call is the kernels' work; every figure; and what to say of it."""
    calls = [
        machine.ask("overhead_worker", "first-call", machine.device, passes, cache)
        for cache in caches
    ]
    values = {key: [call[key] for call in calls] for key in ("ms", "again_ms", "compiled")}
    least = min(values["again_ms"])
    ms = statistics.median(values["ms"]) - (least if machine.is_cpu else 0)
    note = f"without the kernels' own {least:.1f} ms" if machine.is_cpu else ""
    return ms, values, note


def first_call(machine: Machine, effort: Effort) -> list[Figure]:
    """In new processes, whose context and memory are there before the clock starts."""
    found = []
    for passes, name, most in (("forward", "forward", 0.7), ("both", "forward and backward", 2)):
        empty = [machine.folder() for _ in range(effort.processes)]
        ms, values, note = _first_calls(machine, passes, empty)
        kernels = "/".join(map(str, sorted(set(values["compiled"]))))
        found.append(
            Figure(
                f"first call, nothing cached: {name}",
                f"≤ {most:g} s",
                f"{ms / 1e3:.2f} s, {kernels} kernels compiled",
                ms <= 1e3 * most,
                values,
                note,
            )
        )
    cache = machine.folder()
    _first_calls(machine, "forward", [cache])
    ms, values, note = _first_calls(machine, "forward", [cache] * (2 * effort.processes))
    compiled = sum(values["compiled"])
    name = "first call in a new process, cache warm, context not counted"
    measured = f"{ms:.2f} ms, {compiled} kernels compiled"
    found.append(Figure(name, "≤ 5 ms", measured, ms <= 5 and compiled == 0, values, note))
    return found


def host_time_cpp(machine: Machine, effort: Effort) -> list[Figure]:
    document = machine.ask("host_time", f"--benchmark_filter=^{machine.device}/(launch|prepare)",
                           f"--benchmark_repetitions={effort.processes}",
                           "--benchmark_format=json")  # fmt: skip
    medians = {one["run_name"].split("/")[1]: one["real_time"] for one in document["benchmarks"]
               if one.get("aggregate_name") == "median"}  # fmt: skip
    launch = next(time for name, time in medians.items() if name == "launch")
    prepare = next(time for name, time in medians.items() if name == "prepare_loaded")
    met = None if machine.is_cpu else launch <= 5
    note = "on a CPU the call is the work" if machine.is_cpu else ""
    return [
        Figure("host time per forward call, C++", "≤ 5 µs", f"{launch:.1f} µs", met,
               {"us": launch}, note),
        Figure("prepare() of a problem that is loaded, C++", "–", f"{prepare:.1f} µs", None,
               {"us": prepare}),
    ]  # fmt: skip


def host_time_python(machine: Machine, effort: Effort) -> list[Figure]:
    script = ROOT / "runtime/python/tests/host_time.py"
    document = machine.ask_python(script, machine.device.split(":")[0], "--json",
                                  cache=machine.folder())  # fmt: skip
    us = document["chunk_gated_delta_rule"]
    note = "on a CPU the call is the work, of one token of a small head" if machine.is_cpu else ""
    return [Figure("host time per forward call, Python", "≤ 15 µs", f"{us:.1f} µs",
                   None if machine.is_cpu else us <= 15, {"us": document}, note)]  # fmt: skip


def look_up(machine: Machine, effort: Effort) -> list[Figure]:
    number = -1 if machine.is_cpu else int(machine.device.partition(":")[2] or 0)
    found = machine.ask("lookup_time", number, cache=machine.folder())
    nothing = found["allocations"] == 0 and found["locks"] == 0
    return [Figure(
        "look-up of an already loaded kernel", "≤ 0.1 µs, no allocation, no lock",
        f"{found['median_us']:.3f} µs, {found['allocations']} allocations and {found['locks']} "
        f"locks in {found['lookups']} look-ups", nothing and found["median_us"] <= 0.1, found,
    )]  # fmt: skip


def tune(machine: Machine, effort: Effort, cache: Path, *more: object) -> dict:
    kind = machine.device.split(":")[0]
    return machine.ask("wyvern", "tune", *TUNED[kind], "--device", machine.device, "--json",
                       "--budget", f"{effort.budget:g}s", *more, cache=cache)  # fmt: skip


def ratios(machine: Machine, cache: Path, other: Path | None = None) -> dict[str, dict]:
    """The plans of a cache, and of another, beside the default plan by turns."""
    kind = machine.device.split(":")[0]
    more = [] if other is None else ["--compare", other]
    document = machine.ask("wyvern", "bench", *TUNED[kind], "--device", machine.device, "--json",
                           *more, cache=cache)  # fmt: skip
    return {plan["name"]: plan for plan in document["plans"]}


@dataclass
class Comparison:
    """One plan's time over another's, taken by turns; `noise` is twice the spread of both."""

    ratio: float
    noise: float

    @property
    def tells(self) -> bool:
        return self.noise <= MOST_NOISE

    def __str__(self) -> str:
        return f"{100 * (self.ratio - 1):+.1f}%, noise {100 * self.noise:.0f}%"


def compared(plans: dict[str, dict], name: str, other: str) -> Comparison:
    """Of what `wyvern bench` says of two plans."""
    a, b = plans[name], plans[other]
    noise = 2 * sum(plan["spread_ms"] / plan["ms"] for plan in (a, b))
    return Comparison(a["ratio"] / b["ratio"], noise)


def tuning(machine: Machine, effort: Effort) -> list[Figure]:
    """Tunings from nothing, all of one problem; the first is then tuned exhaustively."""
    caches = [machine.folder() for _ in range(2 * effort.pairs)]
    documents = [tune(machine, effort, cache) for cache in caches]
    seconds = statistics.median(document["seconds"] for document in documents)
    found = [_tuning_time(machine, effort, caches[0], documents[0], seconds)]
    default = compared(ratios(machine, caches[0]), "tuned", "default")
    found.append(
        Figure(
            "tuned plan slower than the default one, paired",
            "never beyond noise",
            f"tuned beside default {default}",
            default.ratio <= 1 + default.noise if default.tells else None,
            vars(default),
            "" if default.tells else TOO_NOISY,
        )
    )
    agree = [
        _agree(machine, caches[i], caches[i + 1], documents[i], documents[i + 1])
        for i in range(0, len(caches), 2)
    ]
    others = [one for one in agree if one is not None]
    near = sum(one.tells and abs(one.ratio - 1) <= 0.01 for one in others)
    found.append(
        Figure(
            "same winner, or one within 1%, in two fresh tunings",
            "≥ 98%",
            f"{len(agree) - len(others)} the same, {near} within 1% of {len(agree)} pairs here",
            None,
            {"others": [vars(one) for one in others]},
            "too few pairs to judge: see the replay",
        )
    )
    return found


def _tuning_time(
    machine: Machine, effort: Effort, cache: Path, document: dict, seconds: float
) -> Figure:
    """How long it took, and how far its plan is from that of the exhaustive search."""
    whole = machine.folder() / "whole"
    shutil.copytree(cache, whole)
    exhaustive = tune(machine, effort, whole, "--exhaustive")
    over = _agree(machine, whole, cache, exhaustive, document)
    counts = document["counts"]
    beside = "the exhaustive best" if over is None else f"{over} beside the exhaustive best"
    tells = over is None or over.tells
    return Figure(
        "tuning one operator and shape from nothing",
        "≤ 20 s to within 2% of the exhaustive best",
        f"{seconds:.1f} s, {counts['measured']} of {counts['space']} configs: {beside}",
        seconds <= 20 and (over is None or over.ratio <= 1.02) if tells else None,
        {
            "seconds": seconds,
            "over_exhaustive": over and vars(over),
            "exhaustive_s": exhaustive["seconds"],
        },
        f"with a budget of {effort.budget:g} s" if tells else TOO_NOISY,
    )


def _agree(machine: Machine, a: Path, b: Path, first: dict, second: dict) -> Comparison | None:
    """None where two tunings gave the same plan, else the time of b's over that of a's."""
    if first["plan"] == second["plan"]:
        return None
    return compared(ratios(machine, a, b), "compared", "tuned")


def replays(machine: Machine, effort: Effort) -> list[Figure]:
    """Tunings of recorded spaces, which need no device; all recordings together."""
    files = sorted((ROOT / "autotune/recordings").glob("*.jsonl.gz"))
    document = machine.ask("wyvern", "tune", "--replay", *files, "--seeds", effort.seeds, "--json")
    tunings = [replay["tuning"] for replay in document["replays"]]
    mean = statistics.mean(one["regret"]["mean"] for one in tunings)
    worst = max(one["regret"]["p95"] for one in tunings)
    near = statistics.mean(one["within_1_percent"] for one in tunings)
    least = min(one["within_1_percent"] for one in tunings)
    where = f"{len(tunings)} recorded spaces, {document['seeds']} seeds each"
    values = {replay["file"].rsplit("/")[-1]: replay["tuning"] for replay in document["replays"]}
    return [
        Figure("regret against the exhaustive best", "mean ≤ 1%, 95th percentile ≤ 3%",
               f"mean {100 * mean:.2f}%, the worst space's 95th percentile {100 * worst:.2f}%",
               mean <= 0.01 and worst <= 0.03, values, where),
        Figure("same winner, or one within 1%, in two fresh tunings: replay", "≥ 98%",
               f"{100 * near:.1f}%, the worst space {100 * least:.0f}%", near >= 0.98, {}, where),
    ]  # fmt: skip


def writers(machine: Machine, effort: Effort) -> list[Figure]:
    """A row that the cache refuses, and says so, is lost too: who asked may not ask again."""
    cache = machine.folder()
    calls = [("write", cache, n * ROWS_EACH, ROWS_EACH) for n in range(WRITERS)]
    refused = sum(one["refused"] for one in machine.ask_at_once("overhead_worker", calls))
    kept = machine.ask("overhead_worker", "count", cache, 0, WRITERS * ROWS_EACH)
    lost = kept["rows"] - kept["found"]
    told = f", {refused} of them refused" if refused else ""
    return [
        Figure(
            "processes writing one cache at once, rows lost",
            "64 processes, 0 lost",
            f"{WRITERS} processes, {lost} of {kept['rows']} rows lost{told}",
            lost == 0,
            kept | {"refused": refused},
        )
    ]


def compiles(machine: Machine, effort: Effort) -> list[Figure]:
    cache = machine.folder()
    call = ("first-call", machine.device, "forward", cache)
    calls = machine.ask_at_once("overhead_worker", [call] * COLD_PROCESSES)
    compiled, kernels = sum(one["compiled"] for one in calls), calls[0]["kernels"]
    return [Figure(
        "16 cold processes asking for one kernel", "1 compile",
        f"{compiled} compiles of the {kernels} kernels that each of {len(calls)} asked for",
        compiled == kernels, {"compiled": [one["compiled"] for one in calls], "kernels": kernels},
    )]  # fmt: skip


FIGURES: dict[str, Callable[[Machine, Effort], list[Figure]]] = {
    "first-call": first_call,
    "host-time": host_time_cpp,
    "host-time-python": host_time_python,
    "look-up": look_up,
    "tuning": tuning,
    "replay": replays,
    "writers": writers,
    "compiles": compiles,
}
