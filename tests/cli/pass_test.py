"""Every operator and pass of the command on the CPU, against a float64 oracle of its own."""

import struct
import unittest
from pathlib import Path

import oracle
from oracle import Options
from support import Case, read_file, write_file

OPERATORS = ("delta_rule", "gated_delta_product", "gated_delta_rule", "kda", "gdn2")
STEPS = {"gated_delta_product": 3}  # of a token; 1 for the others
SHAPE = "B=1,T=17,H=1,HV=2,K=5,V=3"  # two chunks of 16; differences in Python cost its square
FORWARD_BOUND, GRADIENT_BOUND, SCALAR_BOUND = 1e-5, 2e-5, 5e-5  # of fp32 inputs
SCALARS = ("dbeta", "derase", "dwrite", "dg", "dA_log", "ddt_bias")


class PassCase(Case):
    def setUp(self):
        super().setUp()
        self.use_compiled_kernels()

    def write_example(self, op, *arguments):
        self.wyvern("example", op, "--dtype", "fp32", *arguments, "-o",
                    self.path("in.safetensors"))
        return read_file(self.path("in.safetensors"))

    def run_pass(self, op, pass_, *options, output="out.safetensors"):
        """Runs and verifies; returns the tensors that it wrote."""
        document = self.document("run", op, "--pass", pass_, "--device", "cpu", "--verify",
                                 "--input", self.path("in.safetensors"),
                                 "--output", self.path(output), *options)
        self.assertTrue(document["verified"], document["checks"])
        self.assertEqual(document["problem"]["pass"], pass_)
        written = read_file(self.path(output))
        self.assertLessEqual({c["quantity"] for c in document["checks"]}, set(written))
        return written

    def close(self, name, got, wanted):
        bound = (SCALAR_BOUND if name in SCALARS else
                 GRADIENT_BOUND if name.startswith("d") else FORWARD_BOUND)
        self.assertLess(oracle.error(got, wanted), bound, name)

    def inputs(self, options, tensors, *left_out):
        """The tensors that the operator reads, as numbers."""
        names = ["q", "k", "v", *oracle.rates(options.op), "initial_state"]
        if options.op != "delta_rule":
            names.append("g")
        if options.gate_in_kernel:
            names += ["A_log", "dt_bias"]
        return {name: oracle.tensor(tensors[name])
                for name in names if name in tensors and name not in left_out}

    def cases(self):
        """One with options for every operator; without any, and packed, for one operator."""
        for op in OPERATORS:
            gated, beta, steps = op != "delta_rule", op != "gdn2", STEPS.get(op, 1)
            yield Options(op, scale=0.7, qk_l2norm=True, beta_sigmoid=beta, neg_eigval=beta,
                          gate_in_kernel=gated, v_first=True, steps=steps), SHAPE
        yield Options("gated_delta_rule"), SHAPE
        yield Options("gated_delta_product", lengths=[3, 0, 17], steps=3), "H=1,HV=2,K=5,V=3"
        yield Options("kda", gate_in_kernel=True, lower_bound=-5.0), SHAPE

    def example_of(self, options, shape, *more):
        lengths = ["--seqlens", ",".join(map(str, options.lengths))] if options.lengths else []
        return self.write_example(options.op, "--shape", shape, *lengths, *options.flags(), *more)


class Forward(PassCase):
    def test_outputs(self):
        for options, shape in self.cases():
            with self.subTest(options):
                tensors = self.example_of(options, shape)
                out = self.run_pass(options.op, "forward", "--chunk-size", "16", *options.flags())
                wanted = oracle.forward(options, self.inputs(options, tensors))
                self.assertEqual(set(out), set(wanted))
                for name, values in wanted.items():
                    self.close(name, oracle.numbers(out[name]), values)

    def test_intermediate_states(self):
        """The states that enter the chunks of a packed batch: slot after slot, the rest 0."""
        for v_first, op in ((False, "gated_delta_rule"), (True, "gated_delta_rule"),
                            (False, "gated_delta_product")):
            steps = STEPS.get(op, 1)  # which chunks count
            options = Options(op, lengths=[3, 0, 17], v_first=v_first, steps=steps)
            tensors = self.example_of(options, "H=1,HV=2,K=6,V=5")
            out = self.run_pass(options.op, "forward", "--chunk-size", "16",
                                "--return-intermediate-states", *options.flags())
            dtype, shape, _ = out["intermediate_states"]
            self.assertEqual((dtype, shape), ("F32", [20 * steps // 16 + 3, 2,
                                                      *((5, 6) if v_first else (6, 5))]))
            entering = oracle.forward(options, self.inputs(options, tensors),
                                      chunk=16)["intermediate_states"]
            wanted = []
            for n, length in enumerate(options.lengths):
                for c in range(0, length * steps, 16):
                    wanted += entering[n, 0, c] + entering[n, 1, c]
            got = oracle.numbers(out["intermediate_states"])
            self.close("o", got[:len(wanted)], wanted)
            self.assertEqual(set(got[len(wanted):]), {0.0})


class Backward(PassCase):
    def expected_names(self, options, tensors):
        names = {"dq", "dk", "dv", "dinitial_state",
                 *("d" + name for name in oracle.rates(options.op))}
        if options.op != "delta_rule":
            names.add("dg")
        if options.gate_in_kernel:
            names |= {"dA_log", "ddt_bias"}
        return names

    def test_gradients(self):
        for options, shape in self.cases():
            with self.subTest(options):
                tensors = self.example_of(options, shape, "--pass", "backward")
                out = self.run_pass(options.op, "backward", "--chunk-size", "16",
                                    *options.flags())
                self.assertEqual(set(out), self.expected_names(options, tensors))
                wanted = oracle.gradients(options, self.inputs(options, tensors),
                                          oracle.numbers(tensors["do"]),
                                          oracle.numbers(tensors["dht"]))
                for name, values in out.items():
                    self.assertEqual(values[:2], tensors[name[1:]][:2], name)
                    self.close(name, oracle.numbers(values), wanted[name])

    def test_without_states(self):
        """No dht: the final state has no gradient; no initial state: none is returned."""
        for op in OPERATORS:
            with self.subTest(op):
                options = Options(op)
                tensors = self.example_of(options, "T=9,H=2,K=4", "--pass", "backward")
                del tensors["dht"], tensors["initial_state"]
                write_file(self.path("in.safetensors"), tensors)
                out = self.run_pass(op, "backward")
                self.assertNotIn("dinitial_state", out)
                wanted = oracle.gradients(options, self.inputs(options, tensors),
                                          oracle.numbers(tensors["do"]), [])
                for name, values in out.items():
                    self.close(name, oracle.numbers(values), wanted[name])

    def test_bounded_without_A_log(self):
        options = Options("kda", gate_in_kernel=True, lower_bound=-2.0)
        tensors = self.example_of(options, "T=18,H=1,HV=2,K=4,V=3", "--pass", "backward")
        del tensors["A_log"]
        write_file(self.path("in.safetensors"), tensors)
        out = self.run_pass("kda", "backward", *options.flags())
        self.assertNotIn("dA_log", out)
        wanted = oracle.gradients(options, self.inputs(options, tensors),
                                  oracle.numbers(tensors["do"]), oracle.numbers(tensors["dht"]))
        for name in ("dg", "ddt_bias", "dk"):
            self.close(name, oracle.numbers(out[name]), wanted[name])

    def test_kept(self):
        """With --disable-recompute the backward run takes from its input what the forward run wrote."""
        square, row = [1, 70, 2, 32], [1, 70, 2, 24]
        vector = {"Tinv": square, "Aqk": square, "w": row, "qg": row, "kg": row}
        for op in OPERATORS:
            with self.subTest(op):
                rows = 70 * STEPS.get(op, 1)
                kept = {"h": [-(-rows // 32), 2, 24, 16], "v_new": [1, rows, 2, 16]}
                missing = ["h", "missing", "NT,HV,K,V]"]
                if op in ("kda", "gdn2"):
                    kept, missing = {**kept, **vector}, ["Tinv", "missing", "T,HV,C]"]
                steps = Options(op, steps=STEPS.get(op, 1)).flags()
                options = ("--disable-recompute", "--chunk-size", "32", *steps)
                tensors = self.write_example(op, "--shape", "T=70,H=1,HV=2,K=24,V=16",
                                             "--pass", "backward", *steps)
                forward = self.run_pass(op, "forward", *options)
                self.assertEqual({n: e[1] for n, e in forward.items()
                                  if n not in ("o", "final_state")}, kept)
                self.refuses("run", op, "--pass", "backward", "--input",
                             self.path("in.safetensors"), "--output", "x", *options,
                             names=missing)
                write_file(self.path("in.safetensors"), {**forward, **tensors})
                from_kept = self.run_pass(op, "backward", *options)
                rebuilt = self.run_pass(op, "backward", "--chunk-size", "32", *steps)
                for name, values in rebuilt.items():
                    self.close(name, oracle.numbers(from_kept[name]), oracle.numbers(values))

    def test_without_g(self):
        """Nothing decays."""
        options = Options("gated_delta_product", steps=2)
        tensors = self.example_of(options, "T=18,H=1,HV=2,K=4,V=3", "--pass", "backward", "--no-g")
        self.assertNotIn("g", tensors)
        out = self.run_pass(options.op, "backward", *options.flags())
        self.assertNotIn("dg", out)
        wanted = oracle.gradients(options, self.inputs(options, tensors),
                                  oracle.numbers(tensors["do"]), oracle.numbers(tensors["dht"]))
        for name, values in out.items():
            self.close(name, oracle.numbers(values), wanted[name])

    def test_same_bytes_every_time(self):
        for op in OPERATORS:
            self.write_example(op, "--shape", "T=70,H=1,HV=2,K=24,V=16", "--pass", "backward")
            for name in "ab":
                self.run_pass(op, "backward", "--chunk-size", "32", output=name)
            self.assertEqual(Path(self.path("a")).read_bytes(), Path(self.path("b")).read_bytes())


class Layers(PassCase):
    """An operator with a convolution of q, k and v in front and a gated norm behind."""

    def test_both_passes(self):
        around = ["conv_weight", "conv_bias", "initial_conv_state", "norm_weight", "norm_gate"]
        for layer in (oracle.Layer(Options("gated_delta_rule", qk_l2norm=True, gate_in_kernel=True,
                                           beta_sigmoid=True), 4, "silu", 1e-3),
                      oracle.Layer(Options("kda", scale=0.7), 3, "sigmoid", 1e-2)):
            op = layer.inner.op
            with self.subTest(op):
                tensors = self.write_example(op, "--shape", "B=2,T=7,H=1,HV=2,K=3,V=2", "--conv-bias",
                                             *layer.flags(), "--pass", "backward")
                x = self.inputs(layer.inner, tensors)
                x |= {name: oracle.tensor(tensors[name]) for name in around}
                out = self.run_pass(op, "forward", "--keep-output", *layer.flags())
                wanted = layer.forward(x)
                self.assertEqual(set(out), set(wanted))
                for name, values in wanted.items():
                    self.close(name, oracle.numbers(out[name]), values)

                write_file(self.path("in.safetensors"), {**tensors, "o_raw": out["o_raw"]})
                out = self.run_pass(op, "backward", *layer.flags())
                given = {"o": "do", "final_state": "dht", "final_conv_state": "dfinal_conv_state"}
                wanted = layer.gradients(x, {name: oracle.numbers(tensors[gradient])
                                             for name, gradient in given.items()})
                self.assertEqual(set(out), set(wanted))
                for name, values in wanted.items():
                    self.close(name, oracle.numbers(out[name]), values)


class Recurrent(PassCase):
    def test_outputs(self):
        for options, shape in self.cases():
            with self.subTest(options):
                if not options.lengths:
                    shape = "B=3,T=4,H=1,HV=2,K=6,V=5"
                tensors = self.example_of(options, shape, "--pass", "recurrent")
                out = self.run_pass(options.op, "recurrent", *options.flags())
                wanted = oracle.forward(options, self.inputs(options, tensors))
                self.assertEqual(set(out), set(wanted))
                for name, values in wanted.items():
                    self.close(name, oracle.numbers(out[name]), values)

    def pool(self, op, tensors, slots, count):
        """Inputs whose states are slots of a pool, with a state index of int32."""
        states = count * 2 * 6 * 5
        example = oracle.numbers(tensors["initial_state"])
        values = [example[i % len(example)] + 0.01 * (i // len(example)) for i in range(states)]
        tensors["initial_state"] = ("F32", [count, 2, 6, 5], struct.pack(f"<{states}f", *values))
        tensors["state_index"] = ("I32", [len(slots)], struct.pack(f"<{len(slots)}i", *slots))
        write_file(self.path("in.safetensors"), tensors)
        return self.inputs(Options(op), tensors)

    def test_state_index(self):
        for op in OPERATORS:
            with self.subTest(op):
                tensors = self.write_example(op, "--shape", "B=3,T=2,H=1,HV=2,K=6,V=5",
                                             "--pass", "recurrent")
                x = self.pool(op, tensors, [3, -1, 0], 4)
                out = self.run_pass(op, "recurrent")
                wanted = oracle.forward(Options(op), x, slots=[3, -1, 0])
                for name, values in wanted.items():
                    self.close(name, oracle.numbers(out[name]), values)
                skipped = out["o"][2][len(out["o"][2]) // 3:2 * len(out["o"][2]) // 3]
                self.assertEqual(skipped, bytes(len(skipped)))

    def test_inplace_state(self):
        """Slots of the index are updated, all others keep their bytes."""
        for op in OPERATORS:
            with self.subTest(op):
                tensors = self.write_example(op, "--shape", "B=3,T=2,H=1,HV=2,K=6,V=5",
                                             "--pass", "recurrent")
                x = self.pool(op, tensors, [3, -1, 0], 5)
                wanted = oracle.forward(Options(op), x, slots=[3, -1, 0])
                for name in ("state", "initial_state"):
                    write_file(self.path("in.safetensors"), {
                        (name if n == "initial_state" else n): e for n, e in tensors.items()})
                    out = self.run_pass(op, "recurrent", "--inplace-state")
                    self.assertEqual(set(out), {"o", "state"})
                    self.close("o", oracle.numbers(out["o"]), wanted["o"])
                    slot = 2 * 6 * 5
                    state, final = oracle.numbers(out["state"]), wanted["final_state"]
                    self.close("state", state[3 * slot:4 * slot], final[:slot])
                    self.close("state", state[:slot], final[2 * slot:])
                    for kept in (1, 2, 4):
                        part = slice(kept * slot * 4, (kept + 1) * slot * 4)
                        self.assertEqual(out["state"][2][part], tensors["initial_state"][2][part])

    def test_forward_token_by_token(self):
        """Decoding the tokens of a sequence one at a time gives what the forward pass gives."""
        for op in ("gated_delta_rule", "gated_delta_product"):
            with self.subTest(op):
                steps = Options(op, steps=STEPS.get(op, 1)).flags()
                tensors = self.write_example(op, "--shape", "T=5,H=1,HV=2,K=16,V=8", *steps)
                whole = self.run_pass(op, "forward", *steps)
                o, state = b"", tensors["initial_state"]
                for t in range(5):
                    token = {"initial_state": state}
                    for name in ("q", "k", "v", "beta", "g"):
                        dtype, shape, raw = tensors[name]
                        width = len(raw) // 5
                        token[name] = (dtype, [1, shape[1] // 5, *shape[2:]],
                                       raw[t * width:(t + 1) * width])
                    write_file(self.path("in.safetensors"), token)
                    out = self.run_pass(op, "recurrent", *steps)
                    o, state = o + out["o"][2], out["final_state"]
                self.close("o", oracle.numbers(("F32", whole["o"][1], o)),
                           oracle.numbers(whole["o"]))
                self.close("final_state", oracle.numbers(state),
                           oracle.numbers(whole["final_state"]))


if __name__ == "__main__":
    unittest.main()
