#!/usr/bin/env python3
"""Compares what two builds of the `wyvern` command compile every CUDA template to.

    tools/compare_builds.py OLD/bin/wyvern NEW/bin/wyvern [--arch sm_80,sm_90a] [--dtype bf16,fp32]

For each template, dtype and architecture, by the default config: the config, the launch and the
resources that `wyvern compile --json` tells, and the machine code of the cubins. Sections of debug
information, names and attributes of parameters are left out: the code is what runs. Where only the
places of kernel parameters differ, the words of the code that differ are counted ("parameters").
Exit code 1 when anything but that differs. Needs NVRTC, no GPU.
"""

import argparse
import concurrent.futures
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path


def text_section(cubin):
    """The kernel's machine code: the ELF section .text.wyvern_kernel."""
    header = struct.unpack_from("<QIHHHHHH", cubin, 0x28)
    offset, _, _, _, _, size, count, names = header
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    for section in sections:
        start = strings + section[0]
        if cubin[start:cubin.index(b"\0", start)] == b".text.wyvern_kernel":
            return cubin[section[4]:section[4] + section[5]]
    raise ValueError("no machine code in this cubin")


def run(command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def templates(wyvern):
    stages = json.loads(run([wyvern, "stages", "--json"]).stdout)["stages"]
    found = {t["id"]: stage["name"] for stage in stages for t in stage["templates"]
             if t["device"] == "cuda" and t["id"].split(".")[0] == stage["name"]}
    return {identity: name for identity, name in found.items() if identity.endswith(".portable")}


def compiled(wyvern, name, arch, dtype):
    """(what the command tells, machine code), or its message."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "kernel.cubin")
        result = run([wyvern, "compile", name, "--arch", arch, "--dtype", dtype, "--emit", "cubin",
                      "-o", file, "--json"])
        document = json.loads(result.stdout)
        if result.returncode != 0:
            return document["error"]["message"], b""
        told = {key: document[key] for key in
                ("config", "registers", "static_shared_bytes", "dynamic_shared_bytes",
                 "spill_bytes", "stack_bytes", "threads")}
        return told, text_section(Path(file).read_bytes())


def compare(case, old, new):
    name, arch, dtype = case
    told_old, code_old = compiled(old, name, arch, dtype)
    told_new, code_new = compiled(new, name, arch, dtype)
    if told_old != told_new:
        return case, f"told {told_old} and {told_new}"
    if code_old == code_new:
        return case, "equal"
    if len(code_old) != len(code_new):
        return case, f"code of {len(code_old)} and {len(code_new)} bytes"
    # An instruction is 16 bytes; a parameter's place is 14 bits of its first eight.
    words = [(a, b) for a, b in zip(struct.iter_unpack("<QQ", code_old),
                                    struct.iter_unpack("<QQ", code_new)) if a != b]
    place = 0x3FFF << 40
    if all(a[1] == b[1] and a[0] & ~place == b[0] & ~place for a, b in words):
        return case, f"parameters: {len(words)} instructions"
    return case, f"{len(words)} instructions differ"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--arch", default="sm_80,sm_90a")
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    known = templates(options.old)
    cases = [(name, arch, dtype) for name in sorted(known.values())
             for arch in options.arch.split(",") for dtype in options.dtype.split(",")]
    counts = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for case, verdict in pool.map(lambda c: compare(c, options.old, options.new), cases):
            kind = verdict if verdict == "equal" else verdict.split(":")[0]
            kind = kind if kind in ("equal", "parameters") else "different"
            counts[kind] = counts.get(kind, 0) + 1
            if verdict != "equal":
                print(*case, verdict, flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit(1 if "different" in counts else 0)


if __name__ == "__main__":
    main()
