"""What serving costs: prefill into a pool, checkpoints, batch_invariant, decoding and drafts.

    python tools/benchmark/serving.py [--rows REGEX] [--runs 50] [--out FILE.json]

All ways of a row are timed in turn in one process, each a graph replay after the caches are
displaced. Decoding stands beside flash-linear-attention and FlashInfer where they are installed:
the gate, beta's sigmoid and the norms are computed in each one's kernel from the same raw values.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from rows import spread
from timing import Clock, in_turn, paired, summary
from work import rates_of

import wyvern.ops as ops

H, HV, D = 16, 32, 128
PREFILLS = {"1x2048": [2048], "32x64to4096": spread(32, 64, 4096)}
SEQUENCES = (1, 8, 64, 256)
Way = Callable[[], object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def raw_inputs(op: str, B: int, T: int) -> dict[str, object]:
    """As a layer's projections leave them."""
    heads = HV if op == "kda" else H
    x: dict[str, object] = dict(
        q=normal(B, T, heads, D), k=normal(B, T, heads, D), v=normal(B, T, HV, D),
        beta=normal(B, T, HV), use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        use_gate_in_kernel=True, A_log=0.5 * normal(HV, dtype=torch.float32),
    )  # fmt: skip
    channels = (D,) if op == "kda" else ()
    x["g"] = normal(B, T, HV, *channels)
    x["dt_bias"] = normal(HV, *channels, dtype=torch.float32) - 2
    if op == "kda":
        x["lower_bound"] = -5.0
    return x


def prefill(op: str, lengths: list[int]) -> dict[str, Way]:
    """The call without a pool, with one, with checkpoints too, and with bits that do not depend on
    the batch."""
    call = ops.chunk_kda if op == "kda" else ops.chunk_gated_delta_rule
    N, x = len(lengths), raw_inputs(op, 1, sum(lengths))
    ends = [sum(lengths[:n]) for n in range(N + 1)]
    x["cu_seqlens"] = torch.tensor(ends, device="cuda") if N > 1 else None
    state = 0.1 * normal(N, HV, D, D, dtype=torch.float32)
    index = torch.randperm(3 * N, device="cuda")[:N].to(torch.int32)
    pool = dict(
        state=0.1 * normal(3 * N, HV, D, D, dtype=torch.float32), state_index=index,
        has_initial_state=torch.ones(N, dtype=torch.bool, device="cuda"),
    )  # fmt: skip
    kept = torch.empty(sum(L // 256 for L in lengths), HV, D, D, device="cuda")
    return {
        "plain": lambda: call(**x, initial_state=state, output_final_state=True),
        "pool": lambda: call(**x, **pool),
        "checkpoints": lambda: call(
            **x, **pool, checkpoint_every=256, checkpoints=kept
        ),
        "invariant": lambda: call(**x, **pool, batch_invariant=True),
        # As engines lay states out.
        "pool, V first": lambda: call(**x, **pool, state_v_first=True),
        "checkpoints, V first": lambda: call(
            **x, **pool, state_v_first=True, checkpoint_every=256, checkpoints=kept
        ),
    }


def decode(op: str, N: int, T: int) -> dict[str, Way]:
    """One or several tokens of N sequences, states in place: rows of values ("V first": of keys),
    with the gated norm of o too; `drafts` leaves the states of all tokens and not the last in the
    pool."""
    call = (
        ops.fused_recurrent_kda if op == "kda" else ops.fused_recurrent_gated_delta_rule
    )
    x = raw_inputs(op, N, T)
    pool = dict(
        state=0.1 * normal(3 * N, HV, D, D, dtype=torch.float32),
        state_index=torch.randperm(3 * N, device="cuda")[:N].to(torch.int32),
    )
    norm = dict(
        norm_weight=1 + 0.1 * normal(D, dtype=torch.float32), norm_gate=normal(N, T, HV, D),
        norm_activation="sigmoid" if op == "kda" else "silu",
    )  # fmt: skip
    ways: dict[str, Way] = {
        "wyvern": lambda: call(**x, **pool),
        "wyvern invariant": lambda: call(**x, **pool, batch_invariant=True),
        "wyvern, V first": lambda: call(**x, **pool, state_v_first=True),
        "wyvern, norm": lambda: call(**x, **pool, **norm),
        "wyvern, V first, norm": lambda: call(**x, **pool, **norm, state_v_first=True),
    }
    if T > 1:
        steps = torch.empty(N, T, HV, D, D, device="cuda")
        rows = torch.arange(N, dtype=torch.int32, device="cuda")
        ways["wyvern drafts"] = lambda: call(
            **x, **pool, intermediate_states=steps, intermediate_index=rows,
            disable_state_update=True,
        )  # fmt: skip
    if (fla := fla_decode(op, x, N)) is not None:
        ways["fla"] = fla
    if op == "gdn":
        ways |= flashinfer_decode(x, N, T)
    return ways


def fla_decode(op: str, x: dict[str, object], N: int) -> Way | None:
    try:
        module = importlib.import_module(
            "fla.ops.kda" if op == "kda" else "fla.ops.gated_delta_rule"
        )
    except ImportError:
        return None
    name = "fused_recurrent_kda" if op == "kda" else "fused_recurrent_gated_delta_rule"
    call, state = getattr(module, name), 0.1 * normal(N, HV, D, D, dtype=torch.float32)
    return lambda: call(**x, initial_state=state, output_final_state=True)


def flashinfer_decode(x: dict[str, object], N: int, T: int) -> dict[str, Way]:
    try:
        from flashinfer import gdn_decode as they
    except ImportError:
        return {}
    q, k, v = x["q"], x["k"], x["v"]
    state = 0.1 * normal(N, HV, D, D, dtype=torch.float32)
    gate = (x["A_log"], x["g"], x["dt_bias"], x["beta"])
    if T == 1:

        def one() -> object:
            return they.gated_delta_rule_decode_pretranspose(q, k, v, state, *gate)

        return {"flashinfer": one}
    index = torch.arange(N, dtype=torch.int32, device="cuda")
    steps = torch.empty(N, T, HV, D, D, device="cuda")

    def last() -> object:
        return they.gated_delta_rule_mtp(
            q, k, v, state, index, *gate, disable_state_update=False
        )

    def drafts() -> object:
        return they.gated_delta_rule_mtp(
            q, k, v, state, index, *gate, intermediate_states_buffer=steps,
            disable_state_update=True,
        )  # fmt: skip

    return {"flashinfer": last, "flashinfer drafts": drafts}


def rows() -> dict[str, Callable[[], dict[str, Way]]]:
    found: dict[str, Callable[[], dict[str, Way]]] = {}
    for op in ("gdn", "kda"):
        for name, lengths in PREFILLS.items():
            found[f"prefill-{op}-{name}"] = lambda op=op, lengths=lengths: prefill(
                op, lengths
            )
        for T in (1, 4):
            for N in SEQUENCES:
                found[f"decode-{op}-{N}x{T}"] = lambda op=op, N=N, T=T: decode(op, N, T)
    return found


def measure(clock: Clock, ways: dict[str, Way], runs: int) -> dict[str, list[float]]:
    replays = {}
    for name, call in ways.items():
        try:
            call()
        except Exception as error:  # what a peer declines is named, not measured
            if name.split()[0] not in ("fla", "flashinfer"):
                raise
            print(f"  {name}: {str(error).splitlines()[0][:150]}")
            continue
        replays[name] = (lambda: None, clock.capture(call))
    return in_turn(clock, replays, runs, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="serving", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rows", default="", help="only the rows whose name this regex finds"
    )
    parser.add_argument(
        "--runs", type=int, default=50, help="times of each way (default 50)"
    )
    parser.add_argument("--out", help="a JSON file of the times")
    options = parser.parse_args()
    torch.manual_seed(1)
    clock, model = Clock("cuda", own_stream=False), torch.cuda.get_device_name()
    rates, document = rates_of(model, None), {}
    print(f"{model}; {H}/{HV} heads (kda {HV}/{HV}), D = {D}, bf16, fp32 states; µs")
    for row, make in rows().items():
        if not re.search(options.rows, row):
            continue
        samples = measure(clock, make(), options.runs)
        document[row] = {name: summary(taken) for name, taken in samples.items()}
        first = next(iter(samples))
        line = [f"{row:28}"]
        for name, taken in samples.items():
            line.append(f"{name} {1e3 * statistics.median(taken):.2f}")
            if name != first:
                line[-1] += f" ({paired(samples[first], taken):.3f})"
        if row.startswith("decode") and rates is not None:
            N = int(re.search(r"-(\d+)x", row)[1])
            floor = 2 * N * HV * D * D * 4 / rates[0]
            document[row]["floor"] = 1e3 * floor
            line.append(f"floor {1e6 * floor:.2f}")
        print(", ".join(line), flush=True)
    if options.out:
        Path(options.out).write_text(
            json.dumps({"device": model, "rows": document}, indent=1)
        )


if __name__ == "__main__":
    main()
