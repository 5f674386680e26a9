"""FlashKDA: kda's forward pass by CUTLASS."""

from __future__ import annotations

import torch

from inputs import Inputs
from rows import Row
from sides.side import Call, Side


class FlashKda(Side):
    name = "flash-kda"
    about = "FlashKDA"
    modules = ("flash_kda",)
    packages = ("flash-kda", "flash_kda")
    state_v_first = True

    def declines(self, row: Row) -> str | None:
        if row.op != "kda" or not row.bounded:
            return "it has kda with all options in the kernel only"
        if row.D != 128 or row.dtype != "bf16" or row.H != row.HV:
            return "it takes D = 128, bf16 and equal heads"
        return "it has no backward pass" if row.part != "forward" else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        import flash_kda

        state = self.own_state(x)
        o, final = torch.empty_like(x.v), torch.empty_like(state)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            flash_kda.fwd(
                x.q, x.k, x.v, x.g, x.beta, row.D**-0.5, o, A_log=x.A_log, dt_bias=x.dt_bias,
                lower_bound=-5.0, initial_state=state, final_state=final, cu_seqlens=x.cu_seqlens,
            )  # fmt: skip
            return o, final

        return Call(run, lambda result: (result[0], self.k_first(result[1])))
