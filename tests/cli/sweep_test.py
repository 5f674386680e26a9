"""Tuning, timing and sweeping of every operator and pass, on the CPU."""

import unittest

from support import FULL, Case

# What types share shows in any, and operators of one kind of gate share kernels. In fp32 no beta is
# wider than the type.
OPERATORS = {"delta_rule": "fp16", "gated_delta_product": "bf16", "gated_delta_rule": "bf16",
             "kda": "fp16", "gdn2": "fp16"}


def options_of(op):
    """What the listed cases of each pass must use, by pass."""
    shared = {"GVA", "K or V no power of two", "K = 256, V = 512", "scale",
              "cu_seqlens int32", "cu_seqlens int64", "initial_state fp32", "initial_state bf16",
              "output_final_state", "state_v_first", "use_qk_l2norm"}
    if op == "gdn2":
        shared |= {"erase and write in fp32"}
    else:
        shared |= {"beta in fp32", "use_beta_sigmoid", "allow_neg_eigval"}
    if op != "delta_rule":
        shared |= {"g in 16 bits", "use_gate_in_kernel", "no dt_bias", "no decay", "strong gates"}
    if op in ("kda", "gdn2"):
        shared |= {"lower_bound", "no A_log", "safe_gate"}
    if op == "gated_delta_product":
        shared |= {"num_householder", "no g"}
    chunked = shared | {"disable_recompute"} | {f"chunk_size {C}" for C in (16, 32, 64, 128)}
    serving = {"batch_invariant", "inplace_state", "state_index int32", "state_index int64",
               "output_state_index", "null_slot_zero", "has_initial_state"}
    checkpoints = {"checkpoint_every", "checkpoint_offsets", "fp32_checkpoints"}
    if op == "gated_delta_product":
        checkpoints = set()
    drafts, norms = set(), {"output_norm silu", "output_norm sigmoid"}
    quantized = {"output_dtype float8_e4m3", "output_scale_tokens_last"}
    if op not in ("gated_delta_product", "gdn2"):
        drafts = {"index_columns", "intermediate_rows", "parent", "disable_state_update"}
    convs = {"short_conv 2", "short_conv 3", "short_conv 4", "conv_activation none", "conv_bias",
             "conv_weight as q", "initial_conv_state", "output_conv_state"}
    conv_pools = {"inplace_conv_state", "conv_columns", "conv_tokens_first"}
    return {"forward": chunked | serving | checkpoints | norms | quantized | convs | conv_pools
                       | {"keep_output", "return_intermediate_states", "summary", "transition",
                          "segment_chunks"},
            "backward": chunked | norms | convs | {"summary"},
            "recurrent": shared | serving | drafts | norms | quantized | convs | conv_pools}


class Sweep(Case):
    def test_tune_then_run(self):
        """Each pass; in the short suite the last two."""
        for op, pass_, more in (("kda", "backward", ()), ("delta_rule", "forward", ()),
                                ("gated_delta_rule", "recurrent",
                                 ("--state-index", "5", "--inplace-state")))[0 if FULL else 1:]:
            with self.subTest((op, pass_)):
                select = (op, "--shape", "B=3,T=4,H=1,HV=2,K=16,V=16", "--dtype", "bf16",
                          "--pass", pass_, *more)
                tuned = self.document("tune", *select, "--device", "cpu", "--budget", "2s")
                self.assertTrue(tuned["stored"])
                self.assertEqual(tuned["counts"]["wrong"], 0)
                self.wyvern("example", *select, "-o", self.path("in.safetensors"))
                flags = ("--inplace-state",) if more else ()
                document = self.document("run", op, "--pass", pass_, "--device", "cpu", "--verify",
                                         "--input", self.path("in.safetensors"), "--output",
                                         self.path("o"), *flags)
                self.assertEqual(document["origin"], "exact")
                self.assertEqual(document["problem"]["key"], tuned["problem"]["key"])

    def bench(self, op, pass_, shape, *options):
        return self.document("bench", op, "--shape", shape, "--pass", pass_, "--device", "cpu",
                             *options)

    def test_bench(self):
        """Every plan is checked, and the floor counts each tensor and the useful work of the pass."""
        self.use_compiled_kernels()
        tokens, KV, CD, CC = 64, 128 * 128, 64 * 128, 64 * 64
        q, k, v, beta, g = 256, 256, 512, 4, 8  # bytes of a token in 16 bits, g in 32
        state = 2 * KV * 4
        sizes = {"forward": tokens * (q + k + 2 * v + beta + g) + 2 * state,
                 "backward": tokens * (2 * (q + k + v + beta + g) + v) + 2 * state +
                             2 * 2 * KV * 2,  # states of the one chunk, written and read
                 "recurrent": tokens * (q + k + 2 * v + beta + g) + 2 * state}
        # Two value heads and their key head, whose rows meet in two products.
        work = {"forward": tokens * (2 * (6 * KV + 4 * CD + 2 * CC) + 4 * CD),
                "backward": tokens * (2 * (16 * KV + 22 * CD + 2 * CC) + 4 * CD),
                "recurrent": tokens * 2 * 6 * KV}
        for pass_, wanted in sizes.items():
            with self.subTest(pass_):
                document = self.bench("gated_delta_rule", pass_, "T=64,H=1,HV=2,K=128")
                extra = state if pass_ == "backward" else 0  # initial state, dht, dinitial_state
                self.assertEqual(document["floor"]["bytes"], wanted + extra)
                self.assertEqual(document["floor"]["flops"], work[pass_])
                for plan in document["plans"]:
                    self.assertTrue(plan["verified"])
                    self.assertGreater(plan["percent_of_peak_flops"], 0)
                    self.assertGreaterEqual(plan["workspace_bytes"], 0)

    def test_useful_flops_of_steps(self):
        """Of two steps what has rows of k, v or beta counts twice."""
        self.use_compiled_kernels()
        document = self.bench("gated_delta_product", "recurrent", "T=2,H=1,K=128",
                              "--num-householder", "2")
        self.assertEqual(document["floor"]["flops"], 2 * 10 * 128 * 128)

    def test_verify(self):
        """Each operator; in the short suite one with a gate a head and one with a gate a channel."""
        self.use_compiled_kernels()
        for op, dtype in OPERATORS.items():
            if not FULL and op not in ("gated_delta_product", "gdn2"):
                continue
            with self.subTest(op):
                document = self.document("verify", op, "--device", "cpu", "--count", "0",
                                         "--dtype", dtype)
                self.assertTrue(document["verified"])
                quantities = {(r["pass"], r["quantity"]) for r in document["rows"]}
                wanted = {("forward", "o"), ("forward", "final_state"),
                          ("forward", "final_conv_state"), ("backward", "dq"),
                          ("backward", "dinitial_state"), ("backward", "dnorm_weight"),
                          ("backward", "dnorm_gate"), ("backward", "dconv_weight"),
                          ("backward", "dconv_bias"), ("backward", "dinitial_conv_state"),
                          ("forward", "o_scale"), ("recurrent", "o_scale"),
                          ("recurrent", "state"), ("recurrent", "final_conv_state"),
                          ("recurrent", "conv_state")}
                if op != "delta_rule":
                    wanted |= {("backward", "dg"), ("backward", "dA_log"),
                               ("backward", "ddt_bias")}
                self.assertLessEqual(wanted, quantities)
                for row in document["rows"]:
                    self.assertLessEqual(row["error"], row["bound"])
                self.assertEqual({r["dtype"] for r in document["rows"]}, {dtype})
                for case in document["cases"]:
                    self.assertTrue(case["ok"] and case["repeatable"], case["case"])
                for pass_, options in options_of(op).items():
                    met = {option for case in document["cases"]
                           if case["problem"]["pass"] == pass_ for option in case["options"]}
                    self.assertLessEqual(options, met, pass_)

    def test_verify_random_cases(self):
        """Of every type, unless one is asked for."""
        self.use_compiled_kernels()
        select = ("verify", "gated_delta_rule", "--pass", "recurrent", "--device", "cpu")
        listed = self.document(*select, "--count", "0")
        more = self.document(*select, "--count", "2", "--seed", "1")
        self.assertTrue(more["verified"])
        self.assertEqual(len(more["cases"]), len(listed["cases"]) + 2)
        self.assertEqual({r["dtype"] for r in more["rows"]}, {"bf16", "fp16", "fp32"})

    def test_verify_text(self):
        self.use_compiled_kernels()
        done = self.wyvern("verify", "delta_rule", "--pass", "forward", "--dtype", "fp32",
                           "--precision", "ieee", "--device", "cpu")
        for word in ("largest error", "bound", "final_state", "ieee", "0 failed"):
            self.assertIn(word, done.stdout)
        self.assertNotIn("bf16", done.stdout)


if __name__ == "__main__":
    unittest.main()
