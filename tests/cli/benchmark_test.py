"""tools/benchmark's scripts that make the tuner's data, rehearsed on the CPU: recordings and packs."""

import json
import os
import subprocess
import unittest
from pathlib import Path

from support import OP, WYVERN, Case

BENCHMARK = Path(__file__).parents[2] / "tools/benchmark"
SHAPE = "T=40,H=1,K=16"


class Scripts(Case):
    def script(self, name, *arguments, expect=0):
        environment = dict(os.environ, WYVERN=WYVERN)
        done = subprocess.run([BENCHMARK / name, *map(str, arguments)], env=environment,
                              cwd=self.folder, capture_output=True, text=True, timeout=300,
                              check=False)
        self.assertEqual(done.returncode, expect, f"{name}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_spaces_are_recorded_until_the_time_is_up(self):
        (self.folder / "spaces").write_text(
            f"# name, operator, options\n\none {OP} --shape {SHAPE}\ntwo kda --shape {SHAPE}\n")
        record = ("record_spaces", "out", "--device", "cpu", "--problems", "spaces", "--seconds")
        self.assertIn("2 are not done yet", self.script(*record, 0, expect=3))
        self.cache = self.folder / "out/cache"
        known = 0
        for _ in range(30):  # a busy machine may only compile in the first ones, which is kept
            cut = self.script(*record, 1, expect=3)  # no time for all of one
            self.assertIn("one: not done yet", cut)
            known = self.document("cache", "stats")["measurements"]
            if known > 0:
                break
        self.assertGreater(known, 0)
        self.assertIn("two: ", self.script(*record, 200))
        files = [self.folder / f"out/{name}.jsonl.gz" for name in ("one", "two")]
        document = self.document("tune", "--replay", *files, "--seeds", "2")
        self.assertEqual([replayed["configs"] > 10 for replayed in document["replays"]], [True] * 2)
        self.assertIn("one: there already\ntwo: there already", self.script(*record, 200))
        (self.folder / "spaces").write_text("bad delta_rul --shape T=4\n")
        self.script(*record, 200, expect=2)

    def test_a_pack_is_made_and_gone_on_with(self):
        problems = [{"operator": OP, "shape": f"T={tokens},H=1,K=16"} for tokens in (10, 20)]
        manifest = self.folder / "problems.jsonl"
        manifest.write_text("".join(json.dumps(line) + "\n" for line in problems))
        pack = self.folder / "cpu.jsonl"
        make = ("make_packs", pack, "--device", "cpu", "--problems", manifest, "--each", 0.5,
                "--work", self.folder / "work", "--seconds")
        self.assertIn("0 were known and 1 were tuned", self.script(*make, 0.6, expect=3))
        # On another machine of the same kind: what is known is in the pack alone.
        (self.folder / "work").rename(self.folder / "lost")
        self.assertIn("1 were known and 1 were tuned", self.script(*make, 60))
        os.environ["WYVERN_PACKS"] = str(pack)
        self.addCleanup(os.environ.pop, "WYVERN_PACKS")
        for tokens in (10, 20):
            answer = self.document("cache", "explain", OP, "--device", "cpu", "--shape",
                                   f"T={tokens},H=1,K=16")
            self.assertEqual((answer["layer"], answer["origin"]), ("WYVERN_PACKS", "exact"))

    def problems_of(self, manifest):
        """How many a manifest has, if all are legal; a shard of so many has none of them to tune."""
        (self.folder / "problems.jsonl").write_text(manifest)
        document = self.document("tune", "--manifest", self.path("problems.jsonl"), "--device",
                                 "cpu", "--shard", "999999/1000000")
        self.assertEqual(document["tunings"], [])
        return document["problems"]

    def test_the_problems_of_the_packs_are_legal(self):
        self.assertGreater(self.problems_of(self.script("make_packs", "--list")), 200)

    def test_the_spaces_are_legal(self):
        for name, count in (("spaces", 6), ("spaces-cpu", 4)):
            manifest = ""
            for line in (BENCHMARK / name).read_text().splitlines():
                if line.startswith("#"):
                    continue
                entry = {"operator": line.split()[1]}
                for option in line.split(" --")[1:]:
                    option, *value = option.split()
                    entry[option] = value[0] if value else True
                manifest += json.dumps(entry) + "\n"
            self.assertEqual(self.problems_of(manifest), count)


if __name__ == "__main__":
    unittest.main()
