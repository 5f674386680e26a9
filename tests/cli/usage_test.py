"""Verbs that need no tuning: what they print, and what they refuse."""

import unittest
from pathlib import Path

from support import OP, Case, read_file


class Usage(Case):
    def test_no_verb(self):
        self.refuses(names=["verb", "missing", "devices", "cache"])

    def test_unknown_verb(self):
        self.refuses("frobnicate", names=["frobnicate", "devices", "cache"])

    def test_unknown_option(self):
        self.refuses("run", OP, "--colour", names=["--colour", "--input", "--verify"])

    def test_option_without_value(self):
        self.refuses("run", OP, "--input", names=["--input"])
        self.refuses("run", OP, "--input", "--output", "x", names=["--input", "--output"])

    def test_option_twice(self):
        self.refuses("run", OP, "--device", "cpu", "--device", "cpu", names=["--device"])

    def test_help(self):
        self.assertIn("devices", self.wyvern("--help").stdout)
        self.assertIn("--verify", self.wyvern("run", "--help").stdout)

    def test_unknown_operator(self):
        for verb in ("example", "run", "tune", "bench"):
            self.refuses(verb, "softmax", names=["softmax", OP])
            self.refuses(verb, names=["OP", "missing", OP])

    def test_selection(self):
        example = ("example", OP, "-o", "x.safetensors")
        self.refuses(*example, names=["--preset", "--shape"])
        self.refuses(*example, "--preset", "gpt-2", names=["gpt-2", "qwen3-next-80b"])
        self.refuses(*example, "--preset", "kimi-linear-48b",
                     names=["kimi-linear-48b", "qwen3-next-80b"])
        self.refuses(*example, "--preset", "qwen3-next-80b", "--tokens", "-1",
                     names=["--tokens", "-1"])
        self.refuses(*example, "--shape", "T=8,H=1", names=["--shape", "K"])
        self.refuses(*example, "--shape", "T=8,H=1,K=16,Q=2", names=["Q=2", "HV"])
        self.refuses(*example, "--shape", "T=8,T=8,H=1,K=16", names=["T", "twice"])
        self.refuses(*example, "--shape", "T=8,H=0,K=16", names=["H", "0", "1"])
        self.refuses(*example, "--shape", "T=8,H=2,HV=3,K=16", names=["HV", "3", "2"])
        self.refuses(*example, "--shape", "T=8,H=1,K=257", names=["K", "257", "256"])
        self.refuses(*example, "--shape", "T=8,H=1,K=16", "--dtype", "int8",
                     names=["--dtype", "int8", "bf16"])
        self.refuses(*example, "--shape", "T=8,H=1,K=16", "--seqlens", "4,5", names=["T", "8", "9"])
        self.refuses(*example, "--shape", "H=1,K=16", "--seqlens", "4,x", names=["--seqlens", "x"])
        self.refuses(*example, "--shape", "B=2,H=1,K=16", "--seqlens", "4", names=["B", "2", "1"])
        self.refuses(*example, "--shape", "T=8,H=1,K=16", "--seed", "pi", names=["--seed", "pi"])
        self.refuses("example", OP, "--shape", "T=8,H=1,K=16", names=["--output", "missing"])
        self.assertFalse((self.folder / "x.safetensors").exists())

    def test_too_large(self):
        self.refuses("example", OP, "--shape", "B=1000,T=1000000,H=1000,K=256", "-o",
                     "x.safetensors", names=["memory"])

    def test_unwritable_output(self):
        self.refuses("example", OP, "--shape", "T=8,H=1,K=16", "-o", "/nowhere/x", names=["/nowhere/x"])

    def test_devices(self):
        document = self.document("devices")
        self.assertEqual(document["devices"][0]["name"], "cpu")
        self.assertGreater(document["devices"][0]["units"], 0)
        self.assertEqual({c["kind"] for c in document["compilers"]}, {"cpu", "cuda"})
        self.assertIn("cpu", self.wyvern("devices").stdout)

    def test_stages(self):
        stages = {s["name"]: s["templates"] for s in self.document("stages")["stages"]}
        needed = {"chunk_local_cumsum", "l2norm", "l2norm_rstd", "gate", "scaled_dot_kkt",
                  "solve_tril", "recompute_w_u", "fwd_h", "fwd_o", "kkt_solve_wu"}
        self.assertLessEqual(needed, set(stages))
        for templates in stages.values():
            for template in templates:
                self.assertGreater(template["space_size"], 0, template["id"])
        fused = {t["id"] for t in stages["kkt_solve_wu"]}
        for covered in ("scaled_dot_kkt", "solve_tril", "recompute_w_u"):
            self.assertLessEqual(fused, {t["id"] for t in stages[covered]})
        text = self.wyvern("stages").stdout
        for name in stages:
            self.assertIn(name, text)


class Example(Case):
    def test_tensors(self):
        tensors = read_file(self.example("--shape", "B=2,T=5,H=2,HV=4,K=60,V=100"))
        self.assertEqual({name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}, {
            "q": ("BF16", [2, 5, 2, 60]), "k": ("BF16", [2, 5, 2, 60]),
            "v": ("BF16", [2, 5, 4, 100]), "beta": ("BF16", [2, 5, 4]), "g": ("F32", [2, 5, 4]),
            "initial_state": ("F32", [2, 4, 60, 100]), "A_log": ("F32", [4]),
            "dt_bias": ("F32", [4])})

    def test_packed(self):
        tensors = read_file(self.example("--shape", "H=1,K=16", "--seqlens", "5,0,77"))
        dtype, shape, raw = tensors["cu_seqlens"]
        self.assertEqual((dtype, shape), ("I64", [4]))
        self.assertEqual(memoryview(raw).cast("q").tolist(), [0, 5, 5, 82])
        self.assertEqual(tensors["initial_state"][1], [3, 1, 16, 16])

    def test_preset(self):
        tensors = read_file(self.example("--preset", "qwen3-next-80b", "--tokens", "3",
                                         "--dtype", "fp16"))
        self.assertEqual(tensors["q"][:2], ("F16", [1, 3, 16, 128]))
        self.assertEqual(tensors["v"][:2], ("F16", [1, 3, 32, 128]))

    def test_values(self):
        tensors = read_file(self.example("--shape", "T=400,H=3,K=40", "--dtype", "fp32"))
        def numbers(name):
            return memoryview(tensors[name][2]).cast("f").tolist()
        self.assertTrue(all(-0.6932 < g < -0.001 for g in numbers("g")))
        self.assertTrue(all(0 < beta < 1 for beta in numbers("beta")))
        k = numbers("k")
        for row in range(0, len(k), 40):
            self.assertAlmostEqual(sum(x * x for x in k[row:row + 40]), 1, places=5)
        v = numbers("v")
        self.assertAlmostEqual(sum(v) / len(v), 0, delta=0.05)
        self.assertAlmostEqual(sum(x * x for x in v) / len(v), 1, delta=0.05)

    def test_seed(self):
        def content(*seed):
            return Path(self.example("--shape", "T=9,H=1,K=16", *seed)).read_bytes()
        self.assertEqual(content("--seed", "7"), content("--seed", "7"))
        self.assertNotEqual(content("--seed", "7"), content("--seed", "8"))
        self.assertEqual(content(), content("--seed", "0"))


class Compile(Case):
    def test_source(self):
        document = self.document("compile", "solve_tril", "--arch", "sm_90a", "--config", "BT=32",
                                 "--emit", "source", "-o", self.path("x.cu"))
        self.assertEqual(document["config"]["BT"], 32)
        text = Path(self.path("x.cu")).read_text()
        self.assertIn("constexpr int BT = 32;", text)
        self.assertIn("wyvern_kernel", text)

    def test_every_listed_name(self):
        kinds = {"cpu": "native-cpu", "cuda": "sm_80"}
        for stage in self.document("stages")["stages"]:
            for device in {t["device"] for t in stage["templates"]}:
                self.wyvern("compile", stage["name"], "--arch", kinds[device], "--emit", "source",
                            "-o", self.path("x"))

    def test_cpu(self):
        if not any(c["usable"] for c in self.document("devices")["compilers"] if c["kind"] == "cpu"):
            self.skipTest("no compiler of CPU kernels here")
        for emit in ("llvm-ir", "asm", "object"):
            document = self.document("compile", "fwd_o", "--arch", "native-cpu", "--emit", emit,
                                     "--shape", "K=64", "-o", self.path(emit))
            self.assertEqual(document["bytes"], Path(self.path(emit)).stat().st_size)
            self.assertGreater(document["bytes"], 0)
            self.assertGreater(document["compile_ms"], 0)

    def test_cuda(self):
        if not any(c["usable"] for c in self.document("devices")["compilers"] if c["kind"] == "cuda"):
            self.skipTest("no NVRTC here")
        for emit, start in (("ptx", b"//"), ("cubin", b"\x7fELF")):
            document = self.document("compile", "fwd_h", "--arch", "sm_80", "--emit", emit,
                                     "--dtype", "fp16", "-o", self.path(emit))
            self.assertEqual(Path(self.path(emit)).read_bytes()[:len(start)], start)
            self.assertGreater(document["registers"], 0)
            self.assertGreaterEqual(document["dynamic_shared_bytes"], 0)
            self.assertGreaterEqual(document["spill_bytes"], 0)

    def test_refusals(self):
        good = ["--arch", "sm_80", "--emit", "source", "-o", "x"]
        self.refuses("compile", "matmul", *good, names=["STAGE", "matmul", "solve_tril"])
        self.refuses("compile", *good, names=["STAGE", "missing"])
        self.refuses("compile", "fwd_o", *good, "--config", "BT=7", names=["BT", "7", "64"])
        self.refuses("compile", "fwd_o", *good, "--config", "XY=7", names=["XY", "BT"])
        self.refuses("compile", "fwd_o", *good, "--config", "BT", names=["BT", "NAME=VALUE"])
        self.refuses("compile", "fwd_o", "--arch", "sm_12", "--emit", "source", "-o", "x",
                     names=["sm_12", "sm_90a"])
        self.refuses("compile", "fwd_o", "--arch", "sm_80", "--emit", "wasm", "-o", "x",
                     names=["--emit", "wasm", "cubin"])
        self.refuses("compile", "fwd_o", "--arch", "sm_80", "--emit", "llvm-ir", "-o", "x",
                     names=["llvm-ir", "cubin"])
        self.refuses("compile", "fwd_o", "--emit", "source", "-o", "x", names=["--arch", "missing"])


class CacheVerb(Case):
    def test_path(self):
        self.assertEqual(self.wyvern("cache", "path").stdout.strip(), str(self.cache / "wyvern.db"))
        self.assertEqual(self.document("cache", "path"), {"path": str(self.cache / "wyvern.db")})

    def test_empty(self):
        document = self.document("cache", "list")
        self.assertEqual(document, {"winners": [], "measurements": [], "artifacts": []})
        self.assertEqual(self.document("cache", "stats")["artifacts"], 0)

    def test_refusals(self):
        self.refuses("cache", names=["missing", "path", "clear"])
        self.refuses("cache", "prune", names=["prune", "path", "clear"])
        self.refuses("cache", "show", names=["ID", "missing"])
        for unknown in ("w1", "m1", "0123abc"):
            self.refuses("cache", "show", unknown, names=["ID", unknown])
        self.refuses("cache", "path", "w1", names=["w1", "show"])


if __name__ == "__main__":
    unittest.main()
