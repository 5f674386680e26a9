"""Sides of the test: a slow one that computes the recurrence, one that raises, one that hangs."""

from __future__ import annotations

import time

import oracle
from inputs import Inputs
from rows import Row
from sides.side import Call, Side


class Fake(Side):
    name = "fake"
    about = "the oracle, in its own layout"
    packages = ("torch",)
    devices = ("cpu",)
    trains = True
    state_v_first = True

    def declines(self, row: Row) -> str | None:
        return "it has no packs" if row.lengths else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        leaves = self.leaves(row, x)
        sample = oracle.Sample(row)
        sample.heads, sample.value_heads = list(range(row.H)), list(range(row.HV))
        sample.sequences = list(range(row.B))

        def run() -> object:
            part = {name: t.double() for name, t in leaves.items()}
            part["initial_state"] = part["initial_state"].transpose(-1, -2)
            o, state = oracle.outputs(row, x, sample, part)
            time.sleep(0.005)
            return o.to(x.q.dtype), state.transpose(-1, -2).float()

        return Call(run, lambda result: (result[0], self.k_first(result[1])), leaves)


class Broken(Fake):
    name = "broken"

    def prepare(self, row: Row, x: Inputs) -> Call:
        raise RuntimeError("it is not\nfor this")


class Wrong(Fake):
    """A side whose output is not what it should be."""

    name = "wrong"

    def prepare(self, row: Row, x: Inputs) -> Call:
        call = super().prepare(row, x)
        return Call(lambda: tuple(1.5 * t for t in call.run()), call.read, call.leaves)


class Hanging(Fake):
    name = "hanging"

    def declines(self, row: Row) -> str | None:
        return None if row.op == "delta_rule" else "it is for the delta rule"

    def prepare(self, row: Row, x: Inputs) -> Call:
        time.sleep(600)
        raise AssertionError("nobody waits so long")


class Missing(Fake):
    name = "missing"
    modules = ("a_module_that_is_nowhere",)
