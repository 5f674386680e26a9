"""Measures Wyvern and every peer that is installed, row by row, both sides of a row in one process.

    tools/benchmark/peers [--sets targets,sweep] [--rows REGEX] [--out DIR] [--peers a,b] ...

Writes DIR/rows.jsonl (a line a row, as soon as it is measured; a row that is there is not measured
again), DIR/peers.json (everything) and DIR/peers.md (the tables). README.md beside this says more.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

CAPTURE_FAILED = 75
SURVEY = "survey"  # what a child is asked for that is to look around
SURVEY_LIMIT = 600  # seconds
CAPTURES = 10  # processes that one row may take, one more for each side that cannot be captured


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sets",
        default="targets,sweep",
        help="of targets, sweep, training, more-training, small (default: targets,sweep)",
    )
    parser.add_argument("--training", action="store_true", help="the rows with a backward pass too")
    parser.add_argument("--rows", default="", help="only the rows whose name this regex finds")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--peers", help="only these, such as fla-triton,flash-qla (default: all)")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="FILE.py",
        help="a file with further sides",
    )
    parser.add_argument("--out", default="peer-results", help="the folder of the results")
    parser.add_argument("--json", action="store_true", help="print the document, not the tables")
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument(
        "--runs", type=int, default=50, help="times of each side at least (default 50)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0,
        help="go on measuring a row for so long (default: no longer than --runs takes)",
    )
    parser.add_argument(
        "--limit", type=float, default=600, help="seconds a row may take (default 600)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=0,
        help="seconds after which no further row is begun (default: none)",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        default=0,
        metavar="N",
        help="first let N processes at a time call each kind of row once, so that libraries' caches "
        "of compiled kernels are filled; for at most half the budget",
    )
    parser.add_argument(
        "--tune", type=float, default=0, help="tune each row's problem for so many seconds first"
    )
    parser.add_argument(
        "--rates",
        metavar="BYTES,FLOPS",
        help="a second, of the device: for floors on one that is no H200",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plain", default="{}", help=argparse.SUPPRESS)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.training:
        options.sets += ",training"
    return options


def kinds_of(options: argparse.Namespace) -> list:
    """The classes of the sides that are asked for, ours first."""
    import sides

    peers = [*sides.PEERS, *(one for path in options.adapter for one in sides.from_file(path))]
    wanted = None if options.peers is None else [name for name in options.peers.split(",") if name]
    unknown = sorted(set(wanted or []) - {one.name for one in peers})
    if unknown:
        sys.exit(
            f"peers: there is no {', '.join(unknown)}; there are "
            f"{', '.join(one.name for one in peers)}"
        )
    ours = [sides.Wyvern] + ([sides.WyvernDefault] if options.tune else [])
    return ours + [one for one in peers if wanted is None or one.name in wanted]


def why_absent(side, device: str) -> str | None:
    if device.split(":")[0] not in side.devices:
        return f"it does not run on a {device.upper()}"
    return side.absent()


def rows_of(options: argparse.Namespace) -> list:
    import rows

    names = list(dict.fromkeys(options.sets.split(",")))
    unknown = [name for name in names if name not in rows.SETS]
    if unknown:
        sys.exit(f"peers: there is no set {unknown[0]}; there are {', '.join(rows.SETS)}")
    return [row for row in rows.chosen(names) if re.search(options.rows, row.name)]


def survey(options: argparse.Namespace) -> dict:
    """The machine, and the sides that are here and that are not."""
    import torch

    there, absent = {}, {}
    for side in (kind() for kind in kinds_of(options)):
        if reason := why_absent(side, options.device):
            absent[side.name] = reason
        else:
            there[side.name] = {"about": side.about, "versions": side.versions()}
    return {
        "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "sides": there,
        "absent": absent,
    }


def measured_here(options: argparse.Namespace) -> dict:
    """The document of the row that a child is for. What a row has no use for is not even loaded.
    With --once every side has been called, and nothing was timed."""
    import measure

    row = next(row for row in rows_of(options) if row.name == options.child)
    rates = tuple(map(float, options.rates.split(","))) if options.rates else None
    sides = [kind() for kind in kinds_of(options)]
    sides = [one for one in sides if one.declines(row) or not why_absent(one, options.device)]
    request = measure.Request(row, options.device, options.runs, options.seconds,
                              json.loads(options.plain), 0 if options.once else options.tune,
                              rates)  # fmt: skip
    if options.once:
        return measure.call_once(request, sides)
    with turn(options):
        return measure.measure(request, sides)


@contextlib.contextmanager
def turn(options: argparse.Namespace) -> Iterator[None]:
    """Processes that have loaded their libraries measure one after the other."""
    with open(Path(options.out) / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def child(options: argparse.Namespace) -> None:
    """What a process of its own was asked for, as the last line of stdout. Ends without ending what
    libraries have begun, which some do not survive."""
    import measure

    code = 0
    try:
        document = survey(options) if options.child == SURVEY else measured_here(options)
    except measure.CaptureFailed as failed:
        document, code = {"side": failed.side, "reason": failed.reason}, CAPTURE_FAILED
    print("\n" + json.dumps(document), flush=True)
    os._exit(code)


def run_child(
    options: argparse.Namespace, name: str, plain: dict, limit: float, once: bool = False
) -> tuple[int | None, str, str]:
    """Exit code (None: it ran past the limit), stdout and stderr of a process of its own."""
    command = [sys.executable, str(HERE), *sys.argv[1:], "--device", options.device]
    command += ["--child", name, "--plain", json.dumps(plain), *(["--once"] if once else [])]
    # Beside other processes times say nothing: FLA then keeps no choice of kernels that it timed.
    environment = os.environ | ({"FLA_CACHE_RESULTS": "0"} if once else {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment, start_new_session=True)  # fmt: skip
    try:
        out, err = process.communicate(timeout=max(limit, 0.1))
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # compilers that it started too
        out, err = process.communicate()
        return None, out, err


def answer(out: str) -> dict:
    return json.loads(out.strip().splitlines()[-1])


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def measured(options: argparse.Namespace, row) -> dict:
    """The row's document, by as many processes as it takes; with "error" where it is lost."""
    start, plain = time.monotonic(), {}
    # Beside its own time that of the row before, for whose end it may wait.
    limit = options.limit * ahead(options)
    for _ in range(CAPTURES):
        left = limit - (time.monotonic() - start)
        code, out, err = run_child(options, row.name, plain, left)
        if code == CAPTURE_FAILED:
            failed = answer(out)
            plain[failed["side"]] = failed["reason"]
            continue
        if code == 0:
            return answer(out) | {"seconds": time.monotonic() - start}
        why = f"it took longer than {options.limit:g} s" if code is None else f"exit code {code}"
        break
    else:
        why, err = "too many sides could not be captured", ""
    return row.describe() | {
        "error": f"{why}: {last_line(err)}",
        "seconds": time.monotonic() - start,
    }


def known_rows(path: Path) -> dict[str, dict]:
    """The rows of an earlier run; of a row that is there twice the later one, and no cut line."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["row"]] = row
    return found


def look_around(options: argparse.Namespace) -> dict:
    """What survey() says, from a process of its own."""
    code, out, err = run_child(options, SURVEY, {}, SURVEY_LIMIT)
    if code != 0:
        sys.exit(f"peers: a library does not load (leave it out by --peers): {last_line(err)}")
    environment = answer(out)
    if reason := environment["absent"].get("wyvern"):
        sys.exit(f"peers: {reason} (PYTHONPATH=build/python has the package of a build)")
    for name, reason in environment["absent"].items():
        print(f"{name}: absent ({reason})", file=sys.stderr, flush=True)
    return environment


def append(path: Path, line: str) -> None:
    """A line at the end, on its own even where the last one was cut."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + line + "\n")


def is_known(known: dict[str, dict], row) -> bool:
    return row.name in known and "error" not in known[row.name]


def warm_up(options: argparse.Namespace, missing: list, start: float) -> None:
    """Has one of each kind of row called once, several at a time; says what did not get through."""
    kinds = list({row.kernels: row for row in reversed(missing)}.values())[::-1]

    def call(row) -> None:
        spent = time.monotonic() - start
        if options.budget and spent > options.budget / 2:
            return
        left = options.budget / 2 - spent if options.budget else options.limit
        code, _, err = run_child(options, row.name, {}, min(left, options.limit), once=True)
        why = "stopped" if code is None else last_line(err)
        taken = f"{time.monotonic() - start - spent:.0f} s"
        print(f"warm-up, {row.name}: {taken}{f', {why}' if code != 0 else ''}",
              file=sys.stderr, flush=True)  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(options.warm_up) as pool:
        list(pool.map(call, kinds))


def ahead(options: argparse.Namespace) -> int:
    """How many rows' processes there are at a time: on a GPU the next row's loads its libraries,
    which takes longer than measuring, while one measures."""
    return 1 if options.device == "cpu" else 2


def measure_missing(options: argparse.Namespace, chosen: list, path: Path) -> dict[str, dict]:
    """All rows that are known in the end; each new one is a line of the file at once."""
    known = known_rows(path)
    start = time.monotonic()
    if options.warm_up:
        warm_up(options, [row for row in chosen if not is_known(known, row)], start)

    def one(at: int, row) -> bool:
        if options.budget and time.monotonic() - start > options.budget:
            return False
        result = measured(options, row)
        said = result.get("error") or ", ".join(
            f"{name} {side['ms']:.4g} ms" for name, side in result["sides"].items()
        )
        with lock:
            known[row.name] = result
            append(path, json.dumps(result))
        print(f"[{at}/{len(chosen)}] {row.name}: {said}", file=sys.stderr, flush=True)
        return True

    lock = threading.Lock()
    missing = [(at, row) for at, row in enumerate(chosen, 1) if not is_known(known, row)]
    with concurrent.futures.ThreadPoolExecutor(ahead(options)) as pool:
        begun = [done.result() for done in [pool.submit(one, *each) for each in missing]]
    if not all(begun):
        print("the budget is spent; the same command goes on", file=sys.stderr)
    return known


def main() -> None:
    options = parse()
    chosen = rows_of(options)
    kinds_of(options)
    if options.list:
        print("\n".join(row.name for row in chosen))
        return
    if options.device is None:
        import torch

        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda":
        options.device = "cuda:0"  # PyTorch selects devices by number
    if options.child:
        child(options)
    environment = look_around(options) | {"warm_up": options.warm_up}
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    known = measure_missing(options, chosen, folder / "rows.jsonl")
    rows = [known[row.name] for row in chosen if row.name in known]
    import table

    document = {"environment": environment, "summary": table.summary(rows), "rows": rows}
    (folder / "peers.json").write_text(json.dumps(document, indent=1) + "\n")
    text = table.render(document)
    (folder / "peers.md").write_text(text)
    print(json.dumps(document) if options.json else text)
    sys.exit(0 if all("error" not in row for row in rows) else 1)


if __name__ == "__main__":
    main()
