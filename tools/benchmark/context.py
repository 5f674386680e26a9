"""What one sequence over several GPUs costs: a forward pass and a step, beside one GPU and other libraries.

    torchrun --standalone --nproc-per-node 4 tools/benchmark/context.py [--sets pr691,model] [--rows REGEX]
        [--decay strong,weak] [--peers fla,heads] [--collectives] [--runs 20] [-o context.json]
    python tools/benchmark/context.py --virtual 8 ...

Sides, on the same random values: `alone` is Wyvern on rank 0's GPU with the whole sequence; `wyvern` has
``cp_context=``; `graph` is a CUDA graph of that; `fla` is flash-linear-attention's own context parallelism
and `heads` its operator on whole sequences and a part of the heads, between two all-to-alls (Megatron's way).
FLA's check of Triton's version is lifted (its issue 640): the values of its gradients do not matter to their time.

Sides are timed in turn by CUDA events, the caches displaced and the ranks brought together before each call. A
row has the median of the slowest rank's times. The device is kept busy until the host has
enqueued the call. Errors are the rms of the difference from `alone` over its rms, of o and of the gradient of q.

With `--virtual P` this process is the middle one of P ranks whose other ranks have the same tokens: what it would
receive is a copy of what it sends, and times are those of a rank without the exchange. Results are checked by
gathered summaries: of summaries that go by heads it would have to receive other heads than it sends.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from inputs import make
from rows import Row
from timing import Clock

from wyvern import ops
from wyvern.distributed import build_cp_context, by_heads

SETS = {
    "pr691": [Row("gdn", 64, 64, 1, 32768)],
    "model": [
        Row("gdn", 64, 64, 1, 131072),
        Row("gdn", 16, 32, 1, 32768),
        Row("gdn", 16, 32, 1, 131072),
        Row("kda", 64, 64, 1, 32768),
    ],
    "small": [Row("gdn", 4, 4, 1, 512, D=16), Row("kda", 4, 4, 1, 512, D=16)],
}
BYTES = (1 << 16, 1 << 20, 4 << 20, 8 << 20)  # of a rank's message
GIVEN = ("q", "k", "v", "g", "beta")
Call = Callable[..., tuple[Tensor, Any]]


def operator(row: Row) -> str:
    return "chunk_kda" if row.op == "kda" else "chunk_gated_delta_rule"


def of_fla(row: Row) -> Call:
    """Its operator, whose backward pass does not ask for Triton's version."""
    import fla.ops.common.chunk_o
    import fla.ops.gated_delta_rule
    import fla.ops.kda

    fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    return getattr(fla.ops.kda if row.op == "kda" else fla.ops.gated_delta_rule, operator(row))


def sides(
    row: Row, peers: list[str], group: dist.ProcessGroup, device: torch.device, exchange: str = "auto"
) -> dict[str, Call]:
    """By name, of this rank's tensors."""
    context = build_cp_context(group=group, exchange=exchange)
    wyvern = partial(getattr(ops, operator(row)), cp_context=context)
    found: dict[str, Call] = {"wyvern": wyvern}
    if "fla" in peers:
        from fla.ops.cp import build_cp_context as of_boundaries

        ends = torch.tensor([0, row.T], device=device)
        found["fla"] = partial(of_fla(row), cp_context=of_boundaries(ends, group))
    if "heads" in peers:
        found["heads"] = partial(by_heads, of_fla(row), group=group)
    return found


class Problem:
    """A call of one side, of leaves [1, T, ...] and a gradient of o."""

    def __init__(self, call: Call, leaves: dict[str, Tensor], do: Tensor) -> None:
        self._call = partial(call, use_qk_l2norm_in_kernel=True)
        self._leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
        self._do = do

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._call(**self._leaves)[0]

    def step(self) -> tuple[Tensor, ...]:
        o = self._call(**self._leaves)[0]
        return o.detach(), *torch.autograd.grad(o, list(self._leaves.values()), self._do)


def gathered(x: Tensor, rank: int, P: int) -> Tensor | None:
    """The whole [1, T, ...] on rank 0, of shards in the order of ranks."""
    parts = [torch.empty_like(x) for _ in range(P)] if rank == 0 else None
    dist.gather(x, parts)
    return torch.cat(parts, 1) if parts else None


def error(x: Tensor, wanted: Tensor) -> float:
    return float((x.float() - wanted.float()).norm() / wanted.float().norm())


class Stopwatch:
    """Times of calls that all ranks make."""

    def __init__(self, device: torch.device, runs: int) -> None:
        self._clock = Clock("cpu" if device.type == "cpu" else str(device), own_stream=True)
        self._meeting = torch.ones(1, device=device)
        self._device, self._runs = device, runs
        self.capture = self._clock.capture

    def _slowest(self, times: list[float]) -> list[float]:
        worst = torch.tensor(times, device=self._device, dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.tolist()

    def milliseconds(self, ways: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Medians of the slowest rank's times; the ways in turn."""
        host = {}
        for name, call in ways.items():
            call()
            host[name] = self._slowest([self._clock.host_seconds(call, 3)])[0]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._runs):
            for name, call in ways.items():
                dist.all_reduce(self._meeting)
                self._clock.synchronize()
                dist.all_reduce(self._meeting)
                times[name].append(self._clock.milliseconds(call, host[name]))
        return {name: statistics.median(self._slowest(taken)) for name, taken in times.items()}


def measure(
    row: Row, peers: list[str], graphs: bool, watch: Stopwatch, device: torch.device, virtual: bool
) -> list[dict]:
    rank, P = dist.get_rank(), dist.get_world_size()
    compares = rank == 0 or virtual
    shard = Row(**{**vars(row), "T": row.T // P})
    x = make(shard, str(device), seed=1 + rank)
    leaves = {name: getattr(x, name) for name in GIVEN}
    do = torch.randn_like(x.v)
    gather = (lambda y: torch.cat([y] * P, 1)) if virtual else partial(gathered, rank=rank, P=P)
    whole = {name: gather(y) for name, y in leaves.items()}
    whole_do = gather(do)

    def problems_of(exchange: str) -> dict[str, Problem]:
        found = sides(row, peers, dist.group.WORLD, device, exchange)
        return {name: Problem(call, leaves, do) for name, call in found.items()}

    problems = problems_of("auto")
    errors = {}
    reference = None
    if compares:
        alone = Problem(getattr(ops, operator(row)), whole, whole_do)
        reference = alone.step()[:2]
        if virtual:
            reference = [y.narrow(1, rank * shard.T, shard.T) for y in reference]
    for name, problem in (problems_of("gather") if virtual else problems).items():
        found = problem.step()[:2]
        found = found if virtual else [gather(y) for y in found]
        if compares:
            errors[name] = [error(y, wanted) for y, wanted in zip(found, reference, strict=True)]

    def nothing() -> None:
        """What other ranks do while rank 0 works alone."""

    rows = []
    for part in ("forward", "step"):
        ways: dict[str, Callable[[], object]] = {"alone": getattr(alone, part) if compares else nothing}
        for name, problem in problems.items():
            ways[name] = getattr(problem, part)
        if graphs:
            ways["graph"] = watch.capture(ways["wyvern"])
        taken = watch.milliseconds(ways)
        for name, ms in taken.items():
            efficiency = taken["alone"] / (P * ms) if name != "alone" else 1.0
            apart = errors.get("wyvern" if name == "graph" else name, [0.0, 0.0])
            rows.append(dict(row=row.name, P=P, part=part, side=name, ms=ms, efficiency=efficiency, errors=apart))
    return rows


def collectives(watch: Stopwatch, device: torch.device) -> list[dict]:
    """In CUDA graphs of ten, where there is a GPU, and by calls."""
    P = dist.get_world_size()
    rows = []
    for size in BYTES:
        own = torch.randn(size // 4, device=device)
        all_of = torch.empty(P * own.numel(), device=device)
        other = torch.empty_like(own)
        kinds = {
            "all_gather": partial(dist.all_gather_into_tensor, all_of, own),
            "all_to_all": partial(dist.all_to_all_single, other, own),
        }
        for kind, call in kinds.items():
            def ten(call: Callable[[], object] = call) -> None:
                for _ in range(10):
                    call()

            ways: dict[str, Callable[[], object]] = {"call": call, "ten": ten}
            if device.type == "cuda":
                ways |= {"graph": watch.capture(call), "graph of ten": watch.capture(ten)}
            for name, ms in watch.milliseconds(ways).items():
                per_call = ms / 10 if "ten" in name else ms
                rows.append(dict(row=f"{kind}-{size}", P=P, part="exchange", side=name, ms=per_call))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sets", default="pr691,model", help=f"of {', '.join(SETS)}")
    parser.add_argument("--rows", default="", help="a regular expression of their names")
    parser.add_argument("--decay", default="strong", help="strong, weak, or both: strong,weak")
    parser.add_argument("--peers", default="", help="of fla, heads")
    parser.add_argument("--collectives", action="store_true", help="of the messages' sizes first")
    parser.add_argument("--virtual", type=int, default=0, metavar="P", help="one process, one of P ranks that are alike")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("-o", "--out", type=Path, help="a JSON document")
    options = parser.parse_args()

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if options.virtual:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "fake", store=FakeStore(), rank=options.virtual // 2, world_size=options.virtual
        )
    else:
        dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    watch = Stopwatch(device, options.runs)
    done: list[dict] = []

    def report(rows: list[dict]) -> None:
        done.extend(rows)
        if dist.get_rank() != 0 and not options.virtual:
            return
        for one in rows:
            text = f"{one['row']:32} P={one['P']} {one['part']:8} {one['side']:12} {one['ms']:9.4f} ms"
            if "errors" in one:
                text += "  E {:.2f}  o {:.1e} dq {:.1e}".format(one["efficiency"], *one["errors"])
            print(text, flush=True)
        if options.out:
            name = torch.cuda.get_device_name() if gpu else "cpu"
            options.out.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": done}, indent=1))

    if options.collectives:
        report(collectives(watch, device))
    for decay in options.decay.split(","):
        for name in filter(None, options.sets.split(",")):
            for row in SETS[name]:
                row = Row(**{**vars(row), "gate": decay})
                if re.search(options.rows, row.name):
                    report(measure(row, options.peers.split(","), gpu, watch, device, bool(options.virtual)))
                    if gpu:
                        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
