"""The way of a user on the CPU: example, tune, run, and everything found the second time."""

import json
import struct
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import OP, Case, check_schema, read_file, write_file

SHAPE = "B=2,T=70,H=1,HV=2,K=32,V=48"


class Work(Case):
    def run_verb(self, *options, output="out.safetensors"):
        return self.document("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                             "--output", self.path(output), *options)

    def check_verified(self, document):
        self.assertTrue(document["verified"])
        self.assertEqual([c["quantity"] for c in document["checks"]], ["o", "final_state"])
        for check in document["checks"]:
            self.assertLess(0, check["error"])
            self.assertLessEqual(check["error"], check["bound"])

    def test_tune_then_run(self):
        self.example("--shape", SHAPE)
        first = self.run_verb("--verify")
        self.check_verified(first)
        self.assertEqual(first["origin"], "default")
        self.assertGreater(first["compiled"], 0)

        tuned = self.document("tune", OP, "--shape", SHAPE, "--device", "cpu", "--budget", "20s")
        self.assertTrue(tuned["stored"])
        self.assertGreater(tuned["tuned_ms"], 0)
        self.assertGreater(tuned["counts"]["measured"], 0)
        self.assertEqual(tuned["counts"]["wrong"], 0)

        second = self.run_verb("--verify")
        self.check_verified(second)
        self.assertEqual(second["origin"], "exact")
        self.assertEqual(second["compiled"], 0)
        self.assertEqual(second["plan"], tuned["plan"])

        again = self.document("tune", OP, "--shape", SHAPE, "--device", "cpu")
        self.assertEqual(again["counts"]["measured"], 0)
        self.assertEqual(again["counts"]["compiled"], 0)
        self.assertEqual(again["plan"], tuned["plan"])
        fields = f"{SHAPE},initial_state=true,output_final_state=1"
        by_fields = self.document("tune", OP, "--problem", fields, "--device", "cpu")
        self.assertEqual(by_fields["problem"]["key"], tuned["problem"]["key"])
        self.assertEqual(by_fields["counts"]["measured"], 0)

        self.check_cache()
        self.check_bench()

    def test_many_cold_processes_compile_each_kernel_once(self):
        self.example("--shape", SHAPE)
        with ThreadPoolExecutor(max_workers=8) as threads:
            runs = list(threads.map(lambda i: self.run_verb(output=f"out{i}.safetensors"), range(8)))
        artifacts = self.document("cache", "stats")["artifacts"]
        self.assertGreater(artifacts, 0)
        self.assertEqual(sum(run["compiled"] for run in runs), artifacts)
        self.assertEqual(len({Path(self.path(f"out{i}.safetensors")).read_bytes()
                              for i in range(8)}), 1)

    def check_cache(self):
        listed = self.document("cache", "list")
        stats = self.document("cache", "stats")
        for kind in ("winners", "measurements", "artifacts"):
            self.assertGreater(len(listed[kind]), 0)
            self.assertEqual(stats[kind], len(listed[kind]))
            self.assertEqual(self.document("cache", "show", listed[kind][0]["id"])["id"],
                             listed[kind][0]["id"])
        key = listed["artifacts"][0]["id"]
        self.assertEqual(self.document("cache", "show", key[:16])["id"], key)
        text = self.wyvern("cache", "list").stdout
        self.assertIn(listed["winners"][0]["id"], text)
        self.wyvern("cache", "show", listed["winners"][0]["id"])

    def check_bench(self):
        document = self.document("bench", OP, "--shape", SHAPE, "--device", "cpu")
        tuned, default = document["plans"]
        self.assertEqual((tuned["name"], tuned["origin"]), ("tuned", "exact"))
        self.assertEqual(default["name"], "default")
        for plan in (tuned, default):
            self.assertTrue(plan["verified"])
            self.assertGreater(plan["ms"], 0)
            self.assertAlmostEqual(plan["percent_of_floor"] / 100,
                                   document["floor"]["ms"] / plan["ms"], places=6)
        # q, k; v, o; beta (16 bits) and g (32 bits); initial and final state.
        tokens = 2 * 70
        wanted = tokens * (2 * 32 * 2 + 2 * 2 * 48 * 2 + 2 * (2 + 4)) + 2 * 2 * (2 * 32 * 48 * 4)
        self.assertEqual(document["floor"]["bytes"], wanted)

    def test_bench_of_what_is_not_tuned(self):
        """The same says that nothing is tuned, and of what never is, why."""
        self.use_compiled_kernels()
        bench = ("bench", OP, "--shape", "T=40,H=1,K=16", "--device", "cpu")
        done = self.wyvern(*bench, "--json")
        document = json.loads(done.stdout)
        check_schema("bench", document)
        (default,) = document["plans"]
        self.assertEqual((default["name"], default["origin"]), ("default", "default"))
        self.assertTrue(default["verified"])
        self.assertIn("nothing is tuned", done.stderr)
        said = self.wyvern(*bench, "--batch-invariant").stderr
        self.assertIn("always has its default plan", said)
        self.assertNotIn("nothing is tuned", said)

    def test_nearest(self):
        self.wyvern("tune", OP, "--shape", "T=40,H=1,K=16", "--device", "cpu", "--budget", "5s")
        self.example("--shape", "T=300,H=1,K=16")
        document = self.run_verb("--verify")
        self.check_verified(document)
        self.assertEqual(document["origin"], "nearest")

    def test_options(self):
        self.use_compiled_kernels()
        self.example("--shape", "H=2,HV=4,K=20,V=36", "--seqlens", "5,0,77", "--dtype", "fp32")
        for options in ((), ("--use-qk-l2norm", "--scale", "0.5"), ("--use-gate-in-kernel",),
                        ("--use-beta-sigmoid", "--allow-neg-eigval"), ("--precision", "ieee"),
                        ("--precision", "tf32")):
            with self.subTest(options):
                self.check_verified(self.run_verb("--verify", *options))
        out = read_file(self.path("out.safetensors"))
        self.assertEqual(out["o"][:2], ("F32", [1, 82, 4, 36]))
        self.assertEqual(out["final_state"][:2], ("F32", [3, 4, 20, 36]))

    def test_state_v_first(self):
        self.use_compiled_kernels()
        tensors = read_file(self.example("--shape", "T=33,H=1,K=16,V=32"))
        tensors["initial_state"] = ("F32", [1, 1, 32, 16], tensors["initial_state"][2])
        write_file(self.path("in.safetensors"), tensors)
        self.check_verified(self.run_verb("--verify", "--state-v-first"))
        self.assertEqual(read_file(self.path("out.safetensors"))["final_state"][1], [1, 1, 32, 16])

    def test_no_state_int32_seqlens(self):
        self.use_compiled_kernels()
        tensors = read_file(self.example("--shape", "H=1,K=16", "--seqlens", "3,20", "--dtype", "fp16"))
        del tensors["initial_state"], tensors["A_log"], tensors["dt_bias"]
        tensors["cu_seqlens"] = ("I32", [3], struct.pack("<3i", 0, 3, 23))
        write_file(self.path("in.safetensors"), tensors)
        document = self.run_verb("--verify")
        self.check_verified(document)
        self.assertEqual(document["problem"]["seqlens_dtype"], "int32")

    def test_no_tokens(self):
        tensors = read_file(self.example("--shape", "T=0,H=1,K=16"))
        document = self.run_verb("--verify")
        self.assertTrue(document["verified"])
        out = read_file(self.path("out.safetensors"))
        self.assertEqual(out["o"][1], [1, 0, 1, 16])
        self.assertEqual(out["final_state"][2], tensors["initial_state"][2])

    def test_same_bytes_every_time(self):
        self.example("--shape", "T=130,H=2,K=64")
        self.run_verb(output="a")
        self.run_verb(output="b")
        self.assertEqual(Path(self.path("a")).read_bytes(), Path(self.path("b")).read_bytes())

    def test_failed_check(self):
        """An input with a NaN has outputs beyond any bound: exit code 1, and the document says so."""
        self.use_compiled_kernels()
        tensors = read_file(self.example("--shape", "T=4,H=1,K=16", "--dtype", "fp32"))
        dtype, shape, raw = tensors["v"]
        tensors["v"] = (dtype, shape, struct.pack("<f", float("nan")) + raw[4:])
        write_file(self.path("in.safetensors"), tensors)
        document = self.document("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                                 "--output", self.path("o"), "--verify", expect=1)
        self.assertFalse(document["verified"])
        self.assertIsNone(document["checks"][0]["error"])

    def test_missing_gpu(self):
        devices = self.document("devices")["devices"]
        if any(d["name"] == "cuda:7" for d in devices):
            self.skipTest("this machine has eight GPUs")
        self.example("--shape", "T=4,H=1,K=16")
        self.refuses("run", OP, "--device", "cuda:7", "--input", self.path("in.safetensors"),
                     "--output", self.path("o"), names=[], code=3)

    def test_text(self):
        self.example("--shape", "T=4,H=1,K=16")
        done = self.wyvern("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"),
                           "--output", self.path("o"), "--verify")
        for word in ("fwd_h.cpu", "compiled", "final_state", "yes"):
            self.assertIn(word, done.stdout)
        self.assertEqual(done.stderr, "")

    def test_bad_tuning_options(self):
        tune = ("tune", OP, "--shape", "T=4,H=1,K=16", "--device", "cpu")
        self.refuses(*tune, "--budget", "soon", names=["--budget", "soon", "60s"])
        self.refuses(*tune, "--budget", "0s", names=["--budget", "0s"])
        self.refuses(*tune, "--jobs", "-2", names=["--jobs", "-2"])


if __name__ == "__main__":
    unittest.main()
