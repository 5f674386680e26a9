#!/usr/bin/env python3
"""Attacks the wyvern command and its cache, judges every outcome and counts.

usage: attack.py [--full] [--only FAMILY...] [--write]

Prints a table: fault, how often, what happened. Exits with 1 if anything but what is promised
happened, and with 77 for a build with sanitizers, whose memory is not the C library's. The counts are
small unless told otherwise, larger where $WYVERN_TESTS_FULL is set; those of --full take hours of a core.
--write puts the table into RELIABILITY.md.
"""

import argparse
import datetime
import os
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "faults"))

import calls
import files
import processes
from target import Target, scratch_folder

FAMILIES = {"calls": calls.attack, "files": files.attack, "processes": processes.attack,
            "programs": processes.programs}
# Times each fault is tried: in the short test suite, in the whole one, and with --full.
COUNTS = {"calls": (1, 6, 120), "bits": (8, 40, 2000), "cuts": (3, 10, 200), "winners": (8, 40, 600),
          "inputs": (12, 60, 3400), "kills": (3, 12, 220), "peers": (1, 1, 3), "runs": (2, 8, 80),
          "lines": (12, 60, 1600)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=HERE.parent / "build")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--full", action="store_true", help="the counts of RELIABILITY.md")
    parser.add_argument("--write", action="store_true", help="write RELIABILITY.md")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbs", nargs="+", help="of the family calls: only these verbs")
    for name, (few, _, many) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {few}, with --full {many}")
    options = parser.parse_args()
    options.build = options.build.resolve()
    options.shim = options.build / "lib" / "libwyvern_fault_shim.so"
    level = 2 if options.full else 1 if "WYVERN_TESTS_FULL" in os.environ else 0
    for name, counts in COUNTS.items():
        if getattr(options, name) is None:
            setattr(options, name, counts[level])
    return options


def happened(tally):
    return ", ".join(f"{n} {what}" for what, n in tally.outcomes.most_common())


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def page(tallies, seconds):
    rows = [f"| {t.fault} | {t.promise} | {t.times} | {happened(t)} | {len(t.failures)} |"
            for t in tallies]
    failures = [f"* {t.fault}: {failure}" for t in tallies for failure in t.failures]
    return f"""# What is promised when things go wrong, and how it was tried

Written by `{' '.join(["tests/attack.py", *sys.argv[1:]])}`, which repeats all of it; with --full it tries
each fault more often. A run is one of delta_rule's forward
pass on the CPU (B=1, T=17, H=1, K=16, fp32); right output means: the same bytes as without the fault, which
agree with an oracle that shares no code with the kernels. After each fault the cache is checked (every row
that was there is there as it was) and another run, without a fault, must give the right output. Calls fail
from main() on, once or for good; what a verb calls thousands of times fails at points spread over them. One
sentence means exit code 2 or 3 and one line on stderr.

{datetime.date.today()}, {processor()}, {len(os.sched_getaffinity(0))} cores, {platform.system()}
{platform.release()}; {sum(t.times for t in tallies)} faults in {seconds / 60:.0f} minutes.

| fault | promise | times | what happened | failures |
| --- | --- | --- | --- | --- |
""" + "\n".join(rows) + "\n" + ("\n## Failures\n\n" + "\n".join(failures) + "\n" if failures else "")


def main():
    options = arguments()
    command = options.build / "bin" / "wyvern"
    if b"__asan_init" in command.read_bytes() or b"__tsan_init" in command.read_bytes():
        return 77
    tallies = []
    begin = time.monotonic()
    with scratch_folder() as scratch:
        target = Target(command, scratch)
        for family in options.only:
            family_begin = time.monotonic()
            for tally in FAMILIES[family](target, options):
                tallies.append(tally)
                print(f"{tally.fault:38} {tally.times:6}  {happened(tally)}", flush=True)
            print(f"  ({family}: {time.monotonic() - family_begin:.0f} s)", flush=True)
    if options.write:
        (HERE / "RELIABILITY.md").write_text(page(tallies, time.monotonic() - begin))
    return 1 if any(tally.failures for tally in tallies) else 0


if __name__ == "__main__":
    sys.exit(main())
