"""One row in this process: errors of every side first, then graphs, then times in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import inputs
import oracle
import timing
import work
from rows import Row
from sides import Call, Side, one_line

OURS = "wyvern"


class CaptureFailed(Exception):
    """A call could not be captured, after which PyTorch's generator is of no use in the process."""

    def __init__(self, side: str, reason: str) -> None:
        super().__init__(reason)
        self.side, self.reason = side, reason


@dataclass
class Request:
    row: Row
    device: str
    runs: int
    seconds: float
    plain: dict[str, str]  # sides that cannot be captured, and why
    tune: float = 0
    rates: tuple[float, float] | None = None


@dataclass
class Prepared:
    side: Side
    call: Call
    go: Callable[[], object]
    found: dict


class Measurement:
    """What is known of the row so far, in `document`."""

    def __init__(self, request: Request, sides: list[Side]) -> None:
        self.request, self.row = request, request.row
        # What was recorded on the default stream cannot be captured when it runs backward.
        self.clock = timing.Clock(request.device, own_stream=self.row.part == "backward")
        self.x = inputs.make(self.row, request.device)
        self.document: dict = self.row.describe() | {"sides": {}, "declined": {}, "failed": {}}
        self.document["gradients"] = self.row.part != "forward"
        self.prepared: dict[str, Prepared] = {}
        self.cotangents = self._cotangents()
        self._set_floor()
        for side in sides:
            self._take(side)

    def _set_floor(self) -> None:
        gpu = self.request.device != "cpu"
        model = torch.cuda.get_device_name() if gpu else "cpu"
        done = work.work(self.row, self.x)
        ms = work.floor_ms(done, work.rates_of(model, self.request.rates))
        self.document |= {"device": model, "floor": done | {"ms": ms}}

    def _cotangents(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.request.device).manual_seed(2)

        def like(x: Tensor) -> Tensor:
            return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)

        return like(self.x.v), 0.1 * like(self.x.initial_state)

    def _take(self, side: Side) -> None:
        """Prepares a side and calls it once, or writes down why not."""
        reason = side.declines(self.row)
        if reason is None and self.document["gradients"] and not side.trains:
            reason = "it has no backward pass"
        if reason is not None:
            self.document["declined"][side.name] = reason
            return
        try:
            start = time.perf_counter()
            side.activate()
            call = side.prepare(self.row, self.x)
            found = {"about": side.about}
            if self.request.tune and hasattr(side, "tune") and side.policy == "cached":
                found["tuned"] = side.tune(call, self.request.tune)
                start = time.perf_counter()
            prepared = Prepared(side, call, self._part(side, call), found)
            prepared.go()
            self.clock.synchronize()
            found["first_call_s"] = time.perf_counter() - start
            self.prepared[side.name] = prepared
        except Exception as error:
            self.document["failed"][side.name] = one_line(error)

    def _part(self, side: Side, call: Call) -> Callable[[], object]:
        """The row's part of the pass, for a side."""
        if self.row.part == "forward":

            def forward() -> object:
                with torch.no_grad():
                    return call.run()

            return forward
        do, dht = self.cotangents
        if side.state_v_first:
            dht = dht.transpose(-1, -2).contiguous()
        leaves = list(call.leaves.values())

        def gradients(result: object, keep: bool) -> tuple[Tensor, ...]:
            o, state = result[:2]
            return torch.autograd.grad(
                (o, state), leaves, (do.reshape(o.shape), dht), retain_graph=keep
            )

        if self.row.part == "both":
            return lambda: gradients(call.run(), False)
        result = call.run()
        return lambda: gradients(result, True)

    def check(self) -> None:
        """Errors against float64, of outputs and in training rows of gradients."""
        sample = oracle.Sample(self.row)
        part = oracle.leaves(self.row, self.x, sample)
        with torch.set_grad_enabled(self.document["gradients"]):
            wanted = dict(zip(("o", "final_state"), oracle.outputs(self.row, self.x, sample, part),
                              strict=True))  # fmt: skip
        if self.document["gradients"]:
            do, dht = self.cotangents
            given = [sample.of("o", do).double(), sample.of("final_state", dht).double()]
            found = torch.autograd.grad(list(wanted.values()), list(part.values()), given)
            wanted |= {f"d{name}": one for name, one in zip(part, found, strict=True)}
        for name in list(self.prepared):
            try:
                self.prepared[name].found["errors"] = self._errors(
                    self.prepared[name], sample, wanted
                )
            except Exception as error:
                self.document["failed"][name] = one_line(error)
                del self.prepared[name]

    def _errors(self, one: Prepared, sample: oracle.Sample, wanted: dict) -> dict[str, float]:
        one.side.activate()
        with torch.set_grad_enabled(self.document["gradients"]):
            result = one.call.run()
        o, state = one.call.read(result)
        outputs = {"o": o, "final_state": state}
        errors = {
            name: oracle.relative(sample.of(name, x), wanted[name])
            for name, x in outputs.items()
            if x is not None
        }
        if not self.document["gradients"]:
            return errors
        gradients = one.go()
        for (name, leaf), gradient in zip(one.call.leaves.items(), gradients, strict=True):
            del leaf
            if name == "initial_state":
                gradient = one.side.k_first(gradient)
            gradient = gradient.reshape(getattr(self.x, name).shape)
            errors[f"d{name}"] = oracle.relative(sample.of(name, gradient), wanted[f"d{name}"])
        return errors

    def time(self) -> None:
        ways = {name: (one.side.activate, one.go) for name, one in self.prepared.items()}
        graphs = {}
        for one in self.prepared.values():
            one.side.activate()
            host = self.clock.host_seconds(one.go)
            one.found["host_us"] = 1e6 * host
            one.found["memory_bytes"] = self._memory(one.go)
        if self.clock.gpu:
            for name, one in self.prepared.items():
                if reason := self.request.plain.get(name):
                    one.found["no_graph"] = reason
                    continue
                one.side.activate()
                try:
                    graphs[f"{name} graph"] = ((lambda: None), self.clock.capture(one.go))
                except Exception as error:
                    raise CaptureFailed(name, one_line(error)) from error
        samples = timing.in_turn(self.clock, ways | graphs, self.request.runs, self.request.seconds)
        for name, one in self.prepared.items():
            one.found["call"] = timing.summary(samples[name])
            if f"{name} graph" in samples:
                one.found["graph"] = timing.summary(samples[f"{name} graph"])
            self._finish(one)
        self._compare(samples)

    def _memory(self, go: Callable[[], object]) -> int | None:
        if not self.clock.gpu:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = go()
        self.clock.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before

    def _finish(self, one: Prepared) -> None:
        """Rates and the share of the floor, by the graph where there is one."""
        found, floor = one.found, self.document["floor"]
        found["how"] = "graph" if "graph" in found else "call"
        found |= found[found["how"]]
        seconds = found["ms"] * 1e-3
        found["tb_per_s"] = floor["bytes"] / seconds * 1e-12
        found["tflop_per_s"] = floor["flops"] / seconds * 1e-12
        found["percent_of_floor"] = 100 * floor["ms"] / found["ms"] if floor["ms"] else None
        found |= one.side.notes()
        self.document["sides"][one.side.name] = found

    def _compare(self, samples: dict[str, list[float]]) -> None:
        """Peers over ours, paired, each by its graph where it has one."""
        sides = self.document["sides"]
        if OURS not in sides:
            return

        def of(name: str) -> list[float]:
            return samples[f"{name} graph" if sides[name]["how"] == "graph" else name]

        ratios = {name: timing.paired(of(OURS), of(name)) for name in sides if name != OURS}
        self.document["ratios"] = ratios
        peers = {name: ratio for name, ratio in ratios.items() if not name.startswith(OURS)}
        if peers:
            best = min(peers, key=peers.get)
            self.document["best_peer"], self.document["best_ratio"] = best, peers[best]


def measure(request: Request, sides: list[Side]) -> dict:
    """The row's document. Raises CaptureFailed: to be asked again with that side in `plain`."""
    if request.device != "cpu":
        torch.cuda.set_device(request.device)
    torch.manual_seed(0)
    measurement = Measurement(request, sides)
    measurement.check()
    if not measurement.prepared:
        raise RuntimeError(f"no side computes this row: {measurement.document['failed']}")
    measurement.time()
    return measurement.document


def call_once(request: Request, sides: list[Side]) -> dict:
    """Every side compiles what it needs for the row and is called; nothing is checked or timed."""
    if request.device != "cpu":
        torch.cuda.set_device(request.device)
    return Measurement(request, sides).document
