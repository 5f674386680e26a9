#!/usr/bin/env python3
"""Times flash-linear-attention's gated delta rule, forward, where it is installed.

Prints one JSON line per shape: milliseconds (median) of plain calls and of CUDA graph replays, and
the error of o against a float64 run of the recurrence on the first sequence and two heads. Run it on the same
machine right before or after `wyvern bench` at the same shapes; a ratio of figures from different
runs means little.

    tools/peers/fla_forward.py B,T,H,HV,D[,N] ...      (N: that many equal sequences, packed)
"""
import json
import statistics
import sys

import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule import chunk_gated_delta_rule


def make_inputs(B, T, H, HV, D, N):
    torch.manual_seed(1)
    options = dict(device="cuda", dtype=torch.bfloat16)
    q = F.normalize(torch.randn(B, T, H, D, device="cuda"), dim=-1).to(torch.bfloat16)
    k = F.normalize(torch.randn(B, T, H, D, device="cuda"), dim=-1).to(torch.bfloat16)
    v = torch.randn(B, T, HV, D, **options)
    beta = torch.rand(B, T, HV, device="cuda").to(torch.bfloat16)
    g = -torch.rand(B, T, HV, device="cuda") * 0.5
    states = torch.randn(N or B, HV, D, D, device="cuda") * 0.1
    cu = torch.arange(0, T + 1, T // N, device="cuda", dtype=torch.int64) if N else None
    return dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=states, output_final_state=True,
                cu_seqlens=cu)


def oracle(x, heads, tokens):
    """The recurrence in float64 for sequence 0."""
    group = x["v"].shape[2] // x["q"].shape[2]
    out = []
    for h in heads:
        q, k = (x[n][0, :tokens, h // group].double() for n in "qk")
        v, g, beta = (x[n][0, :tokens, h].double() for n in ("v", "g", "beta"))
        S = x["initial_state"][0, h].double()
        rows = []
        for t in range(tokens):
            S = S * g[t].exp()
            u = beta[t] * (v[t] - S.T @ k[t])
            S = S + torch.outer(k[t], u)
            rows.append(S.T @ q[t] * k.shape[-1] ** -0.5)
        out.append(torch.stack(rows))
    return torch.stack(out, 1)


def timed(call, flush, runs=50):
    samples = []
    for _ in range(runs):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop))
    return statistics.median(samples)


def measure(shape):
    B, T, H, HV, D, N = (list(shape) + [0])[:6]
    x = make_inputs(B, T, H, HV, D, N)
    call = lambda: chunk_gated_delta_rule(**x)
    o, _ = call()
    tokens = min(T // max(N, 1), 256)
    heads = [0, HV - 1]
    ref = oracle(x, heads, tokens)
    got = o[0, :tokens, heads].double()
    error = ((got - ref).pow(2).mean().sqrt() / ref.pow(2).mean().sqrt()).item()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        call()
    plain = timed(call, flush)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        replay = timed(graph.replay, flush)
    except RuntimeError:
        replay = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    memory = torch.cuda.max_memory_allocated() - before
    return dict(B=B, T=T, H=H, HV=HV, D=D, N=N, plain_ms=plain, graph_ms=replay, error=error,
                memory_bytes=memory)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(measure([int(n) for n in argument.split(",")])), flush=True)
