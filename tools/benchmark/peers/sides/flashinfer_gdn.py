"""FlashInfer: the gated delta rule's forward pass."""

from __future__ import annotations

import torch

from inputs import Inputs
from rows import Row
from sides.side import Call, Side


class FlashInfer(Side):
    name = "flashinfer"
    about = "FlashInfer"
    modules = ("flashinfer.gdn_prefill",)
    packages = ("flashinfer-python", "nvidia-cutlass-dsl")
    state_v_first = True

    def declines(self, row: Row) -> str | None:
        if row.op == "kda":
            return "it has no kda for Hopper"
        if row.D != 128:
            return "it takes D = 128"
        return "it has no backward pass" if row.part != "forward" else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        def rows_of(t: torch.Tensor) -> torch.Tensor:
            return t.reshape(-1, *t.shape[2:])

        q, k, v, beta = (rows_of(t) for t in (x.q, x.k, x.v, x.beta.float()))
        decay = None if x.g is None else rows_of(x.g.exp())  # its gate is the decay itself
        state = self.own_state(x)
        o, final = torch.empty_like(v), torch.empty_like(state)
        ends = x.cu_seqlens
        if ends is None:
            ends = torch.arange(row.B + 1, device=q.device, dtype=torch.int64) * row.T

        def run() -> object:
            return chunk_gated_delta_rule(
                q, k, v, g=decay, beta=beta, scale=row.D**-0.5, initial_state=state,
                output_final_state=True, cu_seqlens=ends, output=o, output_state=final,
            )  # fmt: skip

        return Call(run, lambda result: (result[0].reshape(x.v.shape), self.k_first(result[1])))
