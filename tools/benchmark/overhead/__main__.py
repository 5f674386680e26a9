"""Measures everything around the kernels: first calls, host times, look-ups, tuning, the cache.

    tools/benchmark/overhead [--device cpu] [--only first-call,look-up] [--out DIR] ...

Prints a table of figure, target, what was measured, and whether that meets the target; writes it
and every sample to DIR/overhead.md and DIR/overhead.json. README.md of the folder above says more.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from figures import FIGURES, Effort, Figure  # noqa: E402
from machine import ROOT, Machine  # noqa: E402

TORCH = "import torch; raise SystemExit(not hasattr(torch.ops, 'aten'))"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="the build (build/)")
    parser.add_argument("--device", help="cpu or cuda:N (default: the first GPU, else the CPU)")
    parser.add_argument("--only", help=f"of {','.join(FIGURES)} (default: all)")
    parser.add_argument("--python", help="one that has PyTorch (default: this, build/pyenv's)")
    parser.add_argument("--processes", type=int, default=5, help="of each first call (default 5)")
    parser.add_argument("--budget", type=float, default=20, help="seconds of a tuning (default 20)")
    parser.add_argument("--pairs", type=int, default=1, help="of fresh tunings (default 1)")
    parser.add_argument("--seeds", type=int, default=20, help="of each replay (default 20)")
    parser.add_argument("--out", type=Path, help="a folder for overhead.json and overhead.md")
    parser.add_argument("--json", action="store_true", help="print the document, not the table")
    return parser.parse_args()


def python_of(options: argparse.Namespace) -> str:
    """The first Python that imports PyTorch; this one where none does."""
    given = [options.python] if options.python else []
    tried = [*given, sys.executable, str(options.build / "pyenv/bin/python")]
    for python in tried:
        try:
            done = subprocess.run([python, "-c", TORCH], capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return tried[0]


def device_of(options: argparse.Namespace) -> tuple[str, str]:
    """Its name and model."""
    machine = Machine(options.build, "cpu", "")
    devices = [one for one in machine.ask("wyvern", "devices", "--json")["devices"]
               if one["usable"]]  # fmt: skip
    if options.device is None:
        gpus = [one for one in devices if one["name"] != "cpu"]
        chosen = (gpus or devices)[0]
    else:
        named = [one for one in devices if one["name"] == options.device]
        if not named:
            sys.exit(f"overhead: there is no device {options.device}; there are "
                     f"{', '.join(one['name'] for one in devices)}")  # fmt: skip
        chosen = named[0]
    return chosen["name"], chosen["model"]


def measure(machine: Machine, effort: Effort, names: list[str]) -> tuple[list[Figure], dict]:
    """The figures, and by name why others could not be measured."""
    figures, failed = [], {}
    for name in names:
        try:
            found = FIGURES[name](machine, effort)
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: {failed[name]}", file=sys.stderr, flush=True)
            continue
        figures += found
        for one in found:
            print(f"{one.name}: {one.measured}", file=sys.stderr, flush=True)
    return figures, failed


def render(document: dict) -> str:
    here = document["environment"]
    lines = [f"{here['date']}, {here['model']} ({here['device']}), {here['cores']} cores.", ""]
    if here["load"] > here["cores"] / 2:
        lines += [f"The machine was busy (load {here['load']:.1f}): times say little.", ""]
    lines += ["| figure | target | measured | met |", "| --- | --- | --- | --- |"]
    for one in document["figures"]:
        met = {True: "yes", False: "no", None: "–"}[one["met"]]
        note = f" ({one['note']})" if one["note"] else ""
        lines.append(f"| {one['name']} | {one['target']} | {one['measured']}{note} | {met} |")
    lines += [
        f"| {name} | | not measured: {why} | no |" for name, why in document["failed"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = parse()
    names = options.only.split(",") if options.only else list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        sys.exit(f"overhead: there is no {unknown[0]}; there are {', '.join(FIGURES)}")
    device, model = device_of(options)
    effort = Effort(options.processes, options.budget, options.pairs, options.seeds)
    python = python_of(options) if "host-time-python" in names else ""
    machine = Machine(options.build, device, python)
    load = os.getloadavg()[0]
    figures, failed = measure(machine, effort, names)
    document = {
        "environment": {
            "date": str(datetime.datetime.now(datetime.timezone.utc).date()),
            "device": device,
            "model": model,
            "cores": len(os.sched_getaffinity(0)),
            "load": load,
            "system": platform.platform(),
        },
        "figures": [dataclasses.asdict(one) for one in figures],
        "failed": failed,
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "overhead.json").write_text(json.dumps(document, indent=1) + "\n")
        (options.out / "overhead.md").write_text(render(document))
    print(json.dumps(document) if options.json else render(document), end="")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
