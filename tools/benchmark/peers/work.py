"""What a row must move and compute at least, and what a device can do: the floor of its time."""

from __future__ import annotations

from inputs import Inputs
from rows import Row

# Bytes a second (device copy, reads and writes counted) and dense 16-bit FLOPs a second, measured.
RATES = {"H200": (4.25e12, 780e12)}
CHUNK = 64
# Products of a forward pass and of a backward pass that rebuilds the states, by their sizes: K*V,
# C*V, C*K for each value head, C*K shared by a group's heads where the gate is a scalar, C*C. The
# same as the operators' own (runtime/operators/chunked.cpp), which the test compares.
FORWARD = (6, 4, 0, 4, 2)
BACKWARD = (16, 10, 12, 4, 2)


def flops(row: Row, products: tuple[int, ...]) -> float:
    longest = -(-row.tokens // row.N)
    C, D = min(CHUNK, longest), row.D
    KV, CV, CK, shared, CC = products
    shared = shared if row.op == "kda" else shared * row.H / row.HV
    each = KV * D * D + CV * C * D + (CK + shared) * C * D + CC * C * C
    return row.tokens * row.HV * each


def work(row: Row, x: Inputs) -> dict[str, float]:
    """Bytes and FLOPs of the row's part. Backward reads the inputs and the outputs' gradients,
    writes a gradient for each input, and writes and reads the state of each chunk."""
    inputs = sum(t.numel() * t.element_size() for t in x.given().values())
    state = x.initial_state.numel() * x.initial_state.element_size()
    outputs = x.v.numel() * x.v.element_size() + state
    chunks = max(row.tokens / CHUNK, row.N)
    states = 2 * chunks * row.HV * row.D * row.D * x.q.element_size()
    forward = (inputs + outputs, flops(row, FORWARD))
    backward = (2 * inputs + outputs + states, flops(row, BACKWARD))
    parts = {"forward": [forward], "backward": [backward], "both": [forward, backward]}[row.part]
    return {"bytes": sum(p[0] for p in parts), "flops": sum(p[1] for p in parts)}


def rates_of(model: str, given: tuple[float, float] | None) -> tuple[float, float] | None:
    """Of a device by its name; None where they were neither measured nor given."""
    return given or next((r for name, r in RATES.items() if name in model), None)


def floor_ms(work: dict[str, float], rates: tuple[float, float] | None) -> float | None:
    return None if rates is None else 1e3 * max(work["bytes"] / rates[0], work["flops"] / rates[1])
