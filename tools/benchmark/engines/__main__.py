"""Runs an installed vLLM or SGLang with and without Wyvern on small models of random weights.

    tools/benchmark/engines [--engine vllm] [--sets options] [--rows REGEX] [--out DIR] ...

Rows are MODEL/OPTION: a base row a model, and rows with one option that differs. Writes DIR/runs.jsonl (a
line a run, as soon as it ends; a run that is there is not made again) and DIR/engines.md (the tables), and
DIR/logs/. README.md of the folder above says more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import engine_table  # noqa: E402
import local_models  # noqa: E402
from engine_rows import SETS, WYVERN, Row, rows  # noqa: E402
from measures import Turns  # noqa: E402
from run import adapter  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engines", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm", metavar="NAME",
                        help="vllm, sglang, or a file as engine_vllm.py (default: vllm)")  # fmt: skip
    parser.add_argument("--sets", default="options", help=f"of {', '.join(SETS)} (default: options)")
    parser.add_argument("--rows", default="", help="only the rows whose name this regex finds")
    parser.add_argument("--list", action="store_true", help="print the rows' names and settings")
    parser.add_argument(
        "--measure",
        help="only these, of logprobs, speed, invariance (default: all of a row), and profile",
    )
    parser.add_argument("--side", help="only this one, of engine, wyvern (default: both)")
    parser.add_argument("--out", type=Path, default=Path("engine-results"),
                        help="the folder of the results (default: engine-results)")  # fmt: skip
    parser.add_argument("--limit", type=float, default=600, help="seconds a run may take (default 600)")
    parser.add_argument("--budget", type=float, default=0,
                        help="seconds after which no further run is begun (default: none)")  # fmt: skip
    parser.add_argument("--parallel", type=int, default=1, metavar="N",
                        help="runs at a time, with --in-turn rows; times of more than one say little "
                             "without it (default 1)")  # fmt: skip
    parser.add_argument("--in-turn", action="store_true",
                        help="both sides of --parallel rows side by side, each throughput measured in turn")  # fmt: skip
    parser.add_argument("--code", metavar="FOLDER", help="of compiled kernels, for the rows cold-code")
    parser.add_argument("--again", action="store_true", help="make runs again that were lost")
    return parser.parse_args()


class Results:
    """DIR/runs.jsonl: of a run that is there twice the later one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "runs.jsonl"
        self._lock = threading.Lock()
        self.runs: engine_table.Runs = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else []:
            try:
                run = json.loads(line)
                self.runs[run["row"], run["side"]] = run
            except (ValueError, KeyError):
                continue  # a line that was cut off

    def add(self, run: dict[str, Any]) -> None:
        with self._lock:
            self.runs[run["row"], run["side"]] = run
            with self._file.open("a") as file:
                file.write(json.dumps(run) + "\n")


def environment_of(options: argparse.Namespace, row: Row, side: str, caches: str) -> dict[str, str]:
    engine = adapter(options.engine)
    found = {**os.environ, **engine.environment(row.settings, side == WYVERN)}
    if row.settings.cold:
        found |= engine.caches(caches)
    found.pop("WYVERN_CODE", None)
    if row.settings.code:
        found["WYVERN_CODE"] = options.code
    return found


def run_row(options: argparse.Namespace, row: Row, side: str, turns: list[object]) -> dict[str, Any]:
    """The run's document, with "error" where it is lost. turns: what measures.Turns takes."""
    start = time.monotonic()
    described = {**row.describe(), "side": side, "engine": options.engine}
    if row.settings.code and not options.code:
        return {**described, "error": "it needs --code FOLDER"}
    named = options.measure.split(",") if options.measure else list(row.measures)
    measured = [name for name in (*row.measures, "profile") if name in named]
    log = options.out / "logs" / f"{row.name.replace('/', '-')}-{side}.log"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        document = Path(folder) / "document.json"
        request = {
            "engine": options.engine, "model": str(local_models.write(options.out / "models", row.model)),
            "settings": described["settings"], "side": side, "measures": measured,
            "document": str(document), "turns": turns,
        }  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "run.py"), json.dumps(request)], stdout=output,
                stderr=subprocess.STDOUT, env=environment_of(options, row, side, folder),
                start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(timeout=options.limit)
            except subprocess.TimeoutExpired:
                code = None
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it started, workers among it
            except ProcessLookupError:
                pass
            process.wait()
        described["seconds"] = time.monotonic() - start
        if code == 0 and document.exists():
            found = json.loads(document.read_text())
            if profile := found.pop("profile", None):
                log.with_suffix(".profile").write_text(profile)
            return {**described, **found}
    why = f"it took longer than {options.limit:g} s" if code is None else f"exit code {code}"
    return {**described, "error": f"{why}: {last_error(log.read_text(errors='replace'))} ({log})"}


def last_error(text: str) -> str:
    """The last line that names an error, and no other as its root cause; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    names = r"(\(.*\) )?(ERROR .*|\[rank\d+\]: )?[\w.]*(Error|Exception)\b"  # by vLLM, by PyTorch
    errors = [line for line in lines if re.match(names, line)]
    causes = [line for line in errors if "root cause" not in line]
    return ((causes or errors or lines)[-1] if lines else "it said nothing")[:400]


def make_in_turn(
    tasks: list[tuple[Row, str]], make: Callable[[tuple[Row, str], list[object]], None]
) -> None:
    """Runs side by side. One that is lost keeps no other from its turns."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:

        def make_one(own: int) -> None:
            try:
                make(tasks[own], [folder, own, len(tasks)])
            finally:
                Turns.ended(folder, own)

        with ThreadPoolExecutor(max(len(tasks), 1)) as pool:
            list(pool.map(make_one, range(len(tasks))))


def main() -> None:
    options = parse()
    options.out = options.out.resolve()
    if unknown := [name for name in options.sets.split(",") if name not in SETS]:
        sys.exit(f"engines: there is no set {unknown[0]}; there are {', '.join(SETS)}")
    chosen = [
        row for row in rows(options.sets.split(","), options.engine) if re.search(options.rows, row.name)
    ]
    if options.list:
        for row in chosen:
            print(row.name, json.dumps(row.describe()["settings"]))
        return
    results, begun = Results(options.out), time.monotonic()

    def make(task: tuple[Row, str], turns: list[object]) -> None:
        row, side = task
        if options.budget and time.monotonic() - begun > options.budget:
            print(f"{row.name}, {side}: not begun, the budget is spent", file=sys.stderr, flush=True)
            return
        run = run_row(options, row, side, turns)
        results.add(run)
        told = run.get("error") or f"started in {run['start_s']:.1f} s"
        print(f"{row.name}, {side}: {told} [{run.get('seconds', 0):.0f} s]", file=sys.stderr, flush=True)

    def is_known(row: Row, side: str) -> bool:
        run = results.runs.get((row.name, side))
        return run is not None and not (options.again and "error" in run)

    tasks = [(row, side) for row in chosen for side in row.sides
             if options.side in (None, side) and not is_known(row, side)]  # fmt: skip
    if options.in_turn:
        for i in range(0, len(chosen), options.parallel):
            make_in_turn([task for task in tasks if task[0] in chosen[i : i + options.parallel]], make)
    else:
        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(lambda task: make(task, []), tasks))
    page = engine_table.tables(chosen, results.runs, Path(options.engine).stem)
    (options.out / "engines.md").write_text(page + "\n")
    print(page)
    lost = any("error" in results.runs.get((row.name, side), {}) for row in chosen for side in row.sides)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
