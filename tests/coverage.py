#!/usr/bin/env python3
"""Lists what `tools/test` tries beside `tools/test --full`, and fails where something is lost.

usage: coverage.py BIN, the folder of a build's test programs

The programs that try a part of their points list both (WYVERN_TESTS_COVERAGE) and run nothing. The
table has a row for each operator, pass and template: how many options' values are met with it, in
both. Lost is an operator and pass with a template, with an option's value, or a template with an
option's value, that only the full suite meets.
"""

import collections
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# GPU cases, which are skipped where there is no GPU, try the same in both suites.
PROGRAMS = {
    "stage_test": "Cpu/*:Emulated/*",
    # Without those that compare outputs themselves: nothing runs.
    "emulated_operator_test": "*-*.AloneInABatchAndInPieces/*:*.BeginWhereNoOlderStateIsLeft/*",
    "operator_test": "Cpu/OperatorListed.*:Cpu/OperatorRandom.*:Emulated*",
}


def listed(program, cases, full):
    """The values of options that a program's cases meet, by (operator, pass, template)."""
    met = collections.defaultdict(set)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
        environment = dict(os.environ, WYVERN_TESTS_COVERAGE=file.name)
        environment.pop("WYVERN_TESTS_FULL", None)
        if full:
            environment["WYVERN_TESTS_FULL"] = "1"
        done = subprocess.run([program, f"--gtest_filter={cases}"], env=environment,
                              stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{program} lists nothing:\n{done.stdout[-4000:]}")
        for line in file:
            op, pass_, template, *options = line.rstrip("\n").split("\t")
            met[op, pass_, template].update(options)
    return met


def pairs(met):
    """What must not be lost, by words."""
    found = set()
    for (op, pass_, template), options in met.items():
        found.add(f"{op} {pass_} by {template}")
        for option in options:
            found.add(f"{op} {pass_} with {option}")
            found.add(f"{template} with {option}")
    return found


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    runs = [(Path(sys.argv[1]) / program, cases, full)
            for full in (True, False) for program, cases in PROGRAMS.items()]
    suites = {full: collections.defaultdict(set) for full in (True, False)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (_, _, full), met in zip(runs, pool.map(lambda run: listed(*run), runs)):
            for key, options in met.items():
                suites[full][key] |= options
    tried, full = suites[False], suites[True]
    print(f"{'operator':<20} {'pass':<10} {'template':<36} options' values: tried / in full")
    for key in sorted(full):
        op, pass_, template = key
        print(f"{op:<20} {pass_:<10} {template:<36} {len(tried[key]):>3} / {len(full[key])}")
    lost = sorted(pairs(full) - pairs(tried))
    print(f"{len(pairs(full))} pairs of operator and pass, template, option in full, {len(lost)} lost")
    for one in lost:
        print(f"  lost: {one}")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
