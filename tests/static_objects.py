#!/usr/bin/env python3
"""Fails where a static object of the library has a destructor: exit() would destroy it while other
threads prepare and launch (runtime/README.md).

usage: static_objects.py NM ARCHIVE...

An object file that has one names __cxa_atexit, by which a compiler has destructors called at the end.
"""

import re
import subprocess
import sys

REGISTERS = re.compile(r"^(.*):\s+U (?:__cxa_atexit|atexit)$")
DEFINES = re.compile(r"^.*:[0-9a-f]+ [TW] ")


def main():
    nm, archives = sys.argv[1], sys.argv[2:]
    found = []
    for archive in archives:
        lines = subprocess.run([nm, "-A", archive], capture_output=True, text=True,
                               check=True).stdout.splitlines()
        if not any(DEFINES.match(line) for line in lines):
            sys.exit(f"the check itself is broken: it sees no function in {archive}")
        found += [match.group(1) for line in lines if (match := REGISTERS.match(line))]
    if found:
        sys.exit("\n".join(f"{name} has a static object with a destructor; make it by new and leave "
                           "it, or a ThreadOwned" for name in found))
    if not archives:
        sys.exit("there is nothing to look at")


if __name__ == "__main__":
    main()
