"""cuDNN's front end: kda, and the gated delta rule, by whatever engine it chooses."""

from __future__ import annotations

import torch

from inputs import Inputs
from rows import Row
from sides.side import Call, Side


class CudnnFrontend(Side):
    name = "cudnn"
    about = "cuDNN front end"
    modules = ("cudnn.linear_attention.ops",)
    packages = ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "cuda-bindings")
    trains = True
    state_v_first = True

    def declines(self, row: Row) -> str | None:
        return "it takes D = 64 and 128" if row.D not in (64, 128) else None

    def prepare(self, row: Row, x: Inputs) -> Call:
        from cudnn.linear_attention.ops import gated_delta_net, kimi_delta_attention

        leaves = {
            name: t if name == "initial_state" else t.reshape(-1, *t.shape[2:])
            for name, t in self.leaves(row, x).items()
        }
        if row.part != "forward":
            leaves["beta"] = leaves["beta"].float()  # its backward pass on Hopper takes no other
            leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        ends = x.cu_seqlens
        if ends is None:
            ends = torch.arange(row.B + 1, device=x.q.device, dtype=torch.int64) * row.T
        ends = ends.int()
        options: dict[str, object] = dict(output_final_state=True, cu_seqlens=ends)
        if x.g is None:  # without a gate it is the delta rule
            options["g"] = torch.zeros(leaves["beta"].shape, device=x.q.device)
        if row.bounded:
            options |= dict(
                use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
                gate_lower_bound=-5.0, a_log=x.A_log, dt_bias=x.dt_bias,
            )  # fmt: skip
        function = kimi_delta_attention if row.op == "kda" else gated_delta_net
        return Call(
            lambda: function(**leaves, **options),
            lambda result: (result[0].reshape(x.v.shape), self.k_first(result[1])),
            leaves,
        )
