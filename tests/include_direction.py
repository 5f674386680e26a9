#!/usr/bin/env python3
"""Fails on an #include that goes up: each room may include only itself and the rooms below it.

usage: include_direction.py ROOT
"""

import re
import sys
import tempfile
from pathlib import Path

# A room and what it may include besides itself. All stand on runtime/base, which stands on nothing.
BASE = "runtime/base"
ALLOWED = {
    BASE: set(),
    "templates": {BASE},
    "compiler": {"templates", BASE},
    "cache": {BASE},
    "runtime": {"compiler", "cache", "templates", BASE},
    "autotune": {"runtime", "compiler", "cache", "templates", BASE},
    "tools": {"autotune", "runtime", "compiler", "cache", "templates", BASE},
    "tests": {"tools", "autotune", "runtime", "compiler", "cache", "templates", BASE},
}
SUFFIXES = {".cpp", ".hpp", ".h", ".c", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def room_of(path):
    """The room of a path from the root; None for one in no room."""
    if path.startswith(BASE + "/"):
        return BASE
    room, slash, _ = path.partition("/")
    return room if slash and room in ALLOWED else None


def public_headers(root):
    """The room that each header of some room's include/ folder belongs to, by the name it goes by."""
    owners = {}
    for room in ALLOWED:
        include = root / room / "include"
        for header in include.rglob("*"):
            if header.is_file():
                owners[header.relative_to(include).as_posix()] = room
    return owners


def owner(name, path, root, owners):
    """The room that an include leads to, or None for one outside the project."""
    if name in owners:
        return owners[name]
    beside = (path.parent / name).resolve()
    if beside.is_file() and beside.is_relative_to(root):
        return room_of(beside.relative_to(root).as_posix())
    return room_of(name)


def violations(root):
    root = root.resolve()
    owners = public_headers(root)
    found = []
    for room, allowed in ALLOWED.items():
        for path in sorted((root / room).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            if room_of(path.relative_to(root).as_posix()) != room:
                continue
            for match in INCLUDE.finditer(path.read_text(errors="replace")):
                target = owner(match.group(2), path, root, owners)
                if target is not None and target != room and target not in allowed:
                    found.append(f"{path.relative_to(root)} includes {match.group(2)} of {target}/")
    return found


def check_itself():
    """The check must catch each way of going up and pass what goes down."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = {
            "templates/include/wyvern/low.hpp": "",
            "runtime/include/wyvern/high.hpp": "#include <wyvern/low.hpp>\n#include <vector>\n",
            "runtime/own.cpp": '#include "runtime/own.hpp"\n#include "cache/cache.hpp"\n',
            "templates/public.cpp": "#include <wyvern/high.hpp>\n",
            "compiler/quoted.cpp": '#  include "runtime/own.hpp"\n',
            "cache/beside.hpp": '#include "../runtime/own.cpp"\n',
            "cache/grounded.cpp": '#include "runtime/base/ground.hpp"\n#include <wyvern/floor.hpp>\n',
            "runtime/base/include/wyvern/floor.hpp": "",
            "runtime/base/ground.hpp": '#include "runtime/base/own.hpp"\n',
            "runtime/base/high.hpp": '#include "runtime/own.hpp"\n',
            "runtime/base/low.cpp": "#include <wyvern/low.hpp>\n",
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        caught = {line.split()[0] for line in violations(root)}
        expected = {"templates/public.cpp", "compiler/quoted.cpp", "cache/beside.hpp",
                    "runtime/base/high.hpp", "runtime/base/low.cpp"}
        if caught != expected:
            sys.exit(f"the check itself is broken: it caught {caught}, not {expected}")


def main():
    check_itself()
    found = violations(Path(sys.argv[1]))
    if found:
        sys.exit("includes that go up:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
