"""Times of calls, taken in turn, with the caches displaced outside the timed region."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20
MOST_SPIN = 8_000_000  # clocks


class Clock:
    """Of one device. On a GPU it times by events, with the device kept busy until the host has
    enqueued the call: what the host takes shows only where the call waits for the device.
    With `own_stream` everything from then on is on a stream that is not the default one."""

    def __init__(self, device: str, own_stream: bool) -> None:
        self.gpu = device != "cpu"
        if self.gpu and own_stream:
            torch.cuda.set_stream(torch.cuda.Stream())
        size = FLUSH_BYTES if self.gpu else FLUSH_BYTES // 8
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def host_seconds(self, call: Callable[[], object], runs: int = 7) -> float:
        """What the host takes to enqueue the call (on a CPU: the call), the median."""
        taken = []
        for _ in range(runs):
            self.synchronize()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        self.synchronize()
        return statistics.median(taken)

    def milliseconds(self, call: Callable[[], object], host_seconds: float) -> float:
        self._flush.zero_()
        if not self.gpu:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(min(MOST_SPIN, int((20e-6 + 1.5 * host_seconds) * 2e9)))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    def capture(self, call: Callable[[], object]) -> Callable[[], None]:
        """A replay of a graph of one call; raises where the call cannot be captured."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A backward pass runs on the stream of its forward pass: on that it must be captured.
        current = torch.cuda.current_stream()
        own = None if current == torch.cuda.default_stream() else current
        with torch.cuda.graph(graph, stream=own):
            kept = call()

        def replay(kept: object = kept) -> None:  # what it writes lives as long as the graph
            graph.replay()

        replay()
        torch.cuda.synchronize()
        return replay


def in_turn(
    clock: Clock,
    ways: dict[str, tuple[Callable[[], None], Callable[[], object]]],
    runs: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Milliseconds of each way, (what comes before the clock, the call), by rounds: every way once
    a round, in an order that changes. At least `runs` rounds, more while seconds are left."""
    hosts = {}
    for name, (before, call) in ways.items():
        before()
        hosts[name] = clock.host_seconds(call, 3)
    order, chance = list(ways), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    start = time.monotonic()
    while len(samples[order[0]]) < runs or (
        time.monotonic() - start < seconds and len(samples[order[0]]) < 20 * runs
    ):
        chance.shuffle(order)
        for name in order:
            before, call = ways[name]
            before()
            samples[name].append(clock.milliseconds(call, hosts[name]))
    return samples


def summary(samples: list[float]) -> dict[str, float]:
    """The median, and as spread the median distance from it."""
    middle = statistics.median(samples)
    return {
        "ms": middle,
        "spread_ms": statistics.median(abs(x - middle) for x in samples),
        "least_ms": min(samples),
        "runs": len(samples),
    }


def paired(ours: list[float], theirs: list[float]) -> float:
    """Theirs over ours, the median over rounds, so that drift changes both alike."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
