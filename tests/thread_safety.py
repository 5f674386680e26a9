#!/usr/bin/env python3
"""Fails where a member is touched without the mutex that its declaration names (runtime/base/mutex.hpp).

usage: thread_safety.py ROOT CLANG

Clang reads every source of cache/, runtime/ and autotune/ that locks.
Skipped (77) where there is no Clang.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOMS = ("cache", "runtime", "autotune")
INCLUDE_ROOTS = (".", "runtime/base/include", "templates/include", "runtime/include")
WRAPPER = "runtime/base/mutex.hpp"
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
UNCHECKED = re.compile(r"\bstd::(\w*mutex|condition_variable\w*|call_once)\b")
SKIPPED = 77

CLASS = """#include "runtime/base/mutex.hpp"
class Counter {
 public:
  void add() { %s++count_; }
 private:
  wyvern::Mutex mutex_;
  int count_ WYVERN_GUARDED_BY(mutex_) = 0;
};
"""


def complaint(clang, root, source):
    """What Clang says against a source; empty when it says nothing."""
    command = [clang, "-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety",
               *(f"-I{root / folder}" for folder in INCLUDE_ROOTS),
               str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def check_itself(clang, root):
    """A member touched with its lock must pass, one without it must not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "counter.cpp"
        source.write_text(CLASS % "const wyvern::Lock lock(mutex_); ")
        if text := complaint(clang, root, source):
            sys.exit(f"the check itself is broken: it refuses what is sound\n{text}")
        source.write_text(CLASS % "")
        if "requires holding mutex 'mutex_'" not in complaint(clang, root, source):
            sys.exit("the check itself is broken: it passes a member that is touched without its lock")


def files(root, suffix):
    return [path for room in ROOMS for path in sorted((root / room).rglob(f"*{suffix}"))
            if not path.name.endswith("_test.cpp") and path != root / WRAPPER]


def unchecked(root):
    """Mutexes that no check can see."""
    return [f"{path.relative_to(root)} has {match.group(0)}; use what {WRAPPER} has"
            for path in files(root, "pp") for match in UNCHECKED.finditer(path.read_text())]


def sources(root):
    """The sources that include the wrapper, themselves or in the header of their name: guarded members
    are private, so no other source can touch them."""
    def locks(path):
        return path.is_file() and WRAPPER in INCLUDE.findall(path.read_text())
    return [path for path in files(root, ".cpp") if locks(path) or locks(path.with_suffix(".hpp"))]


def complaints(clang, root, paths):
    """Of the sources: read together, as most of the time goes into headers, and one by one where Clang
    then says anything."""
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "together.cpp"
        together.write_text("".join(f'#include "{path}"\n' for path in paths))
        if not complaint(clang, root, together):
            return []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(filter(None, pool.map(lambda path: complaint(clang, root, path), paths)))


def main():
    root, clang = Path(sys.argv[1]).resolve(), shutil.which(sys.argv[2])
    if clang is None:
        print(f"there is no {sys.argv[2]}")
        sys.exit(SKIPPED)
    check_itself(clang, root)
    found = unchecked(root)
    found += complaints(clang, root, sources(root))
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
