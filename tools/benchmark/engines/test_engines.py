"""The command with an engine that is made up: what it compares is checked, what it times is not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import fake_engine  # noqa: E402
import local_models  # noqa: E402
import measures  # noqa: E402


def cells(page: str, *starts: str) -> list[str]:
    """The cells of the line that begins with these."""
    for line in page.splitlines():
        found = [cell.strip() for cell in line.strip("|").split("|")]
        if found[: len(starts)] == list(starts):
            return found
    raise AssertionError(f"no line {starts} in\n{page}")


class Engines(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = Path(folder.name)

    def run_command(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        engine = str(HERE / "fake_engine.py")
        return subprocess.run(
            [sys.executable, str(HERE), "--engine", engine, "--out", str(self.out), *options],
            capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment},
        )  # fmt: skip

    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "runs.jsonl").read_text().splitlines()]

    def test_options_beside_the_engine(self) -> None:
        rows = ("--rows", "^tiny-qwen3-next/(base|eager|cold)", "--measure", "logprobs")
        done = self.run_command(*rows, "--parallel", "2")
        self.assertEqual(done.returncode, 1)  # cold-code needs a folder
        page = done.stdout
        self.assertEqual(page, (self.out / "engines.md").read_text())
        off = f"{fake_engine.OFF:.2e}"
        ours = cells(page, "tiny-qwen3-next/base, Wyvern", "tiny-qwen3-next/base, fake_engine")
        self.assertEqual(ours[2:], [off] * 4)
        yardstick = cells(page, "tiny-qwen3-next/eager, fake_engine", "tiny-qwen3-next/base, fake_engine")
        self.assertEqual(yardstick[2:], ["0.00e+00"] * 4)
        self.assertEqual(cells(page, "tiny-qwen3-next/base", "Wyvern")[-2:], ["prefill 6", "decode: no 4"])
        self.assertIn("tiny-qwen3-next/cold-code, wyvern: it needs --code FOLDER", page)
        # A second time nothing is run but what was lost and is asked for again.
        before = len(self.runs())
        self.run_command(*rows)
        self.assertEqual(len(self.runs()), before)
        done = self.run_command(*rows, "--again", "--code", str(self.out))
        self.assertEqual((done.returncode, len(self.runs())), (0, before + 1))

    def test_in_turn(self) -> None:
        """Each side has every other turn, and all of them where the other is lost."""
        rows = ("--rows", "^tiny-qwen3.5/base$", "--measure", "speed", "--in-turn")
        turns = len(measures.THROUGHPUT) * (1 + measures.RUNS)
        for lost in (False, True):
            with self.subTest(lost=lost):
                said = self.out / f"turns-{lost}"
                out = ("--out", str(self.out / str(lost)))
                fails = {"FAKE_FAILS": "Wyvern"} if lost else {}
                done = self.run_command(*rows, *out, FAKE_TURNS=str(said), **fails)
                self.assertEqual(done.returncode, 1 if lost else 0, done.stderr)
                expected = ["engine"] if lost else ["engine", "wyvern"]
                self.assertEqual(said.read_text().split(), expected * turns)

    def test_rows_in_turn(self) -> None:
        """Sides of two rows have turns round about, and go on without one that is lost."""
        rows = ("--rows", "^tiny-qwen3.5/(base|eager)$", "--measure", "speed", "--in-turn", "--parallel", "2")
        turns = len(measures.THROUGHPUT) * (1 + measures.RUNS)
        for lost in (False, True):
            with self.subTest(lost=lost):
                said = self.out / f"turns-{lost}"
                fails = {"FAKE_FAILS": "graphs"} if lost else {}  # both sides of base
                out = ("--out", str(self.out / str(lost)))
                done = self.run_command(*rows, *out, FAKE_TURNS=str(said), **fails)
                self.assertEqual(done.returncode, 1 if lost else 0, done.stderr)
                expected = ["engine", "wyvern"] * (1 if lost else 2)
                self.assertEqual(said.read_text().split(), expected * turns)

    def test_profile(self) -> None:
        """Where it is asked for, and beside the log."""
        if importlib.util.find_spec("torch") is None:
            self.skipTest("PyTorch is not installed")
        rows = ("--rows", "^tiny-qwen3.5/base$", "--side", "engine")
        for measure in ("speed", "profile"):
            done = self.run_command(*rows, "--measure", measure, "--out", str(self.out / measure))
            self.assertEqual(done.returncode, 0, done.stderr)
            (run,) = (json.loads(line) for line in (self.out / measure / "runs.jsonl").read_text().splitlines())
            self.assertNotIn("error", run)
            told = self.out / measure / "logs" / "tiny-qwen3.5-base-engine.profile"
            self.assertEqual(told.exists(), measure == "profile")
        self.assertRegex(told.read_text(), r"^64 sequences, 33 tokens: \d")

    def test_what_is_lost_is_named(self) -> None:
        done = self.run_command(
            "--rows", "^tiny-qwen3.5/(base|eager)", "--measure", "logprobs", FAKE_FAILS="graphs"
        )
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"tiny-qwen3.5/base, engine: exit code 1: ValueError: no graphs here")
        self.assertEqual(sum("error" in run for run in self.runs()), 2)
        cells(done.stdout, "tiny-qwen3.5/eager, Wyvern", "tiny-qwen3.5/eager, fake_engine")

    def test_the_error_is_found_in_what_an_engine_logs(self) -> None:
        """As vLLM's processes and PyTorch's ranks write it, with warnings and a summary behind it."""
        why = "ModuleNotFoundError: No module named 'flashinfer'"
        ranks = (f"[rank0]: ImportError: no\n[rank0]: {why}", "[rank0]:[W1127 a.cpp:1] Warning: destroy it")
        process = "(EngineCore pid=5)"
        processes = (
            f"{process} ERROR 11-27 [core.py:9] {why}",
            f"{process} WARNING 11-27 [a.py:1] it goes on",
            "RuntimeError: Engine core initialization failed. See root cause above.",
        )
        logs = {"base": "\n".join(ranks), "eager": "\n".join(processes)}
        for option, log in logs.items():
            rows = f"^tiny-qwen3.5/{option}$"
            done = self.run_command("--rows", rows, "--side", "engine", FAKE_FAILS=log)
            self.assertRegex(done.stdout, rf"{option}, engine: exit code 1: .*{re.escape(why)} \(")

    def test_invariance(self) -> None:
        rows = "^tiny-kimi-linear/"
        done = self.run_command("--sets", "invariance", "--rows", rows, "--measure", "invariance")
        self.assertEqual(done.returncode, 0, done.stderr)
        page = done.stdout
        count = 1 + sum(len(measures.positions(batch)) for batch in measures.BATCHES)
        equal = [f"{count} of {count}", "0", "0", "0.00e+00"]
        self.assertEqual(cells(page, "tiny-kimi-linear/invariant", "wyvern")[2:], equal)
        across = "tiny-kimi-linear/invariant-chunked beside tiny-kimi-linear/invariant, alone"
        self.assertEqual(cells(page, across, "wyvern")[2:], ["1 of 1", "0", "0", "0.00e+00"])
        # The control: alone, again and the first place are alike, no other place is.
        alike = 1 + len(measures.BATCHES)
        wanted = [f"{alike} of {count}", str(measures.TARGET - 1), str(measures.FORCED)]
        self.assertEqual(cells(page, "tiny-kimi-linear/variant", "engine")[2:5], wanted)

    def test_positions(self) -> None:
        self.assertEqual(measures.positions(1), [0])
        self.assertEqual(measures.positions(2), [0, 1])
        self.assertEqual(measures.positions(64), [0, 8, 16, 24, 32, 39, 47, 55, 63])

    def test_models(self) -> None:
        for name in local_models.MODELS:
            folder = local_models.write(self.out, name)
            config = json.loads((folder / "config.json").read_text())
            self.assertEqual(config["vocab_size"], local_models.VOCABULARY)
            words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
            self.assertEqual(sorted(words.values()), list(range(local_models.VOCABULARY)))
            if "qwen" in name:
                kinds = config["layer_types"]
                self.assertEqual(len(kinds), config["num_hidden_layers"])
                self.assertTrue(all(re.match("full", kind) for kind in kinds[3::4]))


if __name__ == "__main__":
    unittest.main()
