#!/usr/bin/env python3
"""Fails where a page says what is not so of the sources: a test, script or file that is not there, a
link that leads nowhere, presets that the specification lacks, a version that the change log lacks;
where a page's line is longer than 120 characters; where a page or source has a BANNED phrase.

usage: pages.py ROOT

Exit status 77, with the reason, where ROOT is no clone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NAMED = re.compile(r"\btests? ((?:`[^`]+`(?:, | and )?)+)")  # "the test `format`", "tests `a` and `b`"
PROGRAM = re.compile(r"`([\w/]+_test(?:\.\w+)?)`")
SCRIPT = re.compile(r"`(tests/[\w/]+(?:\.\w+|/))[ `]")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
COLUMNS = 120
BANNED = re.compile(r"\b(?:men[d](?:s|ed|ing)?|way\s+round|let\s+by|to\s+be\s+had|lies?\s+apart)\b",
                    re.IGNORECASE)
# A line's end within a sentence, in comments and strings too.
NEW_LINE = re.compile(r'"?[ \t]*\n[ \t]*(?://+|#+|\*(?!/)|f?"(?!""))?[ \t]*')
SPOKEN = (".md", ".cpp", ".hpp", ".h", ".c", ".cu", ".cuh", ".py", ".cmake", "CMakeLists.txt", ".sh", ".json",
          ".js", ".html", ".yml", ".toml")
PLACEHOLDER = re.compile(r"\\\$\\\{\w+\\\}")  # ${...} behind re.escape


def declared(texts):
    """Patterns of the names that CMake's files give to tests and programs."""
    words = {word for text in texts for word in re.findall(r"[\w$\{\}]+", text)}
    return [re.compile(PLACEHOLDER.sub(r"\\w+", re.escape(word))) for word in words
            if word.strip("${}_") and not re.fullmatch(r"\$\{\w+\}", word)]


def is_test(name, tests):
    if "*" in name:
        prefix = name.split("*")[0]
        return any(pattern.pattern.startswith(re.escape(prefix)) for pattern in tests)
    return any(pattern.fullmatch(name) for pattern in tests)


def is_file(name, page, files):
    """A tracked file or folder of that name: from the root, from the page's folder, or below it."""
    name = name.rstrip("/")
    from_page = os.path.normpath(page.parent / name).replace(os.sep, "/")
    below = f"/{name}"
    return any(file in (name, from_page) or file.startswith((f"{name}/", f"{from_page}/")) or
               file.endswith(below) for file in files)


def prose(text):
    """A page's lines outside of code blocks and tables, and their numbers from 1."""
    fenced = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("    ", "|")):
            yield number, line


def sections(text):
    """The anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            for _, line in prose(text) if line.startswith("#")}


def wording(root, files):
    """Every line of a page that is too long, and every banned phrase, in a sentence."""
    for file in files:
        path = root / file
        scripted = "." not in path.name and path.read_bytes().startswith(b"#!")
        if not file.endswith(SPOKEN) and not scripted:
            continue
        text = path.read_text()
        for found in BANNED.findall(NEW_LINE.sub(" ", text)):
            yield f'{file} says "{found}"; say it plainly'
        if file.endswith(".md"):
            for number, line in prose(text):
                if len(line) > COLUMNS:
                    yield f"{file}:{number} has {len(line)} characters, {COLUMNS} are allowed"


def wrong(root, files):
    """Every claim of a page that is not so, in a sentence."""
    read = {file: (root / file).read_text() for file in files
            if file.endswith((".md", ".cmake", "CMakeLists.txt"))}
    tests = declared(text for file, text in read.items() if not file.endswith(".md"))
    for file, text in read.items():
        if not file.endswith(".md"):
            continue
        page = Path(file)
        for group in NAMED.findall(text):
            for name in re.findall(r"`([^`]+)`", group):
                if re.fullmatch(r"[\w*]+", name) and not is_test(name, tests):
                    yield f"{file} names the test {name}, which is not there"
        for name in PROGRAM.findall(text):
            if not (is_file(name, page, files) if "." in name else is_test(name, tests)):
                yield f"{file} names {name}, which is not there"
        for name in SCRIPT.findall(text):
            if not is_file(name, page, files):
                yield f"{file} names {name}, which is not there"
        for name, section in LINK.findall(text):
            target = os.path.normpath(page.parent / name).replace(os.sep, "/") if name else file
            if not (root / target).exists():
                yield f"{file} links to {name}, which is not there"
            elif section and target in read and section not in sections(read[target]):
                yield f"{file} links to {name}#{section}, a section that is not there"


def presets(root):
    page = (root / "runtime/SPECIFICATION.md").read_text()
    for definition in sorted((root / "runtime/operators").glob("*/definition.cpp")):
        for name in re.findall(r'ModelPreset\{\{"([^"]+)"', definition.read_text()):
            if not re.search(rf"^\|.*(?<![\w.-]){re.escape(name)}(?![\w.-]).*\|$", page, re.MULTILINE):
                yield f"runtime/SPECIFICATION.md lacks the preset {name}"


def releases(root):
    version = re.search(r"project\(wyvern VERSION ([\d.]+)", (root / "CMakeLists.txt").read_text())[1]
    said = re.findall(r"^## ([\d.]+)$", (root / ".github/CHANGELOG.md").read_text(), re.MULTILINE)
    if version not in said:
        yield f".github/CHANGELOG.md lacks {version}, the version of CMakeLists.txt"


def check_itself():
    """The check must find each claim that is not so and pass those that are."""
    files = {
        "CMakeLists.txt": "add_test(NAME format)\nadd_test(NAME gpu_${tool})\n"
                          "wyvern_test(a_test a_test.cpp)\n",
        "room/a_test.cpp": "",
        "tests/script.py": "",
        "room/sound.md": "the tests `format`, `gpu_memcheck` and `gpu_*`; `a_test`, `a_test.cpp`;\n"
                         "`tests/script.py --all`, `tests/`, [it](a_test.cpp),\n"
                         "[it](../tests/script.py#x), [it](long.md#its-only-section), recommended\n",
        "room/wrong.md": "the test `lost`; `b_test`; `b_test.cpp`; `tests/none.py`; [it](none.md);\n"
                         "[it](#none)\n",
        "room/long.md": "## Its `only` section\n" + "```\n" + 121 * "x" + "\n```\n    " + 121 * "x" + "\n|"
                        + 121 * "x" + "\n" + 120 * "\N{PLUS-MINUS SIGN}" + "\n" + 121 * "x" + "\n",
        "room/said.cpp": "// Rows that li" + "e\n// apart; this men" + "ds it.\n",
        "room/said.py": 'x = ("is to be "\n     "ha' + 'd")\n',
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in files.items():
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(text)
        found = list(wrong(root, list(files)))
        spoken = list(wording(root, list(files)))
    if len(found) != 6 or not all(each.startswith("room/wrong.md") for each in found):
        sys.exit(f"the check itself is broken: it found {found}")
    where = [each.split(" ")[0] for each in spoken]
    if where != ["room/long.md:8", "room/said.cpp", "room/said.cpp", "room/said.py"]:
        sys.exit(f"the check itself is broken: it found {spoken}")


def main():
    check_itself()
    root = Path(sys.argv[1]).resolve()
    listed = subprocess.run(["git", "-c", f"safe.directory={root}", "-C", root, "ls-files", "-z"],
                            capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        print(f"skipped: {root} is no clone: {listed.stderr.strip()}")
        sys.exit(77)
    files = [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    if found := [*wrong(root, files), *wording(root, files), *presets(root), *releases(root)]:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
