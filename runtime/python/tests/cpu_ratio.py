"""The gated delta rule on the CPU beside what transformers has there, its functions in PyTorch. Not a test.

The layer of a model (qwen3-next-80b by default: 16 query and 32 value heads of 128), bfloat16, q and k
normalized inside: a prompt of T tokens, and one token for each of a batch with its states. Both in one
process by turns, so that a busy machine is busy for both; the ratio is that of the medians.

usage: cpu_ratio.py [T] [--rounds N] [--heads H HV] [--json]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from reference import error

from wyvern import ops

MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


def by_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each function's seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def inputs(B: int, T: int, H: int, HV: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": random(B, T, H, 128).bfloat16(),
        "k": random(B, T, H, 128).bfloat16(),
        "v": random(B, T, HV, 128).bfloat16(),
        "g": -torch.nn.functional.softplus(random(B, T, HV)),
        "beta": random(B, T, HV).sigmoid().bfloat16(),
        "initial_state": random(B, HV, 128, 128),
    }


def compare(name: str, ours: Any, theirs: Any, x: dict[str, torch.Tensor], rounds: int) -> dict[str, Any]:
    """What both take; they must agree as bfloat16 results do."""
    common = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    renamed = {"q": "query", "k": "key", "v": "value"}
    y = {renamed.get(key, key): value for key, value in x.items()}
    functions = {"wyvern": lambda: ours(**x, **common), "transformers": lambda: theirs(**y, **common)}
    (o, state), (their_o, their_state) = (function() for function in functions.values())
    # Each rounds on the way in its own places.
    assert error(o, their_o) < 1e-2 and error(state, their_state) < 1e-2, "the results differ"
    seconds = by_turns(functions, rounds)
    return {
        "what": name,
        "wyvern_ms": seconds["wyvern"] * 1e3,
        "transformers_ms": seconds["transformers"] * 1e3,
        "ratio": seconds["transformers"] / seconds["wyvern"],
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description="The gated delta rule on the CPU beside transformers'.")
    parser.add_argument("T", type=int, nargs="?", default=2048, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=7, help="of decoding: ten times as many")
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 32), metavar=("H", "HV"))
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8), help="of decoding")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    # As on a machine without flash-linear-attention: the functions that the decorators stand before.
    module = importlib.import_module(MODULE)
    chunk = inspect.unwrap(module.torch_chunk_gated_delta_rule)
    recurrent = inspect.unwrap(module.torch_recurrent_gated_delta_rule)
    H, HV = options.heads
    rounds = options.rounds
    rows = []
    with torch.no_grad():
        x = inputs(1, options.T, H, HV)
        rows.append(compare(f"prompt, T={options.T}", ops.chunk_gated_delta_rule, chunk, x, rounds))
        for B in options.batches:
            x = inputs(B, 1, H, HV)
            name = f"decoding, batch {B}"
            ours = ops.fused_recurrent_gated_delta_rule
            rows.append(compare(name, ours, recurrent, x, 10 * rounds))
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(f"H={H} HV={HV} K=V=128 bf16, {torch.get_num_threads()} threads of PyTorch")
        for row in rows:
            print(f"{row['what']:24} wyvern {row['wyvern_ms']:9.3f} ms  transformers "
                  f"{row['transformers_ms']:9.3f} ms  {row['ratio']:6.2f} times")
    return rows


if __name__ == "__main__":
    main()
