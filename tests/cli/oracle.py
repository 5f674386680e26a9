"""The operators in Python's float64, straight from their recurrence; gradients by differences.

Nothing here is shared with the implementation or with its oracle. Tensors are Tensor objects: a shape
and a flat list of floats, row-major.
"""

import math
import struct
from dataclasses import dataclass, field


class Tensor:
    def __init__(self, shape, values):
        self.shape, self.values = list(shape), list(values)

    def row(self, *index):
        """The values under the leading indices, a list."""
        width = math.prod(self.shape[len(index):])
        at = 0
        for i, dim in zip(index, self.shape):
            at = at * dim + i
        return self.values[at * width:(at + 1) * width]


@dataclass
class Options:
    op: str
    scale: float | None = None
    qk_l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    gate_in_kernel: bool = False
    lower_bound: float | None = None
    v_first: bool = False
    lengths: list = field(default_factory=list)
    steps: int = 1

    def flags(self):
        """The same for the command line."""
        return [text for given, text in (
            (self.scale, f"--scale={self.scale}"), (self.qk_l2norm, "--use-qk-l2norm"),
            (self.beta_sigmoid, "--use-beta-sigmoid"), (self.neg_eigval, "--allow-neg-eigval"),
            (self.gate_in_kernel, "--use-gate-in-kernel"), (self.v_first, "--state-v-first"),
            (self.lower_bound, f"--lower-bound={self.lower_bound}"),
            (self.steps > 1, f"--num-householder={self.steps}")) if given]


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def log_decay(options, x, g, head, width):
    """A token's decay of one head, `width` numbers, from the gate as given."""
    if not options.gate_in_kernel:
        return g
    rate = math.exp(x["A_log"].values[head]) if "A_log" in x else 1.0
    bias = x["dt_bias"].row(head) if "dt_bias" in x else [0.0] * width
    if options.lower_bound is not None:
        return [options.lower_bound * sigmoid(rate * (a + b)) for a, b in zip(g, bias)]
    return [-rate * softplus(a + b) for a, b in zip(g, bias)]


def normalized(options, row):
    if not options.qk_l2norm:
        return row
    norm = math.sqrt(sum(a * a for a in row) + 1e-6)
    return [a / norm for a in row]


def rates(op):
    """The tensors that say how far a key's value is replaced."""
    return ("erase", "write") if op == "gdn2" else ("beta",)


def erase_and_write(options, x, b, t, head):
    """What multiplies the key where it reads the state, [K], and the value, [V]."""
    if options.op == "gdn2":
        return x["erase"].row(b, t, head), x["write"].row(b, t, head)
    beta = x["beta"].row(b, t, head)[0]
    if options.beta_sigmoid:
        beta = sigmoid(beta) * (2 if options.neg_eigval else 1)
    return [beta] * x["q"].shape[3], [beta] * x["v"].shape[3]


def transposed(rows):
    return [list(column) for column in zip(*rows)]


def sequences(options, x):
    """(batch, first token, past the last) of every sequence."""
    B, T = x["q"].shape[:2]
    if not options.lengths:
        return [(b, 0, T) for b in range(B)]
    ends = [sum(options.lengths[:n]) for n in range(len(options.lengths) + 1)]
    return [(0, ends[n], ends[n + 1]) for n in range(len(options.lengths))]


def head_pass(options, x, b, first, last, head, S):
    """Runs one value head over a sequence; S is [K][V]. Returns rows of o, states after each step."""
    K, group = x["q"].shape[3], x["v"].shape[2] // x["q"].shape[2]
    scale = options.scale if options.scale is not None else K ** -0.5
    outputs, states = [], []
    for t in range(first, last):
        q = normalized(options, x["q"].row(b, t, head // group))
        erase, write = erase_and_write(options, x, b, t, head)
        if "g" in x:
            g = log_decay(options, x, x["g"].row(b, t, head), head, len(x["g"].row(b, t, head)))
            decay = [math.exp(a) for a in g] * (K if len(g) == 1 else 1)
            S = [[a * s for s in row] for a, row in zip(decay, S)]
        for step in range(t * options.steps, (t + 1) * options.steps):
            k = normalized(options, x["k"].row(b, step, head // group))
            erase, write = erase_and_write(options, x, b, step, head)
            read = [sum(c) for c in zip(*[[a * e * s for s in row]
                                          for a, e, row in zip(k, erase, S)])]
            u = [w * a - r for w, a, r in zip(write, x["v"].row(b, step, head), read)]
            S = [[s + a * w for s, w in zip(row, u)] for a, row in zip(k, S)]
            states.append(S)
        outputs.append([scale * sum(c) for c in zip(*[[a * s for s in row]
                                                      for a, row in zip(q, S)])])
    return outputs, states


def state_rows(options, tensor, *index):
    """A state [K][V] out of a tensor of states."""
    values, (_, _, rows, columns) = tensor.row(*index), tensor.shape
    matrix = [values[i * columns:(i + 1) * columns] for i in range(rows)]
    return transposed(matrix) if options.v_first else matrix


def flat(options, S):
    rows = transposed(S) if options.v_first else S
    return [s for row in rows for s in row]


def forward(options, x, slots=None, chunk=0):
    """{"o", "final_state"}, with a chunk size also "intermediate_states" by sequence, head and step.
    Sequence n starts from state slots[n] (n without slots); a negative slot is skipped."""
    B, T, _, K = x["q"].shape
    HV, V = x["v"].shape[2:]
    o = [[0.0] * V for _ in range(B * T * HV)]
    final, entering = [], {}
    for n, (b, first, last) in enumerate(sequences(options, x)):
        slot = n if slots is None else slots[n]
        for head in range(HV):
            S = [[0.0] * V for _ in range(K)]
            if slot >= 0 and "initial_state" in x:
                S = state_rows(options, x["initial_state"], slot, head)
            if slot < 0:
                final += flat(options, S)
                continue
            outputs, states = head_pass(options, x, b, first, last, head, S)
            for t, row in enumerate(outputs, first):
                o[(b * T + t) * HV + head] = row
            final += flat(options, states[-1] if states else S)
            rows = (last - first) * options.steps
            for c in range(0, rows, chunk or rows + 1):
                entering[n, head, c] = flat(options, states[c - 1] if c else S)
    result = {"o": [a for row in o for a in row], "final_state": final}
    if chunk:
        result["intermediate_states"] = entering
    return result


def reached(options, x, name, index):
    """(sequence, head, token) of each head's pass that an element of a tensor has to do with, from the
    first token on that it has to do with."""
    shape, rest, place = x[name].shape, index, []
    for dim in reversed(shape):
        rest, at = divmod(rest, dim)
        place.insert(0, at)
    runs, HV = list(enumerate(sequences(options, x))), x["v"].shape[2]
    if name in ("A_log", "dt_bias"):
        return [(n, place[0], first) for n, (_, first, _) in runs]
    if name == "initial_state":
        return [(n, place[1], first) for n, (_, first, _) in runs if n == place[0]]
    t = place[1] * x["q"].shape[1] // shape[1]  # of a token's steps
    group = HV // shape[2]
    return [(n, head, t) for n, (b, first, last) in runs if b == place[0] and first <= t < last
            for head in range(place[2] * group, (place[2] + 1) * group)]


def gradients(options, x, do, dht):
    """{"dq": [...], ...} of sum(o do) + sum(final_state dht), by central differences, each of what the
    element has to do with."""
    T, K = x["q"].shape[1], x["q"].shape[3]
    HV, V = x["v"].shape[2:]

    def start(n, head):
        if "initial_state" not in x:
            return [[0.0] * V for _ in range(K)]
        return state_rows(options, x["initial_state"], n, head)

    runs = sequences(options, x)
    states = {(n, head): head_pass(options, x, *run, head, start(n, head))[1]
              for n, run in enumerate(runs) for head in range(HV)}

    def loss(n, head, t):
        """Of the tokens from t on."""
        b, first, last = runs[n]
        S = states[n, head][(t - first) * options.steps - 1] if t > first else start(n, head)
        outputs, behind = head_pass(options, x, b, t, last, head, S)
        total = sum(a * s for a, s in zip(flat(options, behind[-1] if behind else S),
                                          dht[(n * HV + head) * K * V:]))
        for token, row in enumerate(outputs, t):
            total += sum(a * y for a, y in zip(row, do[((b * T + token) * HV + head) * V:]))
        return total

    found = {}
    for name, tensor in x.items():
        found["d" + name] = []
        for i, value in enumerate(tensor.values):
            step, places = 1e-4 * max(1.0, abs(value)), reached(options, x, name, i)
            tensor.values[i] = value + step
            above = sum(loss(*place) for place in places)
            tensor.values[i] = value - step
            below = sum(loss(*place) for place in places)
            tensor.values[i] = value
            found["d" + name].append((above - below) / (2 * step))
    return found


@dataclass
class Layer:
    """What is around an operator: W weights a channel and SiLU in front, a norm and its gate behind."""

    inner: Options
    width: int
    activation: str
    eps: float

    def flags(self):
        return [*self.inner.flags(), f"--short-conv={self.width}", f"--output-norm={self.activation}",
                f"--norm-eps={self.eps}"]

    def forward(self, x):
        """{"o", "o_raw", "final_state", "final_conv_state"} of sequences of at least W - 1 tokens."""
        B, T = x["q"].shape[:2]
        inner, last, at = dict(x), [[] for _ in range(B)], 0
        for name in "qkv":
            _, _, heads, dim = x[name].shape
            rows = []
            for b in range(B):
                channels = []
                for c in range(heads * dim):
                    before = x["initial_conv_state"].row(b, at + c)
                    values = before + [x[name].row(b, t)[c] for t in range(T)]
                    weights, (bias,) = x["conv_weight"].row(at + c), x["conv_bias"].row(at + c)
                    sums = [bias + sum(w * a for w, a in zip(weights, values[t:])) for t in range(T)]
                    channels.append([a * sigmoid(a) for a in sums])
                    last[b] += values[1 - self.width:]
                rows += [a for row in transposed(channels) for a in row]
            inner[name] = Tensor(x[name].shape, rows)
            at += heads * dim
        out = forward(self.inner, inner)
        V, o = x["v"].shape[3], []
        for first in range(0, len(out["o"]), V):
            row, gate = out["o"][first:first + V], x["norm_gate"].values[first:first + V]
            size = math.sqrt(sum(a * a for a in row) / V + self.eps)
            o += [a / size * w * sigmoid(z) * (z if self.activation == "silu" else 1)
                  for a, w, z in zip(row, x["norm_weight"].values, gate)]
        return {"o": o, "o_raw": out["o"], "final_state": out["final_state"],
                "final_conv_state": [a for rows in last for a in rows]}

    def gradients(self, x, given):
        """{"dq": [...], ...} of the sum over `given`, {"o": do, ...}, by central differences."""
        def loss():
            out = self.forward(x)
            return sum(a * b for name, d in given.items() for a, b in zip(out[name], d, strict=True))

        found = {}
        for name, tensor in x.items():
            found["d" + name] = []
            for i, value in enumerate(tensor.values):
                step = 1e-4 * max(1.0, abs(value))
                tensor.values[i] = value + step
                above = loss()
                tensor.values[i] = value - step
                below = loss()
                tensor.values[i] = value
                found["d" + name].append((above - below) / (2 * step))
        return found


def error(got, wanted):
    """rms(got - wanted) / rms(wanted)."""
    assert len(got) == len(wanted), (len(got), len(wanted))
    if not all(math.isfinite(a) for a in got):
        return math.inf
    difference = math.sqrt(sum((a - b) ** 2 for a, b in zip(got, wanted)))
    size = math.sqrt(sum(b * b for b in wanted))
    return difference / size if size else difference


def numbers(entry):
    """The values of one tensor of support.read_file()."""
    dtype, shape, raw = entry
    count = math.prod(shape)
    if dtype == "BF16":
        return list(struct.unpack(f"<{count}f", b"".join(
            b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))))
    return list(struct.unpack(f"<{count}{dict(F32='f', F16='e', I32='i', I64='q')[dtype]}", raw))


def tensor(entry):
    return Tensor(entry[1], numbers(entry))
