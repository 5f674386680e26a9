"""What the host spends on a call: the Python functions beside the operator alone. Not a test.

Processor time of the calling thread, the least of many repeats, one token of one small head, so that
computing takes next to nothing on the CPU; on a GPU, calls that are only enqueued.

usage: host_time.py [cpu|cuda] [--json]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from conftest import make

from wyvern import _call, ops


def microseconds(function: Callable[[], object], calls: int = 500, repeats: int = 40) -> float:
    function()
    best = float("inf")
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(calls):
            function()
        best = min(best, (time.thread_time() - start) / calls)
    return best * 1e6


def main(device: str = "cpu", form: str = "") -> None:
    torch.set_num_threads(1)
    call = make(ops.fused_recurrent_gated_delta_rule, device=device, T=1, H=1, HV=1, K=16, V=16)
    t = {name: x.detach() for name, x in call.tensors.items()}
    problem = "op=gated_delta_rule pass=recurrent output_final_state=1"
    inputs = [t["q"], t["k"], t["v"], t["g"], t["beta"], None, None, t["initial_state"]] + [None] * 9

    def operator() -> object:
        return _call.forward_op(problem, *inputs)

    def decode() -> object:
        return ops.fused_recurrent_gated_delta_rule(**t, output_final_state=True)

    def chunk() -> object:
        return ops.chunk_gated_delta_rule(**t, output_final_state=True)

    with torch.no_grad():
        alone = microseconds(operator)
        rows = {"operator alone": alone}
        rows |= {"fused_recurrent_gated_delta_rule": microseconds(decode)}
        rows |= {"chunk_gated_delta_rule": microseconds(chunk)}
    t["q"].requires_grad_()
    rows |= {"fused_recurrent_gated_delta_rule, gradients recorded": microseconds(decode)}
    rows |= {"chunk_gated_delta_rule, gradients recorded": microseconds(chunk)}
    if form == "--json":
        print(json.dumps(rows))
        return
    for name, time_of in rows.items():
        print(f"{name:55} {time_of:6.1f} us  {time_of / alone:5.2f} times the operator alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
