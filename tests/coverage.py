#!/usr/bin/env python3
"""Shows what `tools/test` has tried beside `tools/test --full`, and fails where something is lost.

usage: coverage.py TRIED FULL

Both files are what a run of the suite wrote with WYVERN_TESTS_COVERAGE. The table has a row for each
operator, pass and template: how many options' values were met with it, in both. Lost is an operator
and pass with a template, with an option's value, or a template with an option's value, that only the
full suite has met.
"""

import collections
import sys


def read(path):
    """The values of options met by (operator, pass, template)."""
    met = collections.defaultdict(set)
    with open(path, encoding="utf-8") as file:
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
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    tried, full = read(sys.argv[1]), read(sys.argv[2])
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
