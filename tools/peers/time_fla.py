#!/usr/bin/env python3
"""Times flash-linear-attention (FLA) where it is installed: forward, backward, memory, error.

    tools/peers/time_fla.py [--rows REGEX] [--list] [--budget SECONDS] [--runs N]

Prints one JSON line per row as soon as it is measured. A row that fails says so in "error" and the
next one is measured; after a fault that takes the device with it the rest runs in a fresh process.
Milliseconds are medians of calls timed by CUDA events, caches displaced before each call, outside
the timed region: of plain calls, and of replays of a CUDA graph where the call can be captured.

"forward" is inference (no gradients). Rows with "train" also have "training_forward", "backward"
(of a forward pass done before) and "both". Errors are rms(x - ref) / rms(ref) against the recurrence
in float64 on the first tokens of the first sequence and the first query head with its value heads.

FLA refuses to run its gated backward on Hopper with Triton 3.4 to 3.7.0, where it computes wrong
gradients (its issue 640). To time it all the same this script lifts that guard and says so in
"guard_lifted"; FLA_KEEP_GUARD=1 leaves it in place.

Run it on the same machine right before or after `wyvern bench` at the same shapes; a ratio of
figures from different runs means little.
"""
import argparse
import gc
import importlib.util
import json
import os
import re
import statistics
import sys
import time

# FlashKDA would take FLA's place where it is installed.
os.environ.setdefault("FLA_FLASH_KDA", "0")

CHECKED_TOKENS = 192
FLUSH_BYTES = 256 << 20


class Row:
    """One problem: `lengths` are the sequences of a packed batch, else B sequences of T tokens."""

    def __init__(self, op, H, HV, B, T, D=128, lengths=None, bounded=False, train=False):
        self.op, self.H, self.HV, self.B, self.T, self.D = op, H, HV, B, T, D
        self.lengths, self.bounded, self.train = lengths, bounded, train
        if lengths:
            self.B, self.T = 1, sum(lengths)
        tokens = ("x".join((str(len(lengths)), str(lengths[0]))) if lengths and
                  len(set(lengths)) == 1 else "+".join(map(str, lengths))) if lengths else f"{B}x{T}"
        self.name = "-".join(filter(None, (
            op, "bounded" if bounded else "", f"{H}of{HV}", tokens, "packed" if lengths else "",
            f"D{D}" if D != 128 else "", "train" if train else "")))

    def describe(self):
        return dict(row=self.name, op=self.op, H=self.H, HV=self.HV, B=self.B, T=self.T, D=self.D,
                    lengths=self.lengths, bounded=self.bounded, train=self.train)


def equal(count, tokens):
    return dict(B=1, T=0, lengths=[tokens] * count)


RAGGED = dict(B=1, T=0, lengths=[1300, 547, 2048, 963, 271, 3063])

ROWS = [
    Row("gdn", 16, 64, 1, 8192),
    Row("gdn", 16, 64, 1, 32768),
    Row("gdn", 16, 64, **equal(8, 4096)),
    Row("gdn", 8, 32, **equal(8, 4096)),
    Row("gdn", 8, 32, 1, 8192),
    Row("gdn", 2, 8, 1, 32768),
    Row("gdn", 2, 8, 1, 8192),
    Row("gdn", 64, 64, 4, 4096, train=True),
    Row("gdn", 64, 64, 1, 8192, train=True),
    Row("gdn", 8, 8, 16, 2048, D=256, train=True),
    Row("gdn", 8, 8, 16, 16384, D=256, train=True),
    Row("gdn", 16, 32, 1, 32768, train=True),
    Row("delta_rule", 64, 64, 4, 4096, train=True),
    Row("delta_rule", 64, 64, 1, 8192, train=True),
    Row("kda", 96, 96, 1, 8192, bounded=True),
    Row("kda", 64, 64, 1, 8192, bounded=True, train=True),
    Row("kda", 64, 64, 4, 4096, bounded=True),
    Row("kda", 64, 64, **RAGGED, bounded=True),
    Row("kda", 32, 32, **equal(8, 4096), bounded=True),
    Row("kda", 16, 16, **equal(8, 2048), bounded=True),
    Row("kda", 64, 64, 1, 512, bounded=True),
    Row("kda", 12, 12, 1, 2048, bounded=True),
    Row("kda", 8, 8, 1, 32768, bounded=True),
    Row("kda", 64, 64, 1, 8192, train=True),
    Row("kda", 64, 64, 4, 4096, train=True),
]


def make_inputs(row):
    """Tensors that take gradients, the others, and the options of the call."""
    torch.manual_seed(1)
    B, T, H, HV, D = row.B, row.T, row.H, row.HV, row.D
    def normal(*shape):
        return torch.randn(*shape, device="cuda")
    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1).to(torch.bfloat16)
    x = dict(q=unit(B, T, H, D), k=unit(B, T, H, D), v=normal(B, T, HV, D).to(torch.bfloat16))
    options = dict(output_final_state=True)
    if row.bounded:
        x["q"], x["k"] = (normal(B, T, H, D).to(torch.bfloat16) for _ in range(2))
        x["beta"] = normal(B, T, HV).to(torch.bfloat16)
        x["g"] = normal(B, T, HV, D).to(torch.bfloat16)
        options.update(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                       use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=-5.0,
                       A_log=torch.rand(HV, device="cuda") * 2 - 1,
                       dt_bias=torch.rand(HV * D, device="cuda") - 3)
    else:
        x["beta"] = torch.rand(B, T, HV, device="cuda").to(torch.bfloat16)
        if row.op == "gdn":
            x["g"] = -torch.rand(B, T, HV, device="cuda") * 0.5
        if row.op == "kda":
            x["g"] = -torch.rand(B, T, HV, D, device="cuda") * 0.5
    N = len(row.lengths) if row.lengths else B
    x["initial_state"] = normal(N, HV, D, D) * 0.1
    if row.lengths:
        ends = [sum(row.lengths[:n]) for n in range(N + 1)]
        options["cu_seqlens"] = torch.tensor(ends, device="cuda", dtype=torch.int64)
    return x, options


def operator(row):
    if row.op == "gdn":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as call
    elif row.op == "kda":
        from fla.ops.kda import chunk_kda as call
    else:
        from fla.ops.delta_rule import chunk_delta_rule as call
    return call


def lift_guard(row):
    """Lets FLA's gated backward run where it refuses; whether it would have refused."""
    if row.op != "gdn" or os.environ.get("FLA_KEEP_GUARD") == "1":
        return False
    from fla.ops.common import chunk_o
    names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    if not all(hasattr(chunk_o, name) for name in names):
        return False
    lift_guard.refuses = getattr(lift_guard, "refuses", chunk_o.IS_NVIDIA_HOPPER and
                                 chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1)
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return bool(lift_guard.refuses)


def oracle(row, x, options, tokens):
    """o of the first query head's value heads in float64, differentiable in the leaves returned."""
    group = row.HV // row.H
    leaves = {}
    for name, tensor in x.items():
        if name == "initial_state":
            part = tensor[0, :group]
        else:
            part = tensor[0, :tokens, :1 if name in "qk" else group]
        leaves[name] = part.detach().double().requires_grad_()
    q, k, v, beta = (leaves[name] for name in ("q", "k", "v", "beta"))
    g = leaves.get("g")
    if row.bounded:
        q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        beta = beta.sigmoid()
        bias = options["dt_bias"].double().view(row.HV, row.D)[:group]
        rate = options["A_log"].double()[:group, None].exp()
        g = -5.0 * (rate * (g + bias)).sigmoid()
    S = leaves["initial_state"]
    rows = []
    for t in range(tokens):
        if g is not None:
            S = S * (g[t].exp()[:, :, None] if g.dim() == 3 else g[t].exp()[:, None, None])
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,k->hv", S, k[t, 0]))
        S = S + torch.einsum("k,hv->hkv", k[t, 0], u)
        rows.append(torch.einsum("hkv,k->hv", S, q[t, 0]) * row.D ** -0.5)
    return torch.stack(rows), leaves


def relative(got, wanted):
    got, wanted = got.double(), wanted.double()
    return ((got - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()).item()


def errors(row, x, options, call):
    """Of o, and for training rows of the gradients. do is zero past the checked tokens."""
    first = row.lengths[0] if row.lengths else row.T
    tokens, group = min(first, CHECKED_TOKENS), row.HV // row.H
    wanted, leaves = oracle(row, x, options, tokens)
    if not row.train:
        with torch.no_grad():
            o = call(**x, **options)[0]
        return dict(o=relative(o[0, :tokens, :group], wanted))
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    o = call(**inputs, **options)[0]
    found = dict(o=relative(o[0, :tokens, :group].detach(), wanted))
    do = torch.zeros_like(o)
    do[0, :tokens, :group] = torch.randn_like(do[0, :tokens, :group])
    gradients = torch.autograd.grad(o, list(inputs.values()), do)
    wanted_gradients = torch.autograd.grad(wanted, list(leaves.values()),
                                           do[0, :tokens, :group].double())
    for name, got, want in zip(inputs, gradients, wanted_gradients):
        part = got[0, :group] if name == "initial_state" else \
            got[0, :tokens, :1 if name in "qk" else group]
        found["d" + name] = relative(part, want)
    return found


def samples(call, flush, runs):
    times = []
    for _ in range(runs):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    middle = statistics.median(times)
    return middle, statistics.median(abs(t - middle) for t in times)


def measured(call, flush, runs):
    """Plain calls, replays, and memory beyond what was there before."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    found = {}
    found["plain_ms"], found["plain_spread_ms"] = samples(call, flush, runs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    found["memory_bytes"] = torch.cuda.max_memory_allocated() - before
    del kept
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        found["graph_ms"], found["graph_spread_ms"] = samples(graph.replay, flush, runs)
        del kept, graph
    except Exception as error:  # a call that waits for the device cannot be captured
        found["graph_ms"] = None
        found["graph_error"] = one_line(error)
    return found


def attempt(result, key, action):
    """One figure of a row; its failure is no reason to lose the others."""
    try:
        result[key] = action()
    except Exception as error:
        result[key] = None
        result.setdefault("errors_in", {})[key] = one_line(error)


def measure(row, runs):
    result = row.describe()
    result["guard_lifted"] = lift_guard(row) if row.train else False
    call = operator(row)
    x, options = make_inputs(row)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    started = time.time()
    with torch.no_grad():
        call(**x, **options)
    torch.cuda.synchronize()
    result["first_forward_s"] = time.time() - started
    attempt(result, "relative_errors", lambda: errors(row, x, options, call))

    def inference():
        with torch.no_grad():
            return call(**x, **options)
    attempt(result, "forward", lambda: measured(inference, flush, runs))
    if not row.train:
        return result

    inputs = {name: tensor.requires_grad_() for name, tensor in x.items()}
    leaves = list(inputs.values())
    leaves += [options[name].requires_grad_() for name in ("A_log", "dt_bias") if name in options]
    def forward():
        return call(**inputs, **options)
    attempt(result, "training_forward", lambda: measured(forward, flush, runs))
    o, final_state = forward()
    do, dht = torch.randn_like(o), torch.randn_like(final_state) * 0.1
    def backward():
        return torch.autograd.grad((o, final_state), leaves, (do, dht), retain_graph=True)
    started = time.time()
    attempt(result, "backward", lambda: measured(backward, flush, runs))
    result["first_backward_s"] = time.time() - started
    del o, final_state, backward
    def both():
        return torch.autograd.grad(forward(), leaves, (do, dht))
    attempt(result, "both", lambda: measured(both, flush, runs))
    return result


def one_line(error):
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:400]


def healthy():
    """Whether the device still answers."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").add_(1).item()
        return True
    except Exception:
        return False


def environment():
    versions = dict(torch=torch.__version__, device=torch.cuda.get_device_name())
    for name in ("triton", "fla"):
        try:
            versions[name] = __import__(name).__version__
        except Exception as error:
            versions[name] = one_line(error)
    versions["tilelang"] = importlib.util.find_spec("tilelang") is not None
    return dict(environment=versions)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only the rows whose name this regex finds")
    parser.add_argument("--list", action="store_true", help="print the rows' names")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--budget", type=float, default=0,
                        help="seconds after which no further row is begun (default: none)")
    parser.add_argument("--started", type=float, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse()
    chosen = [row for row in ROWS if re.search(arguments.rows, row.name)]
    if arguments.list:
        print("\n".join(row.name for row in chosen))
        return
    global torch
    import torch
    started = arguments.started or time.time()
    if arguments.skip < 0:
        print(json.dumps(environment()), flush=True)
    for index, row in enumerate(chosen):
        if index <= arguments.skip:
            continue
        begun = time.time()
        if arguments.budget and begun - started > arguments.budget:
            print(json.dumps(dict(row.describe(), error="not begun: the budget is spent")),
                  flush=True)
            continue
        try:
            result = measure(row, arguments.runs)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            result = dict(row.describe(), error=one_line(error))
        result["seconds"] = time.time() - begun
        print(json.dumps(result), flush=True)
        gc.collect()
        if not healthy():
            os.execv(sys.executable, [sys.executable, __file__, f"--rows={arguments.rows}",
                                      f"--runs={arguments.runs}", f"--budget={arguments.budget}",
                                      f"--started={started}", f"--skip={index}"])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
