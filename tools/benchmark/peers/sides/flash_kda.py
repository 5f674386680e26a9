"""FlashKDA: kda's forward pass by CUTLASS, as vLLM's wheel has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from inputs import Inputs
from rows import Row
from sides.side import Call, Side, one_line


class FlashKda(Side):
    name = "flash-kda"
    about = "FlashKDA"
    packages = ("vllm",)
    state_v_first = True

    def absent(self) -> str | None:
        # vLLM itself is not imported: its other extensions need the PyTorch that it was built with.
        found = importlib.util.find_spec("vllm")
        folders = [] if found is None else list(found.submodule_search_locations or [])
        files = [file for folder in folders for file in Path(folder).glob("_flashkda_C*.so")]
        if not files:
            return "vllm is not installed, or has no _flashkda_C"
        try:
            torch.ops.load_library(str(files[0]))
        except OSError as error:
            return one_line(error)
        return None

    def declines(self, row: Row) -> str | None:
        if row.op != "kda" or not row.bounded:
            return "it has kda with all options in the kernel only"
        if row.D != 128 or row.dtype != "bf16" or row.H != row.HV:
            return "it takes D = 128, bf16 and equal heads"
        return "it has no backward pass" if row.part != "forward" else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        library = torch.ops._flashkda_C
        q, k, v, g, beta = (one.reshape(1, -1, *one.shape[2:]) for one in (x.q, x.k, x.v, x.g, x.beta))
        state = self.own_state(x)
        o, final = torch.empty_like(v), torch.empty_like(state)
        ends = x.cu_seqlens
        if ends is None:
            ends = torch.arange(row.B + 1, device=q.device, dtype=torch.int64) * row.T
        size = library.get_workspace_size(q.shape[1], row.H, row.N)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            library.fwd(
                q, k, v, g, beta, row.D**-0.5, o, workspace, x.A_log, x.dt_bias.reshape(row.H, row.D),
                -5.0, state, final, ends, None, None,
            )  # fmt: skip
            return o, final

        return Call(run, lambda result: (result[0].reshape(x.v.shape), self.k_first(result[1])))
