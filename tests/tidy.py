#!/usr/bin/env python3
"""Fails on what clang-tidy 19 finds by .clang-tidy in the host sources of a build.

usage: tidy.py ROOT BUILD [--full] [PATH...]

Most of clang-tidy's time goes into headers, so sources that are compiled with the same macros and
folders are read together, as one translation unit, a name in it standing for one thing: where two
declare the same name for themselves, the later one's gets a number. Left out are
tests and what takes longest: the static analyzer (clang-analyzer-*), copies of parameters (half of
all other checks' time) and mistakes in macros, strings' comparisons and the like, which the
compiler's warnings mostly find too.
--full reads every source, tests too, on its own, by all checks. PATH (a source or a folder) narrows
the search. Exit status 77, with the
reason, where there is no clang-tidy 19.
"""

import argparse
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = "clang-tidy-19"
ROOMS = ("templates", "compiler", "cache", "runtime", "autotune", "tools", "tests")
LARGEST_GROUP = 24
# Left out without --full.
SLOW = ("clang-analyzer-*", "performance-unnecessary-value-param", "bugprone-assert-side-effect",
        "bugprone-chained-comparison", "bugprone-dangling-handle", "bugprone-inc-dec-in-conditions",
        "bugprone-infinite-loop", "bugprone-misplaced-widening-cast",
        "bugprone-multiple-new-in-one-expression", "bugprone-multiple-statement-macro",
        "bugprone-not-null-terminated-result", "bugprone-sizeof-container",
        "bugprone-suspicious-include", "bugprone-suspicious-semicolon",
        "bugprone-suspicious-string-compare", "bugprone-swapped-arguments",
        "bugprone-undelegated-constructor", "bugprone-unused-raii")
# What a declaration at the beginning of a line declares: sources are formatted, so nothing that
# stands in no function or class is indented.
NAME = re.compile(
    r"^(?!TEST|INSTANTIATE|WYVERN|static_assert|namespace|using namespace|using \w+::)(?=[A-Za-z\[])"
    r"(?:\[\[\w+\]\] )?(?:template <.*> )?"
    r"(?:(?:struct|class|enum class|enum|using|union) (\w+)|[^=({;\n]*?\b(\w+)(?:[({;\[]| = ))",
    re.MULTILINE)
FINDING = re.compile(r"^(/[^:]+):\d+:\d+: (?:warning|error): ", re.MULTILINE)


def flags_of(entry):
    """The macros and folders of a compilation, the rest being of no concern here."""
    words = shlex.split(entry["command"])
    flags = []
    for i, word in enumerate(words):
        if word == "-isystem":
            flags += [word, words[i + 1]]
        elif word.startswith(("-I", "-D")):
            flags.append(word)
    return (*flags, "-std=c11" if entry["file"].endswith(".c") else "-std=c++20")


def files_of(entry):
    """The source of a compilation, or those that CMake has put into one (UNITY_BUILD)."""
    file = Path(entry["file"])
    if "Unity" not in file.parts:
        return [file]
    return [Path(name) for name in re.findall(r'^#include "(.+)"$', file.read_text(), re.MULTILINE)]


def is_test(file):
    return file.parts[0] == "tests" or file.stem.endswith("_test")


def sources_of(root, build, paths, with_tests):
    """The host sources of the repository, by what they are compiled with."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        for file in files_of(entry):
            if not file.is_relative_to(root) or file.relative_to(root).parts[0] not in ROOMS:
                continue
            if not with_tests and is_test(file.relative_to(root)):
                continue
            if not paths or any(file.is_relative_to(path) for path in paths):
                found.setdefault(file, flags_of(entry))
    return found


def names_of(text):
    """The names that a text declares, each with the namespace that its file opens."""
    space = re.search(r"^namespace ([\w:]+)", text, re.MULTILINE)
    return {(space and space[1], one or other) for one, other in NAME.findall(text)}


def private_names(text):
    """The names that a source declares in unnamed namespaces, and main."""
    parts = re.findall(r"^namespace \{$(.*?)^}  // namespace$", text, re.MULTILINE | re.DOTALL)
    opened = re.search(r"^namespace [\w:]+", text, re.MULTILINE)
    names = names_of("\n".join([opened[0] if opened else "", *parts]))
    return names | {(None, "main")} if re.search(r"^int main\(", text, re.MULTILINE) else names


def fixed_names(text, names):
    """Those of the names that also stand for something else in the text: a member, what std:: has."""
    return {(space, name) for space, name in names
            if name == "main" or re.search(rf"(?:\.|->|::){name}\b", text)}


def group(sources, root):
    """Sources that can be read together: what one declares for itself no other uses where a header
    declares that name too, nor declares where it cannot be renamed."""
    headers = {room: [h.read_text() for h in (root / room).rglob("*.hpp")] for room in ROOMS}
    declared = {room: set().union(*map(names_of, texts)) for room, texts in headers.items()}
    # A type of an inner namespace would hide that of an outer one.
    types = {one for texts in headers.values() for text in texts
             for one, _ in NAME.findall(text) if one}
    groups = []
    for file, flags in sorted(sources.items()):
        room = file.relative_to(root).parts[0]
        text = file.read_text()
        names = private_names(text)
        hiding = {name for _, name in names & declared[room]} | types & {name for _, name in names}
        words = set(re.findall(r"\w+", text))
        fixed = fixed_names(text, names) | {each for each in names if each[1] in hiding}
        alone = "target_clones" in text or file.suffix == ".c"
        for other in groups:
            if (not alone and not other["alone"] and other["flags"] == flags
                    and other["room"] == room and len(other["files"]) < LARGEST_GROUP
                    and not other["names"] & fixed and not other["fixed"] & names
                    and not other["hiding"] & words
                    and not hiding & other["words"]):
                other["files"].append(file)
                other["names"] |= names
                other["fixed"] |= fixed
                other["hiding"] |= hiding
                other["words"] |= words
                break
        else:
            groups.append({"files": [file], "flags": flags, "room": room, "names": names,
                           "fixed": fixed, "hiding": hiding, "words": words, "alone": alone})
    return [(each["files"], each["flags"]) for each in groups]


def together(files):
    """A translation unit of the files: first what they include, which no renaming may touch."""
    texts = [file.read_text() for file in files]
    lines = list(dict.fromkeys(line for text in texts
                               for line in re.findall(r"^#include (?:<|\".*/).*$", text, re.MULTILINE)))
    seen = set()
    for i, (file, text) in enumerate(zip(files, texts)):
        names = private_names(text)
        again = sorted({name for _, name in names & seen})
        seen |= names
        lines += [f"#define {name} {name}{i}" for name in again]
        lines.append(f'#include "{file}"')
        lines += [f"#undef {name}" for name in again]
    return "\n".join(lines) + "\n"


def read(files, flags, checks, folder):
    """What clang-tidy says of the files as one translation unit; of each half where together they
    are no program."""
    if len(files) == 1:
        unit = files[0]
    else:
        handle, name = tempfile.mkstemp(suffix=".cpp", dir=folder)
        with os.fdopen(handle, "w") as out:
            out.write(together(files))
        unit = Path(name)
    done = subprocess.run([TOOL, "--quiet", *checks, str(unit), "--", *flags],
                          capture_output=True, text=True)
    if len(files) > 1 and "clang-diagnostic-error" in done.stdout:
        half = len(files) // 2
        return (read(files[:half], flags, checks, folder) + read(files[half:], flags, checks, folder))
    if done.returncode != 0 and not FINDING.search(done.stdout):
        return done.stderr
    return done.stdout if FINDING.search(done.stdout) else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=lambda text: Path(text).resolve())
    parser.add_argument("build", type=lambda text: Path(text).resolve())
    parser.add_argument("paths", nargs="*", type=lambda text: Path(text).resolve())
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    if not shutil.which(TOOL):
        print(f"skipped: there is no {TOOL} here (Debian's package {TOOL})")
        sys.exit(77)

    sources = sources_of(options.root, options.build, options.paths, options.full)
    if not sources:
        sys.exit("no source was found")
    config = [f"--config-file={options.root / '.clang-tidy'}"]
    if options.full:
        units = [([file], flags) for file, flags in sorted(sources.items())]
        checks = config
    else:
        units = group(sources, options.root)
        checks = [*config, "--checks=" + ",".join("-" + check for check in SLOW)]
    units.sort(key=lambda unit: -len(unit[0]))
    with (tempfile.TemporaryDirectory() as folder,
          concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool):
        said = list(pool.map(lambda unit: read(*unit, checks, folder), units))
    findings = "".join(said)
    if findings:
        sys.exit(findings)
    print(f"{len(sources)} sources in {len(units)} translation units")


if __name__ == "__main__":
    main()
