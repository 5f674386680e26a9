"""Verbs that need no tuning: what they print, and what they refuse."""

import ast
import doctest
import hashlib
import json
import os
import re
import subprocess
import unittest
from pathlib import Path
from unittest import mock

from support import FULL, OP, WYVERN, Case, read_file


class Usage(Case):
    def test_no_verb(self):
        self.assertEqual(self.wyvern().stdout, self.wyvern("--help").stdout)
        error = json.loads(self.wyvern("--json", expect=2).stdout)["error"]
        for name in ("verb", "missing", "devices", " more"):
            self.assertIn(name, error["message"])

    def test_values_of_flags(self):
        """Every flag of every verb takes true and false, and refuses what is neither. In the short
        suite the flags of a verb meet the refused values by turns."""
        verbs = re.findall(r"^  ([a-z]+) ", self.wyvern().stdout.split("Subcommands:")[1], re.M)
        self.assertLessEqual({"run", "tune", "compile"}, set(verbs))
        for verb in verbs:
            text = self.wyvern(verb, "--help").stdout
            flags = re.findall(r"^  (--[-A-Za-z0-9]+)(?! TEXT)(?: |$)", text, re.M)
            self.assertIn("--json", flags)
            values = ("maybe", "2", "-", "99999999999999999999", "tru\ne")
            for i, flag in enumerate(flags):
                for value in values if FULL else (values[i % len(values)],):
                    self.refuses(verb, f"{flag}={value}", names=[flag, "true", "false"])

    def test_names_that_would_act_on_a_terminal(self):
        for name, shown in (("soft\nmax", "soft\\nmax"), ("\x1b[31mred", "\\x1b[31mred"),
                            ("a\rb\x07\x7f", "a\\x0db\\x07\\x7f"), ("\udcff\udcc3", "\\xff\\xc3"),
                            ("\x9b2J", "\\xc2\\x9b2J"), ("\u202eba", "\\xe2\\x80\\xaeba"),
                            ("groß-日本", "groß-日本")):
            self.refuses("run", name, names=[shown, OP])
            self.refuses(name, names=[shown, "must be one of"])
            self.refuses("run", OP, name, names=[shown, "--input"])
            self.refuses("run", OP, "--input", f"/nowhere/{name}", "--output", "x", names=[shown])
            self.refuses("cache", "show", name, names=[shown])
        self.wyvern("example", OP, "--shape", "T=1,H=1,K=16", "-o", self.path("a\x1b[2Jb"))
        text = self.wyvern("example", OP, "--shape", "T=1,H=1,K=16", "-o", self.path("a\nb")).stdout
        self.assertIn("a\\nb:", text)

    def test_long_arguments(self):
        long = "x" * 100_000
        self.refuses("run", long, names=["OP is 'xxx", "it must be one of", OP])
        self.refuses(long, names=["xxx", "it must be one of"])
        self.refuses("example", OP, "-o", "x", "--shape", f"T=8,H=1,K={'9' * 100_000}",
                     names=["--shape", "999", "NAME=INTEGER"])

    def test_unknown_verb(self):
        self.refuses("device", names=["'device'", "one of devices, ", " more"])

    def test_what_was_meant(self):
        self.refuses("tnue", names=["'tnue'", "(did you mean tune?)"])
        self.refuses("cache", "explian", names=["(did you mean explain?)"])
        self.refuses("run", "gated_delta_rul", names=["(did you mean gated_delta_rule?)"])
        self.refuses("run", OP, "--verfy", names=["(did you mean --verify?)"])

    def test_first_example(self):
        """The command alone shows commands that work as they stand, in this order."""
        commands = re.findall(r"^    wyvern (.*)$", self.wyvern().stdout, re.M)
        self.assertEqual([line.split()[0] for line in commands], ["example", "run", "tune"])
        self.use_compiled_kernels()
        for line in commands[:2]:
            self.wyvern(*line.split(), *([] if line.startswith("example") else ["--device", "cpu"]))

    def test_unknown_option(self):
        self.refuses("run", OP, "--inputs", names=["--inputs", "takes --input, ", " more", "--help"])

    def test_option_without_value(self):
        self.refuses("run", OP, "--input", names=["--input"])
        self.refuses("run", OP, "--input", "--output", "x", names=["--input", "--output"])

    def test_option_twice(self):
        self.refuses("run", OP, "--device", "cpu", "--device", "cpu", names=["--device"])

    def test_help(self):
        self.assertIn("devices", self.wyvern("--help").stdout)
        self.assertIn("--verify", self.wyvern("run", "--help").stdout)

    def test_options_are_documented(self):
        """tools/README.md names the options that select a problem, and no others."""
        page = (Path(__file__).parents[2] / "tools" / "README.md").read_text()
        section = page.split("## Selecting a problem")[1].split("\n## ")[0]
        options = re.compile(r"--[A-Za-z][-A-Za-z0-9]*")
        shown = set(options.findall(self.wyvern("example", "--help").stdout))
        named = set(options.findall(section))
        general = {"--help", "--json", "--seed", "--output"}
        self.assertLessEqual({"--pass", "--num-householder", "--no-A-log"}, shown)
        self.assertEqual(shown - general - named, set(), "not in tools/README.md")
        shown |= set(options.findall(self.wyvern("tune", "--help").stdout)) & {
            "--problem", "--budget", "--record"}
        self.assertEqual({name for name in named if not name.endswith("-")} - shown - {"--help"},
                         set(), "no option of this build")

    def test_help_says_where_an_option_applies(self):
        text = " ".join(self.wyvern("example", "--help").stdout.split())
        self.assertRegex(text, r"--lower-bound .{,80}; gdn2, kda\b[a-z0-9_, ]* only")
        self.assertRegex(text, r"--inplace-state .{,80}; forward, recurrent only")

    def test_num_householder(self):
        self.refuses("example", OP, "-o", "x", "--shape", "T=8,H=1,K=16", "--num-householder", "2",
                     names=["num_householder", "2", OP])
        self.refuses("example", OP, "-o", "x", "--shape", "T=8,H=1,K=16", "--num-householder", "0",
                     names=["--num-householder", "0", "1"])
        self.refuses("example", OP, "-o", "x", "--shape", "T=8,H=1,K=16", "--no-g",
                     names=["has_g", OP])
        self.refuses("example", "gated_delta_product", "-o", "x", "--shape", "T=8,H=1,K=16",
                     "--num-householder", "0", names=["--num-householder", "0", "1"])

    def test_unknown_operator(self):
        for verb in ("example", "run", "tune", "bench", "verify"):
            self.refuses(verb, "softmax", names=["softmax", OP])
            self.refuses(verb, names=["OP", "missing", OP])

    def test_problem_by_fields(self):
        tune = ("tune", OP, "--problem")
        self.refuses(*tune, "T=8,householder=1", names=["'householder'", "fields: num_householder, "])
        self.refuses(*tune, "T=8,op=kda", names=["op"])
        self.refuses(*tune, "T=8,T=9", names=["T", "twice"])
        self.refuses(*tune, "T", names=["--problem", "FIELD=VALUE"])
        self.refuses(*tune, "T=many", names=["T", "many"])
        self.refuses(*tune, "T=8,packed=maybe", names=["packed", "maybe", "true"])
        self.refuses(*tune, "T=8,dtype=fp8", names=["dtype", "fp8", "bf16"])
        self.refuses(*tune, "T=8,precision=half", names=["precision", "half", "ieee"])
        self.refuses(*tune, "T=8,H=2,HV=3", names=["HV", "3"])
        for other in (["--shape", "T=8,H=1,K=16"], ["--tokens", "8"], ["--use-qk-l2norm"],
                      ["--g-dtype", "bf16"]):
            self.refuses(*tune, "T=8", *other, names=["--problem", "alone"])

    def test_selection(self):
        example = ("example", OP, "-o", "x.safetensors")
        self.refuses(*example, names=["--preset", "--shape"])
        self.refuses(*example, "--preset", "qwen3-next", names=["'qwen3-next'", "of: qwen3-next-80b, "])
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

    def test_passes_and_options(self):
        def refuses(op, *options, names):
            self.refuses("example", op, "-o", "x.safetensors", "--shape", "T=8,H=1,K=16", *options,
                         names=names)
        gdn, decode = OP, ("--pass", "recurrent")
        refuses(gdn, "--pass", "sideways", names=["--pass", "sideways", "backward"])
        refuses(gdn, "--chunk-size", "17", names=["chunk_size", "17", "64"])
        refuses(gdn, "--chunk-size", "many", names=["--chunk-size", "many"])
        refuses(gdn, "--lower-bound", "-5", names=["lower_bound", "kda"])
        refuses("kda", "--lower-bound", "-6", "--safe-gate", names=["lower_bound", "-6", "-5"])
        refuses("kda", "--lower-bound", "-5", names=["lower_bound", "use_gate_in_kernel"])
        refuses("kda", "--safe-gate", names=["safe_gate", "lower_bound"])
        refuses("kda", "--use-gate-in-kernel", "--no-A-log", names=["A_log"])
        refuses("delta_rule", "--use-gate-in-kernel", names=["use_gate_in_kernel", "delta_rule"])
        refuses(gdn, "--inplace-state", "--pass", "backward", names=["inplace_state", "backward"])
        refuses(gdn, "--inplace-state", "--disable-recompute",
                names=["disable_recompute", "inplace_state"])
        refuses(gdn, "--state-index", "4", names=["state_index", "inplace_state"])
        refuses(gdn, "--null-slot-zero", "--inplace-state", names=["null_slot_zero", "state_index"])
        refuses(gdn, *decode, "--state-index", "0", names=["--state-index", "0", "1"])
        refuses(gdn, *decode, "--disable-recompute", names=["disable_recompute", "recurrent"])
        refuses(gdn, "--seqlens-hint", "5", names=["seqlens_hint is 5", "unless the batch is packed"])
        refuses(gdn, *decode, "--return-intermediate-states",
                names=["return_intermediate_states", "recurrent"])
        refuses(gdn, "--disable-recompute", "--return-intermediate-states",
                names=["return_intermediate_states", "disable_recompute"])
        refuses(gdn, "--batch", "2", names=["--batch", "2", "--shape"])
        refuses(gdn, "--g-dtype", "int8", names=["--g-dtype", "int8"])
        self.assertFalse((self.folder / "x.safetensors").exists())

    def test_verify_options(self):
        self.refuses("verify", OP, "--pass", "up", names=["--pass", "up", "recurrent"])
        self.refuses("verify", OP, "--dtype", "int4", names=["--dtype", "int4", "bf16"])
        self.refuses("verify", OP, "--precision", "fp8", names=["--precision", "fp8", "ieee"])
        self.refuses("verify", OP, "--count", "-1", names=["--count", "-1"])
        self.refuses("verify", OP, "--seed", "pi", names=["--seed", "pi"])
        self.refuses("verify", OP, "--device", "tpu", names=["tpu", "cpu"])

    def test_too_large(self):
        self.refuses("example", OP, "--shape", "B=1000,T=1000000,H=1000,K=256", "-o",
                     "x.safetensors", names=["memory"])
        for verb in ("bench", "tune"):
            self.refuses(verb, OP, "--shape", "T=100000000,H=16,K=128", "--device", "cpu", code=3,
                         names=["T = 100000000", "MB of host memory", "MB are free"])

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
                  "solve_tril", "recompute_w_u", "fwd_h", "fwd_o", "kkt_solve_wu", "kda_gate",
                  "kda_intra", "kda_recompute_w_u", "kda_fwd_o", "bwd_dv_local", "bwd_dhu",
                  "bwd_dqkwg", "wy_bwd", "kda_bwd_dv_local", "kda_bwd_dqkg", "kda_intra_bwd",
                  "chunk_local_reverse_cumsum", "gate_bwd", "kda_gate_bwd", "gate_param_sum",
                  "head_sum", "l2norm_bwd", "transpose_states", "recurrent", "step_seqlens",
                  "expand_steps", "compress_steps"}
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

    def shapes(self, op, *arguments):
        self.wyvern("example", op, *arguments, "-o", self.path("in.safetensors"))
        return {name: (dtype, shape) for name, (dtype, shape, _)
                in read_file(self.path("in.safetensors")).items()}

    def test_operators(self):
        shape = ("--shape", "T=5,H=2,HV=4,K=6,V=10")
        plain = {"q": ("BF16", [1, 5, 2, 6]), "k": ("BF16", [1, 5, 2, 6]),
                 "v": ("BF16", [1, 5, 4, 10]), "beta": ("BF16", [1, 5, 4]),
                 "initial_state": ("F32", [1, 4, 6, 10])}
        self.assertEqual(self.shapes("delta_rule", *shape), plain)
        gates = {"g": ("F32", [1, 5, 4, 6]), "A_log": ("F32", [4]), "dt_bias": ("F32", [4, 6])}
        self.assertEqual(self.shapes("kda", *shape), {**plain, **gates})
        beta = plain.pop("beta")
        self.assertEqual(self.shapes("gdn2", *shape), {
            **plain, **gates, "erase": ("BF16", [1, 5, 4, 6]), "write": ("BF16", [1, 5, 4, 10])})
        plain["beta"] = beta
        without = self.shapes("kda", *shape, "--use-gate-in-kernel", "--lower-bound", "-5",
                              "--no-A-log", "--no-dt-bias", "--g-dtype", "bf16")
        self.assertEqual(without, {**plain, "g": ("BF16", [1, 5, 4, 6])})
        steps = {"k": ("BF16", [1, 15, 2, 6]), "v": ("BF16", [1, 15, 4, 10]),
                 "beta": ("BF16", [1, 15, 4])}
        product = ("gated_delta_product", *shape, "--num-householder", "3")
        self.assertEqual(self.shapes(*product, "--no-g"), {**plain, **steps})
        self.assertEqual(self.shapes(*product)["g"], ("F32", [1, 5, 4]))

    def test_passes(self):
        shape = ("--shape", "B=3,T=2,H=1,HV=2,K=6,V=10", "--state-v-first")
        forward = self.shapes("delta_rule", *shape)
        self.assertEqual(forward["initial_state"], ("F32", [3, 2, 10, 6]))
        self.assertEqual(self.shapes("delta_rule", *shape, "--pass", "backward"),
                         {**forward, "do": ("BF16", [3, 2, 2, 10]),
                          "dht": ("F32", [3, 2, 10, 6])})
        decode = self.shapes("delta_rule", *shape, "--pass", "recurrent", "--inplace-state",
                             "--state-index", "9")
        wanted = {**forward, "state": ("F32", [9, 2, 10, 6]), "state_index": ("I32", [3])}
        del wanted["initial_state"]
        self.assertEqual(decode, wanted)
        raw = read_file(self.path("in.safetensors"))["state_index"][2]
        slots = memoryview(raw).cast("i").tolist()
        self.assertEqual(slots[1], -1)
        self.assertEqual(len(set(slots)), 3)
        self.assertTrue(all(0 <= slot < 9 for slot in slots[::2]))

    def test_kda_preset(self):
        """As FLA's layer calls it: a bounded gate and a sigmoid in the kernel, norms of q and k, states with
        V first, unless flags differ."""
        def problem(*options):
            return self.document("example", "kda", "--preset", "kimi-linear-48b", "--tokens", "2",
                                 "-o", self.path("x"), *options)
        document = problem()
        for name in ("use_gate_in_kernel", "use_qk_l2norm", "has_A_log", "has_dt_bias"):
            self.assertTrue(document["problem"][name], name)
        self.assertEqual(document["problem"]["lower_bound"], -5)
        self.assertEqual(document["options"],
                         ["--lower-bound -5", "--use-qk-l2norm", "--use-gate-in-kernel",
                          "--use-beta-sigmoid", "--state-v-first"])
        self.assertEqual(document["problem"]["g_dtype"], "bf16")
        self.assertEqual(problem("--lower-bound", "-2")["problem"]["lower_bound"], -2)
        self.assertIsNone(problem("--lower-bound", "none")["problem"]["lower_bound"])
        self.assertFalse(problem("--use-qk-l2norm=false")["problem"]["use_qk_l2norm"])
        plain = problem("--use-gate-in-kernel=false")["problem"]
        self.assertFalse(plain["use_gate_in_kernel"])
        self.assertIsNone(plain["lower_bound"])

    def test_preset_is_the_first_prefill(self):
        """Or the model's call of --pass; `run` finds the problem in the file and these options."""
        states = {"forward": (False, True), "backward": (False, False), "recurrent": (True, True)}
        for pass_, wanted in states.items():
            document = self.document("example", OP, "--preset", "qwen3-next-80b", "--pass", pass_,
                                     "--tokens", "2", "-o", self.path("x"))
            problem = document["problem"]
            self.assertEqual((problem["initial_state"], problem["output_final_state"]), wanted)
            self.assertTrue(problem["use_qk_l2norm"])
            self.assertEqual((problem["g_dtype"], problem["beta_dtype"]), ("fp32", "bf16"))
            self.assertIn("--use-qk-l2norm", document["options"])

    def test_decode_preset(self):
        document = self.document("example", OP, "--preset", "qwen3-next-80b", "--pass", "recurrent",
                                 "--batch", "4", "-o", self.path("x"))
        self.assertEqual((document["problem"]["B"], document["problem"]["T"]), (4, 1))

    def test_problem_has_every_field(self):
        """What tools/README.md promises: the fields of Problem, and the key."""
        problem = self.document("example", OP, "--shape", "B=3,T=2,H=1,K=16", "--pass", "recurrent",
                                "--state-index", "9", "-o", self.path("x"))["problem"]
        wanted = """operator pass B T H HV K V N packed dtype beta_dtype g_dtype state_dtype
            seqlens_dtype scale precision lower_bound safe_gate use_qk_l2norm use_gate_in_kernel
            has_A_log has_dt_bias use_beta_sigmoid allow_neg_eigval initial_state output_final_state
            state_v_first batch_invariant chunk_size disable_recompute return_intermediate_states
            seqlens_hint inplace_state state_index output_state_index null_slot_zero has_initial_state
            state_slots index_dtype index_columns intermediate_rows draft_tokens parent
            disable_state_update output_norm norm_eps keep_output output_dtype output_scale_tokens_last
            short_conv conv_activation has_conv_bias
            conv_dtype initial_conv_state output_conv_state inplace_conv_state conv_columns
            conv_tokens_first checkpoint_every checkpoint_offsets
            checkpoint_rows fp32_checkpoints summary transition segment_chunks num_householder has_g key"""
        self.assertEqual(set(problem), set(wanted.split()))
        self.assertEqual((problem["seqlens_dtype"], problem["index_dtype"]), ("int64", "int32"))

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
        kinds = {"cpu": "native-cpu", "cuda": "sm_90a"}
        for stage in self.document("stages")["stages"]:
            for device in {t["device"] for t in stage["templates"]}:
                self.wyvern("compile", stage["name"], "--arch", kinds[device], "--emit", "source",
                            "-o", self.path("x"))

    def test_architecture_without_what_it_needs(self):
        done = self.wyvern("compile", "delta_forward", "--arch", "sm_80", "--emit", "source", "-o",
                           self.path("x"), expect=2)
        self.assertIn("wgmma", done.stderr)

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

    def test_kernels_to_ship(self):
        if not any(c["usable"] for c in self.document("devices")["compilers"] if c["kind"] == "cuda"):
            self.skipTest("no NVRTC here")
        good = ("precompile", "--arch", "sm_80", "--preset", "qwen3-next-80b", "--tokens", "512")
        document = self.document(*good, "-o", self.path("code"))
        files = list(Path(self.path("code")).glob("sm_80/*.kernel"))
        self.assertEqual(len(files), document["kernels"])
        self.assertGreater(document["code_bytes"], 0)
        passes = {row["pass"]: row for row in document["passes"]}
        self.assertEqual(set(passes), {"forward", "backward", "recurrent"})
        for row in passes.values():
            self.assertEqual(row["operator"], "gated_delta_rule")
            self.assertLess(0, row["kernels"])
            self.assertEqual(row["spill_bytes"] == 0, not row["spilling"])
            self.assertLessEqual(set(row["spilling"]), set(document["spilling"]))
        for file in files:
            head, code = file.read_bytes().split(b"\n", 1)
            self.assertEqual(json.loads(head)["digest"], hashlib.sha256(code).hexdigest())
            self.assertEqual(code[:4], b"\x7fELF")
        self.refuses("precompile", "-o", "x", names=["--arch"])
        self.refuses(*good, names=["--output"])
        self.refuses("precompile", "--arch", "native-cpu", "-o", "x", names=["--arch", "of a GPU"])
        self.refuses(*good, "--splits", "0", "-o", "x", names=["--splits", "at least 1"])
        self.refuses("precompile", "--arch", "sm_80", "--preset", "gpt", "-o", "x", names=["gpt"])

    def test_layers_of_shipped_code_compile_nothing(self):
        """On a GPU that only a driver of the tests has: kernels are found and loaded, none runs."""
        if not any(c["usable"] for c in self.document("devices")["compilers"] if c["kind"] == "cuda"):
            self.skipTest("no NVRTC here")
        self.enterContext(mock.patch.dict(os.environ, LD_LIBRARY_PATH=str(
            Path(WYVERN).parents[1] / "tests/fake_cuda")))
        (gpu,) = (d for d in self.document("devices")["devices"] if d["name"] == "cuda:0")
        self.assertEqual(gpu["arch"], "sm_90a")
        self.wyvern("precompile", "--arch", "sm_90a", "--preset", "qwen3-next-80b", "--tokens", "512",
                    "-o", self.path("code"))
        options = ("--short-conv", "4", "--output-norm", "silu", "--use-gate-in-kernel",
                   "--use-beta-sigmoid", "--use-qk-l2norm")

        def compiled(*given):
            document = self.document("run", OP, "--device", "cuda:0", *options, *given, "--input",
                                     self.path("in.safetensors"), "--output", self.path("out"))
            self.assertEqual([document["problem"][field] for field in ("short_conv", "output_norm")],
                             [4, "silu"])
            self.assertIn("short_conv.portable", [step["template"] for step in document["plan"]])
            return document["compiled"]

        for dtype in ("bf16", "fp32"):  # of the convolution's weights
            for given in ((), ("--pass", "backward")):
                with self.subTest(dtype=dtype, given=given):
                    self.example("--preset", "qwen3-next-80b", "--tokens", "512", *options,
                                 "--conv-dtype", dtype, "--g-dtype", "bf16", *given)
                    with mock.patch.dict(os.environ, WYVERN_CODE=self.path("code")):
                        self.assertEqual(compiled(*given), 0)
        self.assertGreater(compiled(*given), 0)

    def test_refusals(self):
        good = ["--arch", "sm_80", "--emit", "source", "-o", "x"]
        self.refuses("compile", "solve_trill", *good, names=["STAGE", "one of solve_tril, "])
        said = self.wyvern("compile", "matmul", *good, expect=2).stderr
        self.assertEqual(said.split("must be one of ")[1].count(","), 7, said)
        self.refuses("compile", *good, names=["STAGE", "missing"])
        self.refuses("compile", "fwd_o", *good, "--config", "BT=7", names=["BT", "7", "64"])
        self.refuses("compile", "fwd_o", *good, "--config", "XY=7", names=["XY", "BT"])
        self.refuses("compile", "fwd_o", *good, "--config", "BT", names=["BT", "NAME=VALUE"])
        self.refuses("compile", "fwd_o", "--arch", "sm_12", "--emit", "source", "-o", "x",
                     names=["'sm_12'", "one of sm_120, "])
        self.refuses("compile", "fwd_o", "--arch", "sm_80", "--emit", "wasm", "-o", "x",
                     names=["--emit", "wasm", "cubin"])
        self.refuses("compile", "fwd_o", "--arch", "sm_80", "--emit", "llvm-ir", "-o", "x",
                     names=["llvm-ir", "cubin"])
        self.refuses("compile", "fwd_o", "--emit", "source", "-o", "x", names=["--arch", "missing"])


class Manual(Case):
    """The manual page and the completions say what the verbs say."""

    def test_manual_names_every_verb_and_option(self):
        text = self.document("manual")["text"]
        self.assertEqual(text, self.wyvern("manual").stdout)
        plain = text.replace("\\-", "-")
        for line in ("wyvern tune", "wyvern cache gc", "wyvern report"):
            self.assertIn(f".SS {line}\n", plain)
        for option in ("--budget", "--max-bytes", "--use-qk-l2norm", "-o,--output", "OP"):
            self.assertIn(f"\\fB{option}\\fR\n", plain)
        self.assertFalse([line for line in text.split("\n") if line.startswith("'")])

    def test_bash_completes(self):
        script = self.path("completion")
        Path(script).write_text(self.wyvern("completion", "bash").stdout)
        for words, wanted in ((["wyvern", "ca"], {"cache"}), (["wyvern", "cache", "ex"],
                                                              {"explain", "export"}),
                              (["wyvern", "cache", "gc", "--m"], {"--max-bytes"}),
                              (["wyvern", "bench", "kd"], {"kda"}),
                              (["wyvern", "bench", "kda", "--preset", "kimi"], None)):
            line = " ".join(f'"{word}"' for word in words)
            done = subprocess.run(
                ["bash", "-c", f'source {script}; COMP_WORDS=({line}); '
                 f'COMP_CWORD={len(words) - 1}; _wyvern; printf "%s\\n" "${{COMPREPLY[@]}}"'],
                capture_output=True, text=True, check=True)
            found = set(done.stdout.split())
            if wanted is None:
                self.assertTrue(found and all(name.startswith("kimi") for name in found), found)
            else:
                self.assertEqual(found, wanted)

    def test_other_shells(self):
        self.assertIn("#compdef wyvern", self.wyvern("completion", "zsh").stdout)
        self.assertIn("complete -c wyvern", self.wyvern("completion", "fish").stdout)
        self.refuses("completion", names=["SHELL", "missing", "bash"])
        self.refuses("completion", "csh", names=["csh", "fish"])


class CacheVerb(Case):
    def test_path(self):
        self.assertEqual(self.wyvern("cache", "path").stdout.strip(), str(self.cache / "wyvern.db"))
        self.assertEqual(self.document("cache", "path"), {"path": str(self.cache / "wyvern.db")})

    def test_python_help(self):
        """What help() says of the operator that most people call first."""
        path = Path(__file__).parents[2] / "runtime" / "python" / "src" / "wyvern" / "ops.py"
        functions = {node.name: node for node in ast.parse(path.read_text()).body
                     if isinstance(node, ast.FunctionDef)}
        text = ast.get_docstring(functions["chunk_gated_delta_rule"])
        (example,) = doctest.DocTestParser().get_doctest(text, {}, "help", None, 0).examples[-2:-1]
        self.assertIn("chunk_gated_delta_rule", example.source)
        for word in ("wyvern.policy", "wyvern.tune", "length of at most 1", "use_qk_l2norm_in_kernel"):
            self.assertIn(word, text)

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
        self.refuses("cache", "path", "w1", names=["w1", "cache path"])


if __name__ == "__main__":
    unittest.main()
