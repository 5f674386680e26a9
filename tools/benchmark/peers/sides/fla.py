"""flash-linear-attention (FLA): its Triton kernels, and what it hands calls to on Hopper."""

from __future__ import annotations

import importlib.util
import logging
import os
import re

from inputs import Inputs
from rows import Row
from sides.flash_kda import FlashKda
from sides.side import Call, Side, kda_options

# The switches of backends that take FLA's calls, whole or inner ones, where they are installed.
SWITCHES = ("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG")


class _Served(logging.Handler):
    """Which backends FLA says that it used, by the side that was active: it logs each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.by_side: dict[str, list[str]] = {}
        self.active = ""

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"-> (\w+)$", record.getMessage())
        names = self.by_side.setdefault(self.active, [])
        if found and found[1] not in names:
            names.append(found[1])


_served = _Served()


class Fla(Side):
    modules = ("fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.delta_rule")
    packages = ("flash-linear-attention", "fla-core", "triton")
    trains = True
    switch: str | None = None

    def __init__(self) -> None:
        self._guard_lifted = False

    def activate(self) -> None:
        for name in SWITCHES:
            if self.switch is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = self.switch
        _served.active = self.name

    def declines(self, row: Row) -> str | None:
        if row.op == "delta_rule" and row.H != row.HV:
            return "chunk_delta_rule has no grouped value heads"
        return None

    def prepare(self, row: Row, x: Inputs) -> Call:
        logger = logging.getLogger("fla.backends")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if _served not in logger.handlers:
            logger.addHandler(_served)
        leaves = self.leaves(row, x)
        options = dict(output_final_state=True)
        if x.cu_seqlens is not None:
            options["cu_seqlens"] = x.cu_seqlens
        if row.op == "kda":
            from fla.ops.kda import chunk_kda as function

            options |= kda_options(x, row) | {"state_v_first": self.state_v_first}
        elif row.op == "gdn":
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function

            options |= {"state_v_first": self.state_v_first}
            if row.part != "forward" and self.switch == "0":
                self._lift_guard()
        else:
            from fla.ops.delta_rule import chunk_delta_rule as function
        return Call(
            lambda: function(**leaves, **options),
            lambda result: (result[0], self.k_first(result[1])),
            leaves,
        )

    def _lift_guard(self) -> None:
        """FLA refuses its gated backward on Hopper with some versions of Triton, with which it is
        wrong (its issue 640). It is let run to be timed; its errors show what it computes."""
        from fla.ops.common import chunk_o

        names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
        if all(hasattr(chunk_o, name) for name in names) and chunk_o.IS_NVIDIA_HOPPER:
            if chunk_o.TRITON_ABOVE_3_4_0 and not chunk_o.TRITON_ABOVE_3_7_1:
                chunk_o.TRITON_ABOVE_3_7_1 = True
                self._guard_lifted = True

    def notes(self) -> dict[str, object]:
        notes: dict[str, object] = {"served_by": _served.by_side.get(self.name, [])}
        if self._guard_lifted:
            notes["guard_lifted"] = "FLA issue 640"
        return notes


class FlaTriton(Fla):
    name = "fla-triton"
    about = "FLA's own Triton kernels"
    switch = "0"


class FlaDispatched(Fla):
    name = "fla"
    about = "FLA with what it hands calls to: FlashQLA, FlashKDA, TileLang"
    state_v_first = True  # FlashKDA is given no other calls

    def declines(self, row: Row) -> str | None:
        """Where nothing takes the row it would be fla-triton once more."""
        takers = []
        if row.op == "gdn" and row.D == 128:
            takers.append("flash_qla")
        if row.op == "kda" and row.part == "forward" and FlashKda().declines(row) is None:
            takers.append("flash_kda")
        if row.op != "delta_rule" and row.part != "forward":
            takers.append("tilelang")
        if not takers:
            return "FLA hands this to nothing: see fla-triton"
        if not any(importlib.util.find_spec(name) for name in takers):
            return f"{' and '.join(takers)} not installed: see fla-triton"
        return super().declines(row)
