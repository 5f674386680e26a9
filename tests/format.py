#!/usr/bin/env python3
"""Fails on a tracked C++ or CUDA source that is not as clang-format 19 writes it by .clang-format.

usage: format.py ROOT

The fix: clang-format-19 -i FILE. Exit status 77, with the reason, where there is no clang-format
19 or ROOT is no clone.
"""

import os
import shutil
import subprocess
import sys

TOOL = "clang-format-19"
SUFFIXES = [f"*.{suffix}" for suffix in ("cpp", "hpp", "h", "c", "cu", "cuh")]


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def main():
    root = sys.argv[1]
    if not shutil.which(TOOL):
        skip(f"there is no {TOOL} here (Debian's package {TOOL})")
    if not shutil.which("git"):
        skip("there is no git here")
    listed = subprocess.run(["git", "-c", f"safe.directory={os.path.abspath(root)}",
                             "-C", root, "ls-files", "-z", "--", *SUFFIXES],
                            capture_output=True, text=True)
    files = [name for name in listed.stdout.split("\0")
             if name and os.path.isfile(os.path.join(root, name))]
    if listed.returncode != 0:
        skip(f"{root} is no clone: {listed.stderr.strip()}")
    if not files:
        sys.exit("no source was found")
    sys.exit(subprocess.run([TOOL, "--dry-run", "--Werror", *files], cwd=root).returncode)


if __name__ == "__main__":
    main()
