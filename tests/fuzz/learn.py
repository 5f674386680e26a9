#!/usr/bin/env python3
"""Puts inputs into corpus/TARGET.tar.xz, the archive of those that libFuzzer found for a target.

usage: learn.py TARGET [FILE|FOLDER]...

A file becomes learnt-HASH, where HASH begins the SHA-256 of its content, so that no input is there
twice. The same inputs make the same archive: order, owners and times are fixed.
"""

import hashlib
import io
import sys
import tarfile
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"


def read(archive):
    if not archive.is_file():
        return []
    with tarfile.open(archive, "r:xz") as tar:
        return [tar.extractfile(member).read() for member in tar.getmembers()]


def write(archive, inputs):
    named = {f"learnt-{hashlib.sha256(content).hexdigest()[:8]}": content for content in inputs}
    with tarfile.open(archive, "w:xz", format=tarfile.USTAR_FORMAT, preset=9) as tar:
        for name, content in sorted(named.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return len(named)


def main():
    if len(sys.argv) < 2 or not (CORPUS / sys.argv[1]).is_dir():
        sys.exit(__doc__)
    archive = CORPUS / f"{sys.argv[1]}.tar.xz"
    inputs = read(archive)
    for path in map(Path, sys.argv[2:]):
        files = path.iterdir() if path.is_dir() else [path]
        inputs += [file.read_bytes() for file in files if file.is_file()]
    print(f"{archive.name}: {write(archive, inputs)} inputs")


if __name__ == "__main__":
    main()
