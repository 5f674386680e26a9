"""The tensors of a row: the same for all sides, random, and never zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rows import GATE_MEANS, Row

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Inputs:
    """As the operators take them: q, k [B,T,H,D], v [B,T,HV,D], beta [B,T,HV], g [B,T,HV] in
    float32 (kda [B,T,HV,D], with a bound of q's dtype and raw), initial_state [N,HV,K,V] in
    float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None
    initial_state: Tensor
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None  # [HV,D]

    def given(self) -> dict[str, Tensor]:
        """What has gradients, by name."""
        names = ("q", "k", "v", "beta", "g", "initial_state")
        return {name: x for name in names if (x := getattr(self, name)) is not None}


def make(row: Row, device: str, seed: int = 1) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[row.dtype]
    B, T, H, HV, D = row.B, row.T, row.H, row.HV, row.D

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    def rows_of(*shape: int) -> Tensor:
        x = normal(*shape)
        return (x if row.bounded else torch.nn.functional.normalize(x, dim=-1)).to(dtype)

    x = Inputs(
        q=rows_of(B, T, H, D),
        k=rows_of(B, T, H, D),
        v=normal(B, T, HV, D).to(dtype),
        beta=(normal(B, T, HV) if row.bounded else 0.05 + 0.9 * uniform(B, T, HV)).to(dtype),
        g=None,
        initial_state=0.1 * normal(row.N, HV, D, D),
    )
    if row.lengths:
        ends = [sum(row.lengths[:n]) for n in range(row.N + 1)]
        x.cu_seqlens = torch.tensor(ends, device=device, dtype=torch.int64)
    if row.op == "delta_rule":
        return x
    shape = (B, T, HV, D) if row.op == "kda" else (B, T, HV)
    mean = GATE_MEANS[row.op][row.gate]
    if not row.bounded:
        x.g = 2 * mean * uniform(*shape)
        return x
    # The decay is -5 sigmoid(exp(A_log) (g + dt_bias)), whose mean dt_bias moves; what is small is
    # nearly exp(..), and the mean of exp(g) is exp(0.5).
    x.g = normal(*shape).to(dtype)
    x.A_log = 0.05 * normal(HV)
    share = mean / -5.0
    bias = math.log(share / (1 - share)) - 0.5 * (1 - 2 * share)
    x.dt_bias = bias + 0.1 * normal(HV, D)
    return x
