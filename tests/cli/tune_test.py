"""Recordings, replays and manifests of `wyvern tune`, on the CPU."""

import gzip
import json
import os
import pty
import re
import subprocess
import unittest
from pathlib import Path

from support import OP, WYVERN, Case

SHAPE = "T=40,H=1,K=16"
TUNE = ("--device", "cpu", "--budget", "60s")


class Tune(Case):
    def test_record_then_replay(self):
        file = self.path("space.jsonl.gz")
        tuned = self.document("tune", OP, "--shape", SHAPE, "--device", "cpu", "--budget", "280s",
                              "--exhaustive", "--record", file)
        self.assertTrue(tuned["search"]["exhaustive"])
        lines = [json.loads(line) for line in gzip.open(file)]
        self.assertEqual(lines[0]["kind"], "cpu")
        self.assertEqual(len(lines) - 1 - lines[0]["groups"], tuned["counts"]["space"])

        plain = self.path("space.jsonl")
        Path(plain).write_bytes(gzip.decompress(Path(file).read_bytes()))
        document = self.document("tune", "--replay", file, plain, "--seeds", "3")
        self.assertEqual(document["seeds"], 3)
        for replayed in document["replays"]:
            self.assertEqual(replayed["configs"], tuned["counts"]["space"])
            self.assertEqual(replayed["problem"], tuned["problem"]["key"])
            for search in ("tuning", "local_search"):
                self.assertGreaterEqual(replayed[search]["regret"]["mean"], 0)
                self.assertGreater(replayed[search]["same_winner"], 0)
        self.assertEqual(document["replays"][0]["tuning"], document["replays"][1]["tuning"])
        for transfer in document["transfers"]:
            self.assertAlmostEqual(transfer["over_best"], 1)
        self.assertEqual(len(document["transfers"]), 2)
        self.assertIn("within 1%", self.wyvern("tune", "--replay", file, "--seeds", "2").stdout)

    def test_a_short_tuning_says_what_became_of_it(self):
        """Whether the default plan stays; and the bar shows no time where its estimate has run out."""
        explain = ("cache", "explain", OP, "--shape", SHAPE, "--device", "cpu")
        default = self.document(*explain)["plan"]
        ours, terminal = pty.openpty()
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(self.cache))
        done = subprocess.run([WYVERN, "tune", OP, "--shape", SHAPE, "--device", "cpu", "--budget", "2s"],
                              env=environment, stdout=subprocess.PIPE, stderr=terminal, text=True,
                              timeout=300, check=True)
        os.close(terminal)
        bar = os.read(ours, 1 << 20).decode()
        os.close(ours)
        self.assertIn("tuning [", bar)
        self.assertNotIn(" 0.0 s left", bar)
        stays = self.document(*explain)["plan"] == default
        self.assertEqual("default one beyond noise, so it stays" in done.stdout, stays, done.stdout)

    def test_without_proc(self):
        """What is missing is named, and what to do."""
        hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
        if subprocess.run([*hidden, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("no mounts of its own for a test")
        done = subprocess.run([*hidden, WYVERN, "tune", OP, "--shape", SHAPE, "--device", "cpu"],
                              env=dict(os.environ, WYVERN_CACHE_DIR=str(self.cache)), text=True,
                              capture_output=True, timeout=300, check=False)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("cannot read the link /proc/self/exe", done.stderr)
        self.assertIn("mount /proc", done.stderr)

    def test_bad_recordings(self):
        bad = self.path("bad.jsonl")
        Path(bad).write_text('{"wyvern_tuning": 7}\n')
        self.refuses("tune", "--replay", bad, names=["bad.jsonl", "line 1", "7"])
        self.refuses("tune", "--replay", self.path("absent"), names=["absent"])
        self.refuses("tune", OP, "--replay", bad, names=["--replay", "OP"])
        self.refuses("tune", OP, "--shape", SHAPE, "--record", bad, names=["--exhaustive"])

    def manifest(self, *lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        Path(self.path("problems.jsonl")).write_text(text)
        return ("tune", "--manifest", self.path("problems.jsonl"))

    def test_manifest(self):
        tune = self.manifest({"operator": OP, "shape": SHAPE},
                             "",
                             {"operator": OP, "shape": {"T": 40, "H": 1, "K": 16}},  # the same
                             {"operator": "kda", "shape": "H=1,K=16", "seqlens": [5, 0, 7],
                              "use_qk_l2norm": True, "pass": "recurrent"})  # of one config
        document = self.document(*tune, *TUNE)
        self.assertEqual(document["problems"], 2)
        self.assertEqual(document["shard"], {"index": 0, "count": 1})
        self.assertTrue(document["complete"])
        self.assertEqual([tuning["line"] for tuning in document["tunings"]], [1, 4])
        self.assertEqual(document["tunings"][1]["problem"]["N"], 3)
        self.assertTrue(document["tunings"][1]["problem"]["use_qk_l2norm"])
        for tuning in document["tunings"]:
            self.assertTrue(tuning["stored"])
        again = self.document(*tune, *TUNE)
        self.assertEqual([t["counts"]["measured"] for t in again["tunings"]], [0, 0])
        self.assertEqual(self.document("cache", "stats")["winners"], 2)

    def test_problems_by_fields_and_by_sequences(self):
        fields = {"T": 40, "H": 1, "K": 16, "use_qk_l2norm": True, "g_dtype": "fp32"}
        tune = self.manifest({"operator": OP, "problem": fields},
                             {"operator": OP, "shape": "H=1,K=16", "seqlens": [30, 0, 10]})
        document = self.document(*tune, "--device", "cpu", "--budget", "0.1s")
        by_fields, packed = document["tunings"]
        self.assertFalse(by_fields["problem"]["initial_state"])
        self.assertTrue(by_fields["problem"]["use_qk_l2norm"])
        rows = [self.document("cache", "show", row["id"])
                for row in self.document("cache", "list")["winners"]]
        self.assertEqual(sorted(row["setting"]["lengths"] for row in rows), [[], [30, 0, 10]])
        self.refuses(*self.manifest({"operator": OP, "problem": fields, "tokens": 8}),
                     names=["line 1", "alone"])
        self.refuses(*self.manifest({"operator": OP, "problem": {"T": 40, "x": 1}}),
                     names=["line 1", "'x'"])

    def test_a_fleet_stops_in_time_and_goes_on(self):
        shapes = [f"T={tokens},H=1,K=16" for tokens in (10, 20, 30)]
        tune = self.manifest(*[{"operator": OP, "shape": shape} for shape in shapes])
        tune += ("--device", "cpu", "--missing", "--budget", "0.5s")
        first = self.document(*tune, "--within", "0.6s", expect=3)
        self.assertEqual((first["known"], len(first["tunings"]), first["complete"]), (0, 1, False))
        rest = self.document(*tune)
        self.assertEqual((rest["known"], rest["complete"]), (1, True))
        self.assertEqual([tuning["line"] for tuning in rest["tunings"]], [2, 3])
        done = self.document(*tune)
        self.assertEqual((done["known"], done["tunings"], done["complete"]), (3, [], True))
        self.refuses(*tune, "--within", "0.4s", names=["--within", "0.4s", "0.5s"])
        for option in (("--within", "9s"), ("--missing",)):
            self.refuses("tune", OP, "--shape", SHAPE, *option, names=[option[0], "--manifest"])

    def test_a_preset_is_all_calls_of_its_model(self):
        """In one budget, each tuned for itself; --pass and options say which, and how."""
        tune = ("tune", OP, "--preset", "qwen3-next-80b", "--tokens", "16", "--device", "cpu",
                "--budget", "2s")
        document = self.document(*tune)
        calls = {call["call"]: call["problem"] for call in document["calls"]}
        states = {"first prefill": (False, True), "continued prefill": (True, True),
                  "training, forward": (False, False), "training, backward": (False, False),
                  "decoding": (True, True), "training, forward, packed": (False, False),
                  "training, backward, packed": (False, False)}
        self.assertEqual(list(calls), [f"{library}: {call}" for library in (
            "transformers", "transformers, layers") for call in states])
        for name, problem in calls.items():
            library, call = name.split(": ")
            in_place = library == "transformers, layers" and call == "decoding"
            given = (False, False) if in_place else states[call]
            self.assertEqual((problem["initial_state"], problem["output_final_state"]), given)
            self.assertEqual((problem["inplace_state"], problem["inplace_conv_state"]), (in_place,) * 2)
            self.assertTrue(problem["use_qk_l2norm"], name)
            self.assertEqual(problem["T"], 1 if call == "decoding" else 16)
            whole = library == "transformers, layers"
            around = [problem[field] for field in (
                "short_conv", "output_norm", "initial_conv_state", "output_conv_state", "keep_output")]
            self.assertEqual(around, [4, "silu", *given, call.startswith("training, forward")]
                             if whole else [None, None, False, False, False], name)
        self.assertEqual(document["problem"], calls["transformers: first prefill"])
        self.assertTrue(all(call["stored"] for call in document["calls"]))
        layer = ("--use-gate-in-kernel", "--use-beta-sigmoid", "--short-conv", "4", "--output-norm", "silu")
        for call, options, dtypes in (
                ("transformers", (), ()),
                ("transformers, layers", layer, ("--conv-dtype", "bf16", "--g-dtype", "bf16"))):
            self.wyvern("example", *tune[1:6], *options, *dtypes, "-o", self.path("in.safetensors"))
            run = self.document("run", OP, "--use-qk-l2norm", *options, "--device", "cpu", "--input",
                                self.path("in.safetensors"), "--output", self.path("out.safetensors"))
            self.assertEqual(run["problem"]["key"], calls[f"{call}: first prefill"]["key"])
            self.assertEqual(run["origin"], "exact")

    def test_steps_that_are_decoded_as_tokens(self):
        """FLA's layer decodes a token of two steps as two tokens, in given sequences too."""
        document = self.document(
            "tune", "gated_delta_product", "--preset", "fla-gated-deltaproduct", "--pass", "recurrent",
            "--seqlens", "5,0,7", "--num-householder", "2", "--device", "cpu", "--budget", "1s")
        for call in document["calls"]:
            self.assertTrue(call["problem"]["key"].startswith("delta_rule/recurrent/"), call)
            self.assertEqual(call["problem"]["T"], 24)
            self.assertTrue(call["stored"])

    def test_calls_of_a_preset_that_options_leave(self):
        """A manifest's line stands for the same problems; within so short a time none is begun."""
        def problems(**line):
            return len(self.calls(OP, "qwen3-next-80b", **line)["not_begun"])
        # Of operators, and of layers.
        self.assertEqual(problems(), 7 + 7)
        self.assertEqual(problems(**{"pass": "forward"}), 4 + 4)
        self.assertEqual(problems(**{"pass": "backward"}), 2 + 2)
        self.assertEqual(problems(seqlens=[5, 11]), 6 + 6)
        self.assertEqual(problems(inplace_state=True), 3 + 2)  # of layers no training
        self.refuses("tune", OP, "--preset", "qwen3-next-80b", "--lower-bound", "-5",
                     names=["lower_bound"])

    def calls(self, operator, preset, **line):
        """The document of a manifest of these calls; within so short a time none is begun."""
        tune = self.manifest({"operator": operator, "preset": preset, "tokens": 16, **line})
        return self.document(*tune, "--device", "cpu", "--budget", "0.1s", "--within", "0.1s",
                             expect=3)

    def test_calls_that_are_left_out_are_named(self):
        left_out = self.calls(OP, "qwen3-next-80b", seqlens=[5, 11])["left_out"]
        self.assertEqual([(call["line"], call["call"]) for call in left_out],
                         [(1, "transformers: decoding"), (1, "transformers, layers: decoding")])
        for call in left_out:
            self.assertIn("--seqlens is 5,11", call["reason"])
        self.assertEqual(self.calls(OP, "qwen3-next-80b", **{"pass": "backward"})["left_out"], [])
        tune = ("tune", OP, "--preset", "qwen3-next-80b", "--tokens", "16", "--inplace-state",
                "--device", "cpu", "--budget", "0.1s")
        document = self.document(*tune)
        self.assertIn("transformers: decoding", [call["call"] for call in document["calls"]])
        names = [call["call"] for call in document["left_out"]]
        layers = [name for name in names if name.startswith("transformers, layers: training, ")]
        self.assertEqual(names, ["transformers: training, backward",
                                 "transformers: training, backward, packed", *layers])
        self.assertEqual(len(layers), 4)
        lines = [line for line in self.wyvern(*tune).stdout.splitlines()
                 if line.startswith("left out: ")]
        for name in names:
            (line,) = (line for line in lines if name in re.split(r"^left out: |; | \(", line))
            self.assertIn("inplace_state", line)
        self.assertNotIn("left out", self.wyvern(
            *tune[:6], "--pass", "recurrent", *tune[7:]).stdout)

    def test_calls_of_layers_that_pack_and_take_short_prefills_by_the_recurrent_pass(self):
        left = self.calls("delta_rule", "fla-deltanet-1.3b", batch=2)["not_begun"]
        problems = {call["call"]: call["problem"] for call in left}
        names = ["first prefill", "continued prefill", "training, forward", "training, backward",
                 "decoding", "short first prefill", "short continued prefill"]
        self.assertEqual(list(problems), [f"fla: {name}{packed}" for packed in ("", ", packed")
                                          for name in names])
        for name in names:
            padded, packed = (problems[f"fla: {name}{x}"] for x in ("", ", packed"))
            tokens = 1 if name == "decoding" else 16
            self.assertEqual((padded["B"], padded["T"], padded["N"]), (2, tokens, 2), name)
            self.assertEqual((packed["B"], packed["T"], packed["N"]), (1, 2 * tokens, 2), name)
            self.assertIn("/packed=int32", packed["key"])
        for packed in ("", ", packed"):
            first, more, decoding = (problems[f"fla: {name}{packed}"] for name in (
                "short first prefill", "short continued prefill", "decoding"))
            self.assertEqual([x["pass"] for x in (first, more)], ["recurrent"] * 2)
            self.assertEqual([x["initial_state"] for x in (first, more)], [False, True])
            self.assertEqual(more["key"].replace("tokens=32", "tokens=2"), decoding["key"])
        longer = self.calls("delta_rule", "fla-deltanet-1.3b", tokens=100)["not_begun"]
        self.assertEqual([call["problem"]["T"] for call in longer if "short" in call["call"]],
                         [64] * 4)

    def test_kda_with_and_without_a_bound(self):
        left = self.calls("kda", "kimi-linear-48b")["not_begun"]
        keys = {call["call"]: call["problem"]["key"] for call in left}
        for name in ("first prefill", "training, backward", "decoding, packed"):
            self.assertIn(",bounded", keys[f"fla: {name}"])
            self.assertEqual(keys[f"fla: {name}"].replace(",bounded", ""),
                             keys[f"fla, no lower bound: {name}"])
        # Layers' training steps in a batch are the same for both libraries without a bound.
        self.assertEqual(len(keys), 14 + 5 + 14 + (9 + 5 + 7))
        without = self.calls("kda", "kimi-linear-48b", lower_bound="none")["not_begun"]
        self.assertEqual(len(without), 14 + 5 + (9 + 3))

    def test_shards_are_parts_of_the_whole(self):
        shapes = [f"T={tokens},H=1,K=16" for tokens in (10, 20, 30, 40)]
        tune = self.manifest(*[{"operator": OP, "shape": shape} for shape in shapes])
        seen = []
        for index in range(2):
            document = self.document(*tune, "--device", "cpu", "--budget", "0.1s",
                                     "--shard", f"{index}/2")
            self.assertEqual(document["shard"], {"index": index, "count": 2})
            self.assertIn(f"shard-{index}-of-2", document["cache"])
            seen += [tuning["line"] for tuning in document["tunings"]]
        self.assertEqual(sorted(seen), [1, 2, 3, 4])

    def index(self, *arguments, **variables):
        """The shard that a run takes itself for; the manifest's problems are in none or done soon."""
        environment = dict(os.environ, WYVERN_CACHE_DIR=str(self.cache), **variables)
        done = subprocess.run([WYVERN, "tune", "--json", *arguments], env=environment,
                              capture_output=True, text=True, timeout=300, check=False)
        document = json.loads(done.stdout)
        return document["shard"] if "shard" in document else document["error"]["message"]

    def test_all_gpus_where_there_is_none(self):
        if any(d["kind"] == "cuda" and d["usable"] for d in self.document("devices")["devices"]):
            self.skipTest("this machine has a GPU")
        self.refuses(*self.manifest({"operator": OP, "shape": SHAPE}), "--device", "all",
                     names=["--device", "no GPU"], code=3)

    def test_shards_of_arrays(self):
        tune = self.manifest({"operator": OP, "shape": SHAPE})[1:]
        tune += ("--device", "cpu", "--budget", "0.1s")
        slurm = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "3",
                 "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_STEP": "2"}
        self.assertEqual(self.index(*tune, **slurm), {"index": 1, "count": 3})
        self.assertEqual(self.index(*tune, "--shard", "9", **slurm), {"index": 7, "count": 9})
        self.assertEqual(self.index(*tune, "--shard", "2/4", **slurm), {"index": 2, "count": 4})
        self.assertEqual(self.index(*tune, "--shard", "4", JOB_COMPLETION_INDEX="3"),
                         {"index": 3, "count": 4})
        self.assertIn("give --shard N", self.index(*tune, JOB_COMPLETION_INDEX="3"))
        self.assertIn("from 0 to 2", self.index(*tune, "--shard", "3", JOB_COMPLETION_INDEX="3"))
        self.assertIn("SLURM_ARRAY_TASK_ID", self.index(*tune, SLURM_ARRAY_TASK_ID="x"))

    def test_a_parent_that_is_another(self):
        """The tuning ends before it begins where the process that wanted it is not there."""
        tune = ("tune", OP, "--shape", SHAPE, *TUNE, "--parent")
        self.refuses(*tune, "1", names=["interrupted"], code=3)
        self.refuses(*tune, "0", names=["--parent", "from 1"])
        own = self.document("tune", OP, "--shape", SHAPE, "--device", "cpu", "--budget", "0.1s",
                            "--parent", os.getpid())
        self.assertTrue(own["stored"])

    def test_bad_manifests(self):
        good = {"operator": OP, "shape": SHAPE}
        self.refuses(*self.manifest(good, {**good, "colour": 1}), names=["line 2", "colour"])
        self.refuses(*self.manifest({**good, "device": "cpu"}), names=["line 1", "device"])
        self.refuses(*self.manifest({"shape": SHAPE}), names=["line 1", "operator"])
        self.refuses(*self.manifest("[1]"), names=["line 1", "object"])
        self.refuses(*self.manifest("{"), names=["line 1"])
        self.refuses(*self.manifest({**good, "chunk_size": 7}), names=["line 1", "chunk"])
        self.refuses(*self.manifest(""), names=["no problem"])
        tune = self.manifest(good)
        self.refuses(*tune, "--shard", "3/3", names=["from 0 to 2"])
        self.refuses(*tune, "--shard", "x", names=["--shard", "x"])
        self.refuses(*tune, "--record", "f", names=["--record", "--manifest"])
        self.refuses("tune", OP, "--shape", SHAPE, "--shard", "0/2", names=["--manifest"])
        self.refuses("tune", OP, "--shape", SHAPE, "--device", "all", names=["--device", "all"])


if __name__ == "__main__":
    unittest.main()
