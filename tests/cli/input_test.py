"""Inputs of `wyvern run` that must be refused: tensors that do not fit, files that are broken."""

import json
import os
import struct
import unittest
from pathlib import Path

from support import OP, Case, pack, read_file, write_file


class Tensors(Case):
    """Each case spoils one tensor of a sound input."""

    def setUp(self):
        super().setUp()
        self.tensors = read_file(self.example("--shape", "T=6,H=2,HV=4,K=16,V=32"))

    def rejects(self, *names, options=("--device", "cpu"), code=2):
        write_file(self.path("bad.safetensors"), self.tensors)
        self.refuses("run", OP, "--input", self.path("bad.safetensors"),
                     "--output", self.path("out.safetensors"), *options, names=names, code=code)
        self.assertFalse(Path(self.path("out.safetensors")).exists())

    def zeros(self, dtype, *shape):
        count = 1
        for dim in shape:
            count *= dim
        return (dtype, list(shape), bytes(count * {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8}[dtype]))

    def test_outputs_larger_than_any_memory(self):
        """Of sequences that are empty but one, each with a final state of 2 MB."""
        sequences = 1 << 20
        self.tensors = read_file(self.example("--shape", "T=1,H=8,K=256"))
        self.tensors.pop("initial_state")
        self.tensors["cu_seqlens"] = ("I64", [sequences + 1], struct.pack("<q", 0) * sequences + struct.pack("<q", 1))
        self.rejects(f"N = {sequences}", "needs 4398", "MB of host memory", "MB are free", code=3)

    def test_missing(self):
        for name in ("q", "k", "v", "beta", "g"):
            with self.subTest(name):
                kept = self.tensors.pop(name)
                self.rejects(name, "missing")
                self.tensors[name] = kept

    def test_rank(self):
        self.tensors["q"] = self.zeros("BF16", 6, 2, 16)
        self.rejects("q", "[6,2,16]", "[B,T,H,K]")

    def test_too_many_dimensions(self):
        self.tensors["k"] = self.zeros("BF16", 1, 6, 2, 16, 1, 1, 1)
        self.rejects("k", "[1,6,2,16,1,1,1]")

    def test_shape(self):
        self.tensors["beta"] = self.zeros("BF16", 1, 6, 3)
        self.rejects("beta", "[1,6,3]", "[1,6,4]")

    def test_state_shape(self):
        self.tensors["initial_state"] = self.zeros("F32", 1, 4, 32, 16)
        self.rejects("initial_state", "[1,4,32,16]", "[1,4,16,32]")

    def test_dtype(self):
        self.tensors["k"] = self.zeros("F32", 1, 6, 2, 16)
        self.rejects("k", "fp32", "bf16")
        self.tensors["q"] = self.zeros("I32", 1, 6, 2, 16)
        self.rejects("q", "int32", "bf16")

    def test_head_counts(self):
        self.tensors["v"] = self.zeros("BF16", 1, 6, 3, 32)
        for name in ("beta", "g"):
            self.tensors[name] = self.zeros("F32", 1, 6, 3)
        del self.tensors["initial_state"]
        self.rejects("HV", "3", "2")

    def test_key_dimension(self):
        for name in ("q", "k"):
            self.tensors[name] = self.zeros("BF16", 1, 6, 2, 260)
        del self.tensors["initial_state"]
        self.rejects("K", "260", "256")

    def test_gate(self):
        del self.tensors["A_log"]
        self.rejects("A_log", "missing", options=["--use-gate-in-kernel"])

    def test_gate_shape(self):
        self.tensors["A_log"] = self.zeros("F32", 5)
        self.rejects("A_log", "[5]", "[4]", options=["--use-gate-in-kernel"])

    def test_lower_bound(self):
        self.rejects("lower_bound", "kda", options=["--lower-bound", "-5"])

    def test_numbers(self):
        self.rejects("--scale", "big", options=["--scale", "big"])
        self.rejects("--precision", "fp8", "ieee", options=["--precision", "fp8"])

    def test_device(self):
        self.rejects("tpu", "cpu", options=["--device", "tpu"])

    def test_cu_seqlens(self):
        def boundaries(*values):
            self.tensors["cu_seqlens"] = ("I64", [len(values)],
                                          struct.pack(f"<{len(values)}q", *values))
            self.tensors["initial_state"] = self.zeros("F32", len(values) - 1, 4, 16, 32)
        for values in ((1, 6), (0, 5), (0, 4, 3, 6), (0, 7, 6), (0, -1, 6)):
            with self.subTest(values):
                boundaries(*values)
                self.rejects("cu_seqlens")

    def test_cu_seqlens_of_a_batch(self):
        self.tensors["cu_seqlens"] = ("F32", [2], bytes(8))
        self.rejects("cu_seqlens", "fp32", "int32")


class Passes(Case):
    """The tensors of the other operators and passes."""

    def setUp(self):
        super().setUp()
        self.op, self.options = OP, []

    def given(self, op, *options, shape="B=3,T=6,H=2,HV=4,K=16,V=32"):
        """A sound input of that pass."""
        self.op, self.options = op, list(options)
        self.wyvern("example", op, "--shape", shape, *options, "-o", self.path("in.safetensors"))
        self.options = [o for o in options if o not in ("--state-index", "7")]
        self.tensors = read_file(self.path("in.safetensors"))

    def rejects(self, *names):
        write_file(self.path("bad.safetensors"), self.tensors)
        self.refuses("run", self.op, "--device", "cpu", "--input", self.path("bad.safetensors"),
                     "--output", self.path("out.safetensors"), *self.options, names=names)
        self.assertFalse(Path(self.path("out.safetensors")).exists())

    def spoiled(self, name, dtype, shape, *names):
        """Refused with that tensor in another dtype or shape."""
        sizes = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8}
        count = 1
        for dim in shape:
            count *= dim
        kept = self.tensors[name]
        self.tensors[name] = (dtype, list(shape), bytes(count * sizes[dtype]))
        self.rejects(name, *names)
        self.tensors[name] = kept

    def test_backward(self):
        self.given("kda", "--pass", "backward")
        self.spoiled("do", "BF16", [3, 6, 4, 16], "[3,6,4,16]", "[B,T,HV,V]", "[3,6,4,32]")
        self.spoiled("do", "F32", [3, 6, 4, 32], "fp32", "bf16")
        self.spoiled("dht", "F32", [3, 4, 32, 16], "[3,4,32,16]", "[N,HV,K,V]")
        self.spoiled("dht", "BF16", [3, 4, 16, 32], "bf16", "fp32")
        del self.tensors["do"]
        self.rejects("do", "missing", "[B,T,HV,V]")

    def test_steps(self):
        self.given("gated_delta_product", "--num-householder", "2", "--pass", "backward")
        self.spoiled("k", "BF16", [3, 6, 2, 16], "[3,6,2,16]", "[B,nT,H,K] = [3,12,2,16]")
        self.spoiled("v", "BF16", [3, 6, 4, 32], "[3,6,4,32]", "[B,nT,HV,V] = [3,12,4,32]")
        self.spoiled("beta", "BF16", [3, 6, 4], "[3,6,4]", "[B,nT,HV] = [3,12,4]")
        self.spoiled("g", "F32", [3, 12, 4], "[3,12,4]", "[B,T,HV] = [3,6,4]")
        self.spoiled("do", "BF16", [3, 12, 4, 32], "[3,12,4,32]", "[B,T,HV,V] = [3,6,4,32]")
        self.options = ["--num-householder", "3", "--pass", "backward"]
        self.rejects("k", "[3,12,2,16]", "[B,nT,H,K] = [3,18,2,16]")
        del self.tensors["k"]
        self.rejects("k", "missing", "[B,nT,H,K]")
        del self.tensors["v"]
        self.tensors["k"] = ("BF16", [3, 18, 2, 16], bytes(3 * 18 * 2 * 16 * 2))
        self.rejects("v", "missing", "[B,nT,HV,V]")

    def test_vector_gate(self):
        self.given("kda")
        self.spoiled("g", "F32", [3, 6, 4], "[3,6,4]", "[B,T,HV,K]")
        self.spoiled("g", "I32", [3, 6, 4, 16], "int32", "fp32")
        self.options = ["--use-gate-in-kernel"]
        self.spoiled("dt_bias", "F32", [4], "[4]", "[HV,K] = [4,16]")
        del self.tensors["A_log"]
        self.rejects("A_log", "missing")
        self.options += ["--lower-bound", "0"]
        self.rejects("lower_bound", "[-5, 0)")
        del self.tensors["g"]
        self.options = []
        self.rejects("g", "missing", "[B,T,HV,K]")

    def test_erase_and_write(self):
        self.given("gdn2")
        self.spoiled("erase", "BF16", [3, 6, 4], "[3,6,4]", "[B,T,HV,K]")
        self.spoiled("write", "BF16", [3, 6, 4, 16], "[3,6,4,16]", "[B,T,HV,V]")
        self.spoiled("write", "F16", [3, 6, 4, 32], "fp16", "fp32")
        for name, symbols in (("erase", "[B,T,HV,K]"), ("write", "[B,T,HV,V]")):
            kept = self.tensors.pop(name)
            self.rejects(name, "missing", symbols)
            self.tensors[name] = kept

    def test_kept(self):
        self.given(OP, "--pass", "backward", "--disable-recompute")
        self.rejects("h", "missing", "[NT,HV,K,V]")
        self.tensors["h"] = ("BF16", [3, 4, 32, 16], bytes(3 * 4 * 32 * 16 * 2))
        self.rejects("h", "[3,4,32,16]", "[3,4,16,32]")

    def test_recurrent(self):
        self.given(OP, "--pass", "recurrent", "--state-index", "7")
        self.spoiled("state_index", "F32", [3], "fp32", "int32")
        self.spoiled("state_index", "I32", [4], "[4]", "[N] = [3]")
        self.spoiled("initial_state", "F32", [7, 4, 32, 16], "[7,4,32,16]", "[S,HV,K,V]")
        del self.tensors["initial_state"]
        self.rejects("initial_state", "missing")

    def test_inplace_state(self):
        self.given(OP, "--pass", "recurrent", "--state-index", "7", "--inplace-state")
        self.tensors["state_index"] = ("I32", [3], struct.pack("<3i", 2, -1, 2))
        self.rejects("state_index[2]", "2", "slot")
        self.tensors["state_index"] = ("I32", [3], struct.pack("<3i", 2, -1, 3))
        self.tensors["output_state_index"] = ("I32", [3], struct.pack("<3i", 4, -1, 2))
        self.rejects("output_state_index[2]", "state_index[0]", "slot")
        self.tensors["output_state_index"] = ("I32", [3], struct.pack("<3i", 4, -1, 3))
        self.spoiled("output_state_index", "I64", [3], "int64", "int32")
        self.tensors["has_initial_state"] = ("BOOL", [3], b"\0\1\1")
        self.spoiled("has_initial_state", "I32", [3], "int32", "boolean")
        del self.tensors["state"]
        self.rejects("state", "missing", "[S,HV,K,V]")

    def test_options_of_another_pass(self):
        self.given(OP)
        self.options = ["--pass", "backward", "--inplace-state"]
        self.rejects("inplace_state", "backward")
        self.options = ["--pass", "recurrent", "--disable-recompute"]
        self.rejects("disable_recompute", "recurrent")
        self.options = ["--pass", "around"]
        self.rejects("--pass", "around")


class Values(Case):
    """Inputs that fit and that an operator is not defined for: computed, and told."""

    def setUp(self):
        super().setUp()
        self.use_compiled_kernels()

    def run_with(self, op, name, value, *options, expect):
        self.wyvern("example", op, "--shape", "T=6,H=1,K=16", "-o", self.path("in.safetensors"))
        tensors = read_file(self.path("in.safetensors"))
        dtype, shape, content = tensors[name]
        bits = struct.pack("<f", value)[2 if dtype == "BF16" else 0:]
        at = 5 * len(bits)
        tensors[name] = (dtype, shape, content[:at] + bits + content[at + len(bits):])
        write_file(self.path("in.safetensors"), tensors)
        return self.wyvern("run", op, "--device", "cpu", "--input", self.path("in.safetensors"),
                           "--output", self.path("out.safetensors"), "--verify", *options,
                           expect=expect).stderr

    def test_not_finite(self):
        said = self.run_with(OP, "k", float("nan"), expect=1)
        self.assertIn("the input k is not finite: its element 5 is nan", said)
        self.assertIn("no output can be verified", said)
        self.assertNotIn("further from", said)
        self.assertIn("its element 5 is -inf", self.run_with(OP, "initial_state", float("-inf"), expect=1))

    def test_positive_gates(self):
        self.assertIn("g is up to 0.5, and gates must be at most 0",
                      self.run_with("gated_delta_rule", "g", 0.5, expect=0))
        self.assertEqual(self.run_with("gated_delta_rule", "g", 0.0, expect=0), "")

    def test_squares_beyond_fp32(self):
        said = self.run_with(OP, "k", 1e20, "--use-qk-l2norm", expect=1)
        self.assertIn("whose square is beyond fp32", said)


class BrokenFiles(Case):
    """A file may hold anything; the answer is a sentence, never a crash or a huge allocation."""

    def rejects(self, raw, *names):
        Path(self.path("bad.safetensors")).write_bytes(raw)
        self.refuses("run", OP, "--device", "cpu", "--input", self.path("bad.safetensors"),
                     "--output", self.path("out.safetensors"), names=["bad.safetensors", *names])

    def entry(self, begin, end, shape=(4,), dtype="F32"):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}

    def test_missing_file(self):
        self.refuses("run", OP, "--input", "/nowhere", "--output", "x", names=["/nowhere"])
        self.refuses("run", OP, "--input", self.folder, "--output", "x", names=[str(self.folder)])

    def test_no_regular_file(self):
        """Refused at once: nobody writes to the FIFO, and the device never ends."""
        os.mkfifo(self.path("fifo"))
        for file in (self.path("fifo"), "/dev/zero"):
            self.refuses("run", OP, "--input", file, "--output", "x", names=[file, "regular file"])

    def test_missing_options(self):
        self.refuses("run", OP, "--output", "x", names=["--input", "missing"])
        self.refuses("run", OP, "--input", "x", names=["--output", "missing"])

    def test_short(self):
        for size in (0, 1, 7):
            self.rejects(bytes(size), "8")

    def test_header_length(self):
        for length in (1, 2**32, 2**63, 2**64 - 1):
            self.rejects(struct.pack("<Q", length), "header")

    def test_header_text(self):
        for text in (b"", b"{", b"[]", b"3", b"{\"a\":", b"\xff\xfe", b"[" * 100000, b'{"a":' * 50000):
            self.rejects(pack(text))

    def test_every_truncation(self):
        raw = Path(self.example("--shape", "T=2,H=1,K=16")).read_bytes()
        header = 8 + struct.unpack("<Q", raw[:8])[0]
        for size in (*range(0, header, 97), header, header + 1, len(raw) - 1):
            with self.subTest(size):
                self.rejects(raw[:size])

    def test_trailing_bytes(self):
        self.rejects(pack({"q": self.entry(0, 16)}, bytes(17)), "16", "17")

    def test_entries(self):
        for entry in (3, {}, {"dtype": "F32"}, self.entry(0, 16, dtype="F8"),
                      self.entry(0, 16, dtype=5), self.entry(0, 16, shape=["4"]),
                      self.entry(0, 16, shape=[-4]), self.entry(0, 16, shape=[4.0]),
                      self.entry(0, 16, shape=[1] * 40 + [4]), self.entry(-16, 0),
                      {"dtype": "F32", "shape": [4], "data_offsets": [0]},
                      {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]}):
            with self.subTest(entry):
                self.rejects(pack({"q": entry}, bytes(16)), "q")

    def test_offsets(self):
        for begin, end in ((0, 15), (16, 0), (4, 16), (0, 2**63), (2**64 - 16, 2**64 - 1), (8, 24)):
            with self.subTest((begin, end)):
                self.rejects(pack({"q": self.entry(begin, end)}, bytes(16)), "q")

    def test_overflowing_shapes(self):
        for shape in ([2**32, 2**32], [2**62, 4], [2**61, 2**3, 2**3], [2**63], [2**70],
                      [0, 2**62, 2**62]):
            with self.subTest(shape):
                self.rejects(pack({"q": self.entry(0, 16, shape=shape)}, bytes(16)), "q")

    def test_overlap(self):
        self.rejects(pack({"a": self.entry(0, 16), "b": self.entry(8, 24)}, bytes(24)), "b", "8")

    def test_hole(self):
        self.rejects(pack({"a": self.entry(0, 16), "b": self.entry(20, 36)}, bytes(36)), "b", "20")

    def test_duplicate_names(self):
        first, second = json.dumps(self.entry(0, 16)), json.dumps(self.entry(16, 32))
        self.rejects(pack(f'{{"q":{first},"q":{second}}}'.encode(), bytes(32)), "q", "twice")

    def test_duplicate_inner_names(self):
        """Readers of JSON take one or the other of two."""
        entry = '"dtype":"F32","shape":[4],"data_offsets":[0,16]'
        self.rejects(pack(f'{{"q":{{{entry},"shape":[2,2]}}}}'.encode(), bytes(16)), "shape", "twice")
        self.rejects(pack(f'{{"__metadata__":{{"a":"1","a":"2"}},"q":{{{entry}}}}}'.encode(),
                          bytes(16)), "a", "twice")

    def test_unused_tensors_of_other_dtypes(self):
        """They are passed over; the layout that they are part of counts."""
        self.use_compiled_kernels()
        tensors = read_file(self.example("--shape", "T=6,H=1,K=16"))
        tensors = {"mask": ("BOOL", [3], b"\1\0\1"), **tensors, "table": ("F8_E4M3", [2, 2], bytes(4))}
        write_file(self.path("in.safetensors"), tensors)
        run = ("run", OP, "--device", "cpu", "--input", self.path("in.safetensors"), "--output",
               self.path("out.safetensors"))
        self.wyvern(*run)
        write_file(self.path("in.safetensors"), {**tensors, "beta": ("F64", [6], bytes(48))})
        self.refuses(*run, names=["'beta'", "F64", "BF16"])
        self.rejects(pack({"mask": self.entry(8, 12, dtype="BOOL")}, bytes(12)), "mask")

    def test_deep_headers(self):
        for depth in (9, 1_000_000):
            with self.subTest(depth):
                self.rejects(pack(b'{"q":' + b"[" * depth + b"]" * depth + b"}"), "nested")

    def test_many_tensors(self):
        """A header is read in time that grows as its length does; square growth takes this one past
        the limit of a run. Of the names a message shows a few."""
        names = (f"layer.{i}.weight" for i in range(200_000))
        header = {name: self.entry(0, 0, shape=[0]) for name in names}
        Path(self.path("many.safetensors")).write_bytes(pack(header))
        self.refuses("run", OP, "--input", self.path("many.safetensors"), "--output", "x",
                     names=["q", "missing", "layer.0.weight", "and 199992 more"])

    def test_long_and_active_names(self):
        header = {"a\x1b[2J\nb": self.entry(0, 0, shape=[0]), "n" * 1_000_000: self.entry(0, 0, shape=[0])}
        Path(self.path("names.safetensors")).write_bytes(pack(header))
        self.refuses("run", OP, "--input", self.path("names.safetensors"), "--output", "x",
                     names=["q", "missing", "a\\x1b[2J\\nb", "nnn"])
        self.rejects(pack({"a\x1b[2J\nb": 3}), "a\\x1b[2J\\nb")
        self.rejects(pack({"n" * 1_000_000: 3}), "nnn", "needs dtype, shape and data_offsets")

    def test_empty_name_twice(self):
        first = json.dumps(self.entry(0, 0, shape=[0]))
        self.rejects(pack(f'{{"":{first},"":{first}}}'.encode()), "twice")

    def test_empty_tensor(self):
        raw = pack({"q": self.entry(0, 0, shape=[1, 0, 1, 16])})
        Path(self.path("e.safetensors")).write_bytes(raw)
        self.refuses("run", OP, "--input", self.path("e.safetensors"), "--output", "x",
                     names=["k", "missing"])


if __name__ == "__main__":
    unittest.main()
