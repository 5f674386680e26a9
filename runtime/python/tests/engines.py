"""For serving engines in small (fake_vllm.py, fake_sglang.py): the recurrence over pools, in float64, and
stand-ins for options of wyvern.ops that a build's operators lack.

What arguments mean is written from the engines' contracts; the tests compare their names with the engines'
sources where these are installed.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from reference import recurrence
from torch import Tensor
from wyvern import ops


def install(monkeypatch: pytest.MonkeyPatch, path: str, **names: Any) -> types.ModuleType:
    """A module of these names, and the packages above it."""
    parts = path.split(".")
    for i in range(1, len(parts) + 1):
        above = ".".join(parts[:i])
        if above not in sys.modules or not hasattr(sys.modules[above], "_is_fake"):
            made = types.ModuleType(above)
            made.__path__ = []  # a package
            made._is_fake = True
            monkeypatch.setitem(sys.modules, above, made)
    module = sys.modules[path]
    module.__dict__.update(names)
    return module


def walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ends: Tensor | None,
    start: Callable[[int], Tensor | None],
    leave: Callable[[int, int, Tensor], None],
    parent: Tensor | None = None,
    **gates: Any,
) -> Tensor:
    """o ``[B, T, HV, V]`` in float64, 0 in null sequences; packed where ends is given.

    start(n): the state ``[HV, V, K]`` that sequence n starts from, None where it is null. leave(n, t, state):
    what it is after the sequence's token t.
    """
    exact = [x.detach().double() for x in (q, k, v, g, beta)]
    gates = {name: x.double() if isinstance(x, Tensor) else x for name, x in gates.items()}
    if gates.get("dt_bias") is not None and exact[3].dim() == 4:
        gates["dt_bias"] = gates["dt_bias"].reshape(exact[3].shape[2:])
    if gates.get("A_log") is not None:
        gates["A_log"] = gates["A_log"].reshape(-1)
    B, T = q.shape[:2]
    if ends is None:
        ends = torch.arange(B + 1) * T
    exact = [x.reshape(1, B * T, *x.shape[2:]) for x in exact]
    o = torch.zeros_like(exact[2])
    for n, (first, last) in enumerate(pairwise(ends.tolist())):
        begin = start(n)
        if begin is None:
            continue
        after: list[Tensor] = []
        for t in range(last - first):
            before = t - 1 if parent is None else int(parent[n, t])
            state = begin.double() if before < 0 else after[before]
            row = slice(first + t, first + t + 1)
            o[:, row], final = recurrence(
                *(x[:, row] for x in exact), initial_state=state[None], v_first=True, **gates
            )
            after.append(final[0])
            leave(n, t, final[0])
    return o.reshape(v.shape)


def gates_of(
    scale: float | None,
    l2norm: bool,
    raw_gate: bool,
    raw_beta: bool,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
) -> dict[str, Any]:
    """What the recurrence calls the options."""
    gates: dict[str, Any] = {"scale": scale, "l2norm": l2norm, "beta_sigmoid": raw_beta}
    if raw_gate:
        gates |= {"gate": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    return gates


# ---- wyvern.ops' options, in the specification's words ----


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, state: Tensor, state_index: Tensor,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, lower_bound: float | None = None, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, null_slots: str = "negative", num_accepted: Tensor | None = None,
    intermediate_states: Tensor | None = None, intermediate_index: Tensor | None = None,
    disable_state_update: bool = False, parent: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    assert state_v_first
    slots = state.double().clone()
    least = 1 if null_slots == "non-positive" else 0
    columns = state_index if state_index.dim() == 2 else state_index[:, None]

    def start(n: int) -> Tensor | None:
        column = 0 if num_accepted is None else int(num_accepted[n]) - 1
        if not 0 <= column < columns.shape[1]:
            return None
        slot = int(columns[n, column])
        return slots[slot] if least <= slot < len(slots) else None

    def leave(n: int, t: int, after: Tensor) -> None:
        if intermediate_states is not None and int(intermediate_index[n]) >= 0:
            intermediate_states[int(intermediate_index[n]), t] = after.to(intermediate_states.dtype)
        slot = int(columns[n, t if num_accepted is not None else 0])
        if not disable_state_update and slot >= least:
            state[slot] = after.to(state.dtype)

    gates = gates_of(
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        A_log,
        dt_bias,
        lower_bound,
    )
    return walk(q, k, v, g, beta, cu_seqlens, start, leave, parent, **gates).to(q.dtype), None


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, state: Tensor | None = None, state_index: Tensor | None = None,
    checkpoint_every: int | None = None, checkpoints: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert state_v_first and cu_seqlens is not None
    lengths = cu_seqlens.diff().tolist()
    final = initial_state.double().clone() if state is None else state.double()[state_index].clone()

    def leave(n: int, t: int, after: Tensor) -> None:
        if checkpoint_every is not None and (t + 1) % checkpoint_every == 0:
            row = sum(length // checkpoint_every for length in lengths[:n]) + (t + 1) // checkpoint_every - 1
            checkpoints[row] = after.to(checkpoints.dtype)
        if checkpoint_offsets is not None and t + 1 == int(checkpoint_offsets[n]):
            checkpoints[n] = after.to(checkpoints.dtype)
        if t + 1 == lengths[n]:
            final[n] = after

    gates = gates_of(
        scale,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        A_log,
        dt_bias,
        lower_bound,
    )
    o = walk(q, k, v, g, beta, cu_seqlens, lambda n: final[n].clone(), leave, **gates).to(q.dtype)
    if state is not None:
        state[state_index] = final.to(state.dtype)
        return o, None
    return o, final.float() if output_final_state else None


_STAND_INS = {"num_accepted": ("fused_recurrent", _recurrent), "parent": ("fused_recurrent", _recurrent),
              "checkpoints": ("chunk", _chunk)}  # fmt: skip


def need(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has wyvern.ops take an option of serving: a stand-in where this build's operators have it not."""
    prefix, stand_in = _STAND_INS[option]
    for name in (f"{prefix}_gated_delta_rule", f"{prefix}_kda"):
        if option not in inspect.signature(getattr(ops, name)).parameters:
            monkeypatch.setattr(ops, name, stand_in)


# ---- what both engines' own functions do ----


def update(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, pool: Tensor, index: Tensor,
    ends: Tensor | None = None, *, A_log: Any = None, dt_bias: Any = None, scale: float | None = None,
    l2norm: bool = True, raw_gate: bool = True, raw_beta: bool = True, lower_bound: float | None = None,
    kda: bool = False, accepted: Tensor | None = None, null: str = "non-positive", **verify: Any,
) -> Tensor:  # fmt: skip
    """o, with the pool's states replaced; by index [N], or [N, M] and the counts of accepted tokens."""
    shape = v.shape[:3]
    gate = a.reshape(*shape, q.shape[3]) if kda else a.reshape(shape)
    return _recurrent(
        q, k, v, gate, b.reshape(shape), state=pool, state_index=index, cu_seqlens=ends, A_log=A_log,
        dt_bias=dt_bias, scale=scale, use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=raw_gate,
        use_beta_sigmoid_in_kernel=raw_beta, lower_bound=lower_bound, state_v_first=True, null_slots=null,
        num_accepted=accepted, **verify,
    )[0]  # fmt: skip


def split(mixed: Tensor, pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of rows, each ``[1, N, heads, dim]``."""
    HV, V, K = pool.shape[1:]
    keys = (mixed.shape[1] - HV * V) // 2
    q, k, v = mixed[None].split([keys, keys, HV * V], -1)
    return q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (HV, V))


prefill = _chunk


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same, of tensors in memory of their own."""
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
