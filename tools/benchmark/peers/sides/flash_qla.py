"""FlashQLA: the gated delta rule by TileLang."""

from __future__ import annotations

import torch

from inputs import Inputs
from rows import Row
from sides.side import Call, Side


class FlashQla(Side):
    name = "flash-qla"
    about = "FlashQLA"
    modules = ("flash_qla",)
    packages = ("flash-qla", "tilelang")
    trains = True

    def declines(self, row: Row) -> str | None:
        if row.op == "kda":
            return "it has no kda"
        return "it takes D = 128" if row.D != 128 else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        import flash_qla

        leaves = self.leaves(row, x)
        # Without a gate it is the delta rule.
        gate = {} if x.g is not None else {"g": torch.zeros_like(x.beta, dtype=torch.float32)}
        options = dict(output_final_state=True, cu_seqlens=x.cu_seqlens)
        return Call(
            lambda: flash_qla.chunk_gated_delta_rule(**leaves, **gate, **options),
            lambda result: result,
            leaves,
        )
