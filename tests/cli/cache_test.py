"""What `wyvern cache` does with rows: explain, export, import, merge, diff, verify, gc, doctor; and the
layers that packs are asked in. The rows are made up, so that nothing has to be tuned."""

import json
import os
import sqlite3
import unittest

from support import OP, Case

SHAPE = ("--shape", "T=40,H=1,K=16")
EXPLAIN = ("cache", "explain", OP, "--device", "cpu")


class CacheCase(Case):
    def setUp(self):
        super().setUp()
        self.addCleanup(os.environ.pop, "WYVERN_PACKS", None)

    def explain(self, *options):
        return self.document(*EXPLAIN, *(options or SHAPE))

    def winner(self, ratio=0.5, problem=SHAPE, **more):
        """A row that the tuner could have stored for a problem, by the default plan."""
        about = self.explain(*problem)
        family, tokens, sequences = about["problem"]["key"].rsplit("/", 2)
        (cpu,) = [d for d in self.document("devices")["devices"] if d["name"] == "cpu"]
        plan = [{"template": step["template"],
                 "config": ",".join(f"{k}={v}" for k, v in step["config"].items())}
                for step in about["plan"]]
        row = {"row": "winner", "device": about["device_key"], "family": family,
               "tokens": int(tokens.split("=")[1]), "sequences": int(sequences.split("=")[1]),
               "plan": plan, "median_us": 100.0 * ratio, "default_us": 100.0, "round": 1,
               "samples_us": [100.0 * ratio] * 3, "default_samples_us": [100.0] * 3,
               "driver": cpu["driver"], "host": "node1", "T": 40, "B": 1, "N": 1,
               "created": "2026-11-01T00:00:00.000Z"}
        return {**row, **more}

    def measurements(self, winner):
        """A row for each kernel of the winner's plan, one config that failed, and one at another BT."""
        problem = f"{winner['family']}/tokens={winner['tokens']}/sequences={winner['sequences']}"
        rows = []
        for i, step in enumerate(winner["plan"]):
            for config, status, us in ((step["config"], "ok", 10.0 + i), ("BT=1", "crashed", 0),
                                       (step["config"] + ",BV=7", "ok", 9.0 + i)):
                rows.append({"row": "measurement", "device": winner["device"], "problem": problem,
                             "template": step["template"], "config": config, "artifact": "a" * 64,
                             "driver": winner["driver"], "status": status, "median_us": us,
                             "samples_us": [us] * 5, "error": 1e-3, "host": "node1",
                             "clocks_mhz": [1700.0, 1710.0, 1690.0] if status == "ok" else [],
                             "detail": "its worker <b>ended</b> \u2028" if status == "crashed" else "",
                             "created": f"2026-11-01T00:00:0{i}.000Z"})
        return rows

    def pack(self, name, *rows):
        lines = [{"row": "pack", "version": 1, "devices": sorted({r["device"] for r in rows})}, *rows]
        (self.folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.path(name)


class Explain(CacheCase):
    def test_miss_names_what_differs(self):
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("default", "default"))
        self.assertIsNone(about["nearest"])
        self.assertFalse(any(kernel["cached"] for kernel in about["kernels"]))

        row = self.winner()
        self.document("cache", "import", self.pack("a.jsonl", row))
        about = self.explain("--shape", "T=40,H=1,K=32")
        self.assertEqual(about["layer"], "default")
        fields = {d["field"]: (d["wanted"], d["found"]) for d in about["nearest"]["differs"]}
        self.assertEqual(fields, {"K": ("32", "16"), "V": ("32", "16")})
        about = self.explain("--shape", "T=5000,H=1,K=16")
        self.assertEqual((about["layer"], about["origin"]), ("user", "nearest"))
        self.assertEqual([d["field"] for d in about["nearest"]["differs"]], ["tokens"])
        text = self.wyvern(*EXPLAIN, "--shape", "T=5000,H=1,K=16").stdout
        for word in ("answered by: user (nearest)", "tokens: wanted", "not compiled yet"):
            self.assertIn(word, text)

    def test_another_shape_answers_where_its_family_does_not(self):
        """Other heads, the same kernels: the winner of one that gained much is the nearest there is."""
        self.document("cache", "import", self.pack("a.jsonl", self.winner()))
        heads = ("--shape", "T=40,H=2,K=16")
        about = self.explain(*heads)
        self.assertEqual((about["layer"], about["origin"]), ("user", "nearest"))
        self.assertIn("nearest problem", about["reason"])
        (candidate,) = about["candidates"]
        self.assertTrue(candidate["other_shape"])
        self.assertTrue(candidate["answers"])
        self.assertEqual(candidate["distance"], 1)
        self.assertIn("H=1,", candidate["family"])
        self.assertEqual({d["field"] for d in candidate["differs"]}, {"H", "HV"})
        self.assertEqual(about["nearest"]["differs"], candidate["differs"])
        text = self.wyvern(*EXPLAIN, *heads).stdout
        for word in ("answered by: user (nearest)", "nearest problem", candidate["family"],
                     "HV: wanted 2, there is 1"):
            self.assertIn(word, text)
        self.example(*heads)
        run = self.document("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                            "--output", self.path("out"), "--verify")
        self.assertEqual(run["origin"], "nearest")
        self.assertTrue(run["verified"])
        # Where the winner gained little it is not worth the way, and the reason says as much.
        self.document("cache", "clear")
        self.document("cache", "import", self.pack("b.jsonl", self.winner(0.99)))
        about = self.explain(*heads)
        self.assertEqual(about["layer"], "default")
        self.assertIn("no problem near it", about["reason"])

    def test_other_options_answer_where_no_shape_does(self):
        """A winner for gates in fp32: what differs is said, and the plan computes right."""
        self.document("cache", "import", self.pack("a.jsonl", self.winner(0.5)))
        first = (*SHAPE, "--g-dtype", "bf16")
        about = self.explain(*first)
        self.assertEqual((about["layer"], about["origin"]), ("user", "nearest"))
        (candidate,) = about["candidates"]
        self.assertEqual(candidate["distance"], 0.5)
        self.assertEqual([d["field"] for d in candidate["differs"]], ["g"])
        self.assertIn("g: wanted bf16, there is fp32", self.wyvern(*EXPLAIN, *first).stdout)
        self.example(*first)
        run = self.document("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                            "--output", self.path("out"), "--verify")
        self.assertEqual(run["origin"], "nearest")
        self.assertTrue(run["verified"])

    def test_a_pack_answers_a_first_prefill(self):
        """Its row has an initial state, which the first prefill has not: that is said."""
        first = ("--preset", "qwen3.5-0.8b", "--tokens", "64")
        family = self.explain(*first)["problem"]["key"].rsplit("/", 2)[0]
        row = self.winner(problem=first,
                          family=family.replace("/final_state", "/initial_state=fp32/final_state"))
        os.environ["WYVERN_PACKS"] = self.pack("a.jsonl", row)
        about = self.explain(*first)
        self.assertEqual((about["layer"], about["origin"]), ("WYVERN_PACKS", "nearest"))
        (candidate,) = about["candidates"]
        self.assertEqual([d["field"] for d in candidate["differs"]], ["initial_state"])
        self.assertIn("initial_state: wanted", self.wyvern(*EXPLAIN, *first).stdout)

    def test_another_count_of_threads(self):
        model, threads = self.winner()["device"].rsplit(", ", 1)
        twice = 2 * int(threads.removesuffix(" threads"))
        self.document("cache", "import",
                      self.pack("a.jsonl", self.winner(device=f"{model}, {twice} threads")))
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("user", "nearest"))
        (candidate,) = about["candidates"]
        self.assertEqual([d["field"] for d in candidate["differs"]], ["device"])

    def test_a_neighbour_that_cannot_serve_is_said(self):
        """Another chunk size: the plan is not legal, the default plan answers, and a line says so."""
        row = self.winner()
        BT = {step["config"]["BT"] for step in self.explain()["plan"] if "BT" in step["config"]}.pop()
        self.document("cache", "import", self.pack("a.jsonl", row))
        other = (*SHAPE, "--chunk-size", str(32 if BT == 64 else 64))
        about = self.explain(*other)
        self.assertEqual(about["layer"], "default")
        self.assertIn(f"BT is {BT}", about["candidates"][0]["why"])
        self.example(*other)
        run = self.wyvern("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                          "--output", self.path("out"), *other[2:])
        self.assertEqual(run.stderr.count("so the default plan takes its place"), 1, run.stderr)

    def test_hit(self):
        self.document("cache", "import", self.pack("a.jsonl", self.winner()))
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("user", "exact"))
        self.assertTrue(about["candidates"][0]["answers"])
        self.assertIsNone(about["nearest"])

    def test_another_driver_is_not_exact(self):
        self.document("cache", "import", self.pack("a.jsonl", self.winner(driver="old")))
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("user", "nearest"))
        self.assertIn("another driver", about["reason"])
        self.assertIn("driver", [f["check"] for f in self.document("cache", "doctor", expect=1)["findings"]
                                 if f["weight"] == "warning"])

    def test_kernels(self):
        """Compiled by a run, found; with another element type, what differs from the nearest."""
        self.example(*SHAPE)
        self.wyvern("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"), "--output",
                    self.path("out"))
        self.assertTrue(all(kernel["cached"] for kernel in self.explain()["kernels"]))
        kernels = self.explain(*SHAPE, "--dtype", "fp32")["kernels"]
        missing = [kernel for kernel in kernels if not kernel["cached"]]
        self.assertTrue(missing)
        for kernel in missing:
            self.assertTrue(kernel["nearest"]["differs"])
        self.assertTrue(any("fp32" in str(d["wanted"]) for kernel in missing
                            for d in kernel["nearest"]["differs"]))
        text = self.wyvern(*EXPLAIN, *SHAPE, "--dtype", "fp32").stdout
        self.assertIn("it is for another problem", text)
        self.assertNotRegex(text, "constant [A-Za-z_]+:")

    def test_refusals(self):
        self.refuses("cache", "explain", names=["OP", "missing"])
        self.refuses("cache", "explain", OP, names=["--preset", "--shape"])


class Layers(CacheCase):
    def test_packs_answer_behind_the_users_cache(self):
        """user, then WYVERN_PACKS, then default; in a layer the best ratio, not the least time."""
        slow = self.winner(0.4, median_us=4000.0, default_us=10000.0)
        os.environ["WYVERN_PACKS"] = self.pack("a.jsonl", self.winner(0.9)) + ":" + \
            self.pack("b.jsonl", slow)
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("WYVERN_PACKS", "exact"))
        self.assertEqual(about["candidates"][0]["file"], self.path("b.jsonl"))
        self.example(*SHAPE)
        run = self.document("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                            "--output", self.path("out"), "--verify")
        self.assertEqual(run["origin"], "exact")
        self.assertTrue(run["verified"])

        self.document("cache", "import", self.pack("user.jsonl", self.winner(0.99)))
        about = self.explain()
        self.assertEqual(about["layer"], "user")
        self.assertEqual([c["layer"] for c in about["candidates"]], ["user", "WYVERN_PACKS"])
        self.assertIn("earlier layer", about["candidates"][1]["why"])

    def test_a_plan_that_cannot_be_used_gives_way(self):
        os.environ["WYVERN_PACKS"] = self.pack(
            "a.jsonl", self.winner(plan=[{"template": "fwd_h.abacus", "config": "BT=64"}]))
        about = self.explain()
        self.assertEqual(about["layer"], "default")
        self.assertFalse(about["candidates"][0]["usable"])

    def test_a_winner_of_another_build_hides_no_other(self):
        """A newer build tuned last: its plan is passed over and said, ours answers; doctor counts it."""
        theirs = self.winner(0.1, round=2, plan=[{"template": "fwd_h.abacus", "config": "BT=64"}])
        self.document("cache", "import", self.pack("a.jsonl", theirs, self.winner(0.5)))
        about = self.explain()
        self.assertEqual((about["layer"], about["origin"]), ("user", "exact"))
        self.assertEqual([c["usable"] for c in about["candidates"]], [False, True])
        self.example(*SHAPE)
        run = self.wyvern("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                          "--output", self.path("out"), "--json")
        self.assertEqual(json.loads(run.stdout)["origin"], "exact")
        self.assertEqual(run.stderr.count("so another tuned plan takes its place"), 1, run.stderr)
        findings = self.document("cache", "doctor", expect=1)["findings"]
        (plans,) = [f for f in findings if f["check"] == "plans"]
        self.assertEqual(plans["weight"], "warning")
        self.assertIn("1 problem, 1 of which with another", plans["message"])

    def test_a_pack_that_cannot_be_read_is_told_and_passed_over(self):
        os.environ["WYVERN_PACKS"] = self.path("nowhere.jsonl")
        done = self.wyvern(*EXPLAIN, *SHAPE)
        self.assertIn("nowhere.jsonl", done.stderr)
        self.assertIn("answered by: default", done.stdout)


class Bench(CacheCase):
    BENCH = ("bench", OP, *SHAPE, "--device", "cpu", "--compare")

    def test_compare(self):
        """The plan of another cache or pack, timed in turn with the others; another build."""
        pack = self.pack("a.jsonl", self.winner())
        plans = self.document(*self.BENCH, pack)["plans"]
        self.assertEqual([p["name"] for p in plans], ["compared", "default"])
        self.assertEqual(plans[0]["origin"], "exact")
        self.assertEqual(plans[1]["ratio"], 1)
        self.assertGreater(plans[0]["ratio"], 0)
        self.refuses("bench", OP, "--shape", "T=40,H=1,K=32", "--device", "cpu", "--compare", pack,
                     names=["--compare", "no plan"])
        document = self.document(*self.BENCH, os.environ["WYVERN"])
        self.assertEqual(list(document["ratios"]), ["default"])
        self.assertEqual(len(document["builds"][1]["plans"][0]["rounds_ms"]), 3)


class Transfer(CacheCase):
    def other(self, name):
        """Runs the following commands on another cache."""
        self.cache = self.folder / name

    def test_export_import(self):
        row = self.winner()
        self.document("cache", "import", self.pack("a.jsonl", row, *self.measurements(row)))
        brief = self.document("cache", "export", "-o", self.path("brief.jsonl"))
        self.assertEqual((brief["winners"], brief["measurements"]), (1, 0))
        full = self.document("cache", "export", "-o", self.path("full.jsonl"), "--all")
        self.assertEqual(full["measurements"], len(self.measurements(row)))
        self.assertEqual(full["devices"], [row["device"]])
        lines = (self.folder / "full.jsonl").read_text().split("\n")[:-1]
        self.assertEqual(len(lines), 2 + full["measurements"])
        self.assertTrue(all(json.loads(line) for line in lines))

        self.other("other")
        (added,) = self.document("cache", "import", self.path("full.jsonl"))["added"]
        self.assertEqual((added["winners"], added["known"]), (1, 0))
        (added,) = self.document("cache", "import", self.path("full.jsonl"))["added"]
        self.assertEqual((added["winners"], added["measurements"]), (0, 0))
        self.document("cache", "export", "-o", self.path("again.jsonl"), "--all")
        self.assertEqual((self.folder / "again.jsonl").read_text().split("\n")[:-1], lines)
        self.assertEqual(self.explain()["origin"], "exact")

    def test_merge_and_diff(self):
        mine, theirs = self.winner(0.9), self.winner(0.5, host="node2")
        theirs["plan"] = theirs["plan"][:1]
        self.document("cache", "import", self.pack("a.jsonl", mine))
        first = self.cache
        self.other("other")
        self.document("cache", "import", self.pack("b.jsonl", theirs, *self.measurements(mine)))
        document = self.document("cache", "diff", first, self.cache)
        (one,) = document["winners"]
        self.assertEqual((one["a"]["ratio"], one["b"]["ratio"]), (0.9, 0.5))
        self.assertEqual(document["measurements"]["only_a"], 0)
        self.assertEqual(document["measurements"]["only_b"], len(self.measurements(mine)))
        self.assertEqual(self.document("cache", "diff", self.path("a.jsonl"), first)["same_plans"], 1)
        text = self.wyvern("cache", "diff", first, self.cache).stdout
        self.assertIn("A: 0.900 of the default", text)

        third = self.folder / "third"
        images = []
        for order in ((first, self.folder / "other"), (self.folder / "other", first)):
            self.cache = third
            merged = self.document("cache", "merge", *order, *order)["added"]
            self.assertEqual(merged[2]["winners"] + merged[3]["winners"], 0)
            self.document("cache", "export", "-o", self.path("image"), "--all")
            images.append((self.folder / "image").read_text())
            self.assertEqual(self.document("cache", "list")["winners"][0]["median_us"], 50)
            self.wyvern("cache", "clear")
        self.assertEqual(images[0], images[1])

    def test_merge_takes_all_or_none(self):
        self.document("cache", "import", self.pack("a.jsonl", self.winner()))
        good = self.cache
        self.other("other")
        self.refuses("cache", "merge", good, self.path("none"), names=["none", "no cache"])
        self.assertEqual(self.document("cache", "stats")["winners"], 0)

    def test_counts_and_units(self):
        done = self.wyvern("cache", "import", self.pack("a.jsonl", self.winner()))
        self.assertIn("added 0 artifacts, 0 measurements, 1 winner;", done.stdout)
        listed = self.wyvern("cache", "list").stdout
        self.assertRegex(listed, r"^id +what +ms ")
        self.assertRegex(listed, r"w1 +winner +0\.0500 ")

    def test_a_cache_that_cannot_be_used_is_said_once(self):
        pack = self.pack("a.jsonl", self.winner())
        (self.folder / "file").write_text("")
        self.other("file/\x1b[31m")
        for words in (("import", pack), ("merge", self.folder / "cache"), ("verify",), ("clear",),
                      ("gc", "--max-bytes", "0"), ("export", "-o", self.path("out"))):
            self.refuses("cache", *words, names=["cannot be created", r"\x1b[31m"])
        stats = self.wyvern("cache", "stats")
        self.assertEqual(stats.stderr.count("\n"), 1)
        self.assertIn(r"\x1b[31m", stats.stderr)

    def test_refusals(self):
        self.refuses("cache", "export", names=["-o", "missing"])
        self.refuses("cache", "import", names=["FILE", "missing"])
        self.refuses("cache", "merge", names=["DB", "missing"])
        self.refuses("cache", "diff", "a", names=["A and B"])
        self.refuses("cache", "import", self.path("nowhere"), names=["nowhere"])
        self.refuses("cache", "merge", self.path("nowhere"), names=["nowhere", "no cache"])
        self.refuses("cache", "import", "/proc/self/mem", names=["/proc/self/mem", "cannot be read"])
        for version in ("1.9", "2"):
            (self.folder / "bad.jsonl").write_text('{"row":"pack","version":%s}\n' % version)
            self.refuses("cache", "import", self.path("bad.jsonl"), names=["bad.jsonl", f"version {version};"])
        self.refuses("cache", "import", self.pack("bad.jsonl", self.winner(round=10**9)),
                     names=["bad.jsonl", "round from 0 to"])
        (self.folder / "bad.jsonl").write_text('{"row":"pack","version":1}\n{"row":"\x1b[31m"}\n')
        self.refuses("cache", "import", self.path("bad.jsonl"), names=["line 2", "bad.jsonl"])


class Care(CacheCase):
    def test_verify_and_doctor(self):
        row = self.winner()
        self.document("cache", "import", self.pack("a.jsonl", row))
        self.assertTrue(self.document("cache", "verify")["verified"])
        sound = self.document("cache", "doctor")
        self.assertTrue(sound["healthy"])
        with sqlite3.connect(self.cache / "wyvern.db") as database:
            database.execute("UPDATE winners SET median_us = 1")
        self.assertEqual(self.document("cache", "verify", expect=1)["damage"],
                         ["w1 is not as it was stored"])
        findings = self.document("cache", "doctor", expect=1)["findings"]
        self.assertEqual([f["check"] for f in findings if f["weight"] == "error"], ["damage"])
        text = self.wyvern("cache", "doctor", expect=1).stdout
        self.assertIn("what to do:", text)
        os.chmod(self.cache / "wyvern.db", 0o666)
        (finding,) = self.document("cache", "doctor", expect=1)["findings"]
        self.assertEqual((finding["check"], finding["weight"]), ("owner", "error"))
        self.assertIn("chmod go-w", finding["fix"])

    def test_gc(self):
        self.example(*SHAPE)
        self.wyvern("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"), "--output",
                    self.path("out"))
        self.document("cache", "import", self.pack("a.jsonl", self.winner()))
        before = self.document("cache", "stats")
        self.assertGreater(before["artifacts"], 0)
        none = self.document("cache", "gc", "--max-bytes", "1G")
        self.assertEqual((none["deleted"], none["reached"]), (0, True))
        all_ = self.document("cache", "gc", "--max-bytes", "0")
        self.assertEqual((all_["deleted"], all_["reached"]), (before["artifacts"], False))
        self.assertLess(all_["bytes"], all_["bytes_before"])
        self.assertEqual(self.document("cache", "stats")["winners"], 1)
        self.refuses("cache", "gc", names=["--max-bytes", "missing"])
        for bad in ("-1", "many", "5T", "99999999999999999999"):
            self.refuses("cache", "gc", f"--max-bytes={bad}", names=["--max-bytes", "500M"])


if __name__ == "__main__":
    unittest.main()
