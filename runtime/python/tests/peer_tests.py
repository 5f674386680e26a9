"""Runs other libraries' tests of these operators, unchanged, with Wyvern in the operators' place.

Their files are no part of this repository: name a checkout of theirs.

    git clone --depth 1 https://github.com/fla-org/flash-linear-attention
    peer_tests.py --fla flash-linear-attention --swap       # wyvern.ops where they import fla.ops
    peer_tests.py --fla flash-linear-attention --enable     # through wyvern.fla.enable()
    peer_tests.py --flashinfer FOLDER                       # wyvern.flashinfer where they import flashinfer
    peer_tests.py --vllm FOLDER                             # its kernels' tests, through peers/packages
    peer_tests.py --vllm FOLDER --enable                    # tests of its functions, through wyvern.vllm.enable()

in an environment that has PyTorch, pytest, this package and, for --fla and --enable, the library itself. On
a GPU where there is one, else on the CPU, where the tests get CPU tensors, marks that ask for CUDA are lifted
and Triton interprets vLLM's other kernels. A table tells what became of the tests (RESULTS below), by file,
and all reasons.

Exit status: 0 where nothing failed or fell back in silence, 1 where something did, 77 where it cannot run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CANNOT_RUN = 77
INTERRUPTED = 2  # as pytest has it
# The results of tests, the order of the table's columns.
RESULTS = {
    "passed": "every call of an operator was served by Wyvern, or refused as the test wants, and it passed",
    "declined": "Wyvern declined a call and said why",
    "fell back": "the library's own operator ran though no call was declined",
    "failed": "served, or stopped before a call, and failed",
    "differs": "wants what Wyvern does otherwise on purpose",
    "needs a GPU": "uses other kernels of the library, which run on GPUs only",
    "no call": "passed without a call of an operator",
    "skipped": "by the test itself",
    "too long": "stopped after --limit seconds",
    "left out": "by --most-tokens and --every",
}
WRONG = ("failed", "fell back")
FILES = {
    "fla": [
        "tests/ops/test_gdn.py",
        "tests/ops/test_kda.py",
        "tests/ops/test_delta.py",
        "tests/ops/test_delta_product.py",
        "tests/ops/test_gdp.py",
        "tests/ops/test_gdn2.py",
        "tests/layers/test_gated_deltanet.py",
        "tests/models/test_modeling_gated_deltanet.py",
        "tests/models/test_modeling_deltanet.py",
        "tests/models/test_modeling_gated_deltaproduct.py",
        "tests/models/test_modeling_kda.py",
    ],
    "flashinfer": [
        "tests/gdn/test_prefill_delta_rule.py",
        "tests/gdn/test_prefill_state_indices.py",
        "tests/gdn/test_decode_delta_rule.py",
        "tests/gdn/test_decode_pretranspose_bf16_padded_pool.py",
        "tests/gdn/test_decode_pretranspose_noncontiguous_pool.py",
    ],
    "vllm": [
        "tests/kernels/mamba/cpu/test_cpu_gdn_ops.py",
        "tests/kernels/mamba/cpu/test_cpu_kda_ops.py",
        "tests/kernels/mamba/test_causal_conv1d.py",
    ],
}
ENABLED = FILES | {
    "fla": [*FILES["fla"], "tests/modules/test_conv.py", "tests/modules/test_layernorm_gated.py"],
    "vllm": [
        "tests/kernels/fla/test_fused_recurrent_packed_decode.py",
        "tests/kernels/fla/test_fused_sigmoid_gating_delta_rule.py",
        "tests/kernels/mamba/test_gdn_prefill_flashinfer.py",
        "tests/kernels/mamba/test_gdn_forward_core_split.py",
        "tests/kernels/mamba/test_gdn_fused_mtp.py",
        "tests/models/glm5next/test_kda_recurrent.py",
        "tests/models/kimi_k3/test_kda.py",
    ],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Runs other libraries' tests with Wyvern in the place of their operators.",
        epilog="Arguments after -- go to pytest: -k EXPRESSION, -x, -n 8 (pytest-xdist), ...",
    )
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--fla", type=Path, metavar="DIR", help="a checkout of flash-linear-attention")
    peer.add_argument("--flashinfer", type=Path, metavar="DIR", help="a checkout of FlashInfer")
    peer.add_argument("--vllm", type=Path, metavar="DIR", help="a checkout of vLLM")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--swap", dest="mode", action="store_const", const="swap", help="the default")
    mode.add_argument("--enable", dest="mode", action="store_const", const="enable")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it can be used")
    parser.add_argument("--files", nargs="+", metavar="FILE", help="instead of all, by end of name")
    parser.add_argument("--most-tokens", type=int, default=0, help="leave out tests of more tokens")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth case of a test")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="for each test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    own = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] = []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    name = next(one for one in FILES if getattr(options, one) is not None)
    if name == "flashinfer" and options.mode == "enable":
        parser.error("--enable is for --fla and --vllm")
    options.mode = options.mode or "swap"
    records, code = run(options, name, rest)
    if records is None:
        return CANNOT_RUN
    show(records, name, options.mode)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    wrong = [record for record in records if record["result"] in WRONG]
    # pytest's own 1 says that tests failed, which the records tell apart; more says that it did not run.
    return 1 if wrong or code > 1 or not records else 0


def run(options: argparse.Namespace, name: str, rest: list[str]) -> tuple[list[dict[str, Any]] | None, int]:
    """The tests' records and pytest's exit status; None, and a sentence printed, where none can run."""
    folder = getattr(options, name).resolve()
    all_files = (ENABLED if options.mode == "enable" else FILES)[name]
    files = [folder / file for file in all_files if chosen(file, options.files)]
    files = [file for file in files if file.exists()]
    if not files:
        print(f"skipped: {folder} has none of the tests of {name} that this runs")
        return None, CANNOT_RUN
    of_its_own = {"fla": ("fla", "transformers", "einops"), "vllm": ("vllm",) * (options.mode == "enable")}
    packages = ("torch", "pytest", *of_its_own.get(name, ()))
    missing = [one for one in packages if importlib.util.find_spec(one) is None]
    if missing:
        print(f"skipped: this Python has no {', '.join(missing)}")
        return None, CANNOT_RUN
    with tempfile.TemporaryDirectory() as work:
        records = Path(work) / "records"
        settings = {
            "peer": name,
            "mode": options.mode,
            "device": options.device or default_device(),
            "records": str(records),
            "most_tokens": options.most_tokens,
            "every": options.every,
            "limit": options.limit,
        }
        (Path(work) / "tests").symlink_to(folder / "tests")  # which some of vLLM's import, without its package
        paths = [str(HERE), work, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "WYVERN_PEER_TESTS": json.dumps(settings),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if settings["device"] == "cpu" and name == "vllm":
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        if settings["mode"] == "swap":  # no backends take part; with them FLA's tests skip grouped heads
            environment["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        pytest = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-rN"]
        pytest += ["-p", "peers.plugin", "-p", "no:cacheprovider", "--rootdir", str(folder)]
        pytest += ["-c", os.devnull, *rest]
        if name != "fla":  # the conftest.py of all their tests imports all of the library
            pytest += ["--import-mode=importlib", "--confcutdir", str(files[0].parent)]
        # Elsewhere, so that the folder's own package is not the one that is imported.
        command = [*pytest, *map(str, files)]
        try:
            code = subprocess.run(command, cwd=work, env=environment, check=False).returncode
        except KeyboardInterrupt:  # what is done by then is told
            code = INTERRUPTED
        lines = records.read_text().splitlines() if records.exists() else []
        # By test: each of pytest-xdist's processes writes down what is left out.
        by_test = {record["test"]: record for record in map(json.loads, lines)}
        return list(by_test.values()), code


def chosen(file: str, ends: list[str] | None) -> bool:
    return ends is None or any(file.endswith(end) for end in ends)


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def show(records: list[dict[str, Any]], name: str, mode: str) -> None:
    """The tables: by file, what each result means, and the reasons of all that did not pass."""
    by_file: dict[str, Counter[str]] = {}
    for record in records:
        file = record["test"].split("::")[0].split("/")[-1]
        by_file.setdefault(file, Counter())[record["result"]] += 1
    results = [result for result in RESULTS if any(counts[result] for counts in by_file.values())]
    rows = [[f"{name}, {mode}", *results, "calls served"]]
    for file, counts in sorted(by_file.items()):
        calls = sum(r["calls"] for r in records if r["test"].split("::")[0].endswith(file))
        rows.append([file, *(str(counts[result] or "") for result in results), str(calls)])
    total = Counter(record["result"] for record in records)
    calls = sum(record["calls"] for record in records)
    rows.append(["all", *(str(total[result]) for result in results), str(calls)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))]
        print("| " + " | ".join(cells) + " |")
    print()
    for result in results:
        print(f"{result}: {RESULTS[result]}")
        reasons = Counter(r["why"] for r in records if r["result"] == result and r["why"])
        for why, count in reasons.most_common():
            print(f"  {count} x {why}")
    for record in records:
        if record["result"] in WRONG:
            print(f"{record['result']}: {record['test']}: {record['why']}")


if __name__ == "__main__":
    sys.exit(main())
