#!/usr/bin/env python3
"""Fails where what goes into a wheel needs a newer C library than glibc 2.28, or another C++ library.

usage: old_systems.py OBJDUMP FILE...

tools/portable/ says how it is linked. A symbol that this names wants a line in its glibc.c.
"""

import re
import subprocess
import sys

NEWEST = (2, 28)
NEEDS = re.compile(r"\*UND\*\s+\w+\s+\(?([\w.]+)\)?\s+(\S+)$", re.MULTILINE)
GLIBC = re.compile(r"GLIBC_(\d+)\.(\d+)")


def main():
    objdump, files = sys.argv[1], sys.argv[2:]
    wrong = []
    for file in files:
        shown = subprocess.run([objdump, "-T", "-p", file], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"^\s+NEEDED\s+(\S+)", shown, re.MULTILINE)
        wrong += [f"{file} needs {name}" for name in needed if "c++" in name]
        versions = NEEDS.findall(shown)
        if "libc.so.6" not in needed or not any(GLIBC.match(version) for version, _ in versions):
            sys.exit(f"the check itself is broken: it sees nothing that {file} needs of the C library")
        for version, name in versions:
            found = GLIBC.match(version)
            if found and tuple(map(int, found.groups())) > NEWEST:
                wrong.append(f"{file} needs {name} of {version}")
    if wrong or not files:
        sys.exit("\n".join(wrong) or "there is nothing to look at")


if __name__ == "__main__":
    main()
