"""The command on the CPU: what it counts is checked, what it times is not."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = Path(os.environ["WYVERN_BUILD"])


class Overhead(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def run_command(self, *options, build=BUILD):
        command = [sys.executable, HERE, "--device", "cpu", "--build", build, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    def test_counts(self):
        out = self.folder / "out"
        done = self.run_command("--only", "look-up,writers,compiles", "--json", "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        document = json.loads(done.stdout)
        self.assertEqual(document, json.loads((out / "overhead.json").read_text()))
        self.assertEqual(document["failed"], {})
        look_up, writers, compiles = document["figures"]

        found = look_up["values"]
        self.assertEqual((found["allocations"], found["locks"]), (0, 0))
        # What is counted is there to be counted: preparing the same operators does both.
        self.assertGreater(found["allocations_of_preparing"], 100)
        self.assertGreater(found["locks_of_preparing"], 10)
        self.assertGreater(found["lookups"], 1000)

        # On a machine whose disk is too busy a row may be refused; what is not refused is there.
        rows = writers["values"]
        self.assertEqual(rows["rows"], 64 * 2 * 20)
        self.assertEqual(rows["found"] + rows["refused"], rows["rows"], writers)
        self.assertEqual(writers["met"], rows["refused"] == 0)

        # Who has waited 20 s for another's kernel compiles it too; all would be 64.
        compiled = compiles["values"]["compiled"]
        self.assertEqual(len(compiled), 16)
        self.assertIn(sum(compiled), range(compiles["values"]["kernels"], 16), compiles)

        page = (out / "overhead.md").read_text()
        for figure in document["figures"]:
            self.assertIn(figure["measured"], page)

    def test_what_is_not_built_is_said(self):
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "wyvern").symlink_to(BUILD / "bin" / "wyvern")
        done = self.run_command("--only", "writers", build=self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertIn("overhead_worker is not built", done.stdout)

    def test_refuses_what_there_is_not(self):
        self.assertIn(
            "there is no nothing; there are first-call",
            self.run_command("--only", "nothing").stderr,
        )
        self.assertIn("there is no device cuda:99", self.run_command("--device", "cuda:99").stderr)


if __name__ == "__main__":
    unittest.main()
