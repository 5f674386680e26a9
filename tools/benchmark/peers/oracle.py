"""The recurrence in float64, which every side is compared with: some heads of a row, all tokens.

In chunks rather than token by token (the inverse by substitution, nothing rounded below float64),
so that 131,072 tokens take seconds; the test compares it with the recurrence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from inputs import Inputs
from rows import Row

CHUNK = {"gdn": 64, "delta_rule": 64, "kda": 16}
BOUND = -5.0


class Sample:
    """The part of a row that is checked: the first and last key head with their value heads, and of
    a batch that is not packed the first and last sequence."""

    def __init__(self, row: Row) -> None:
        group = row.HV // row.H
        self.packed = bool(row.lengths)
        self.heads = sorted({0, row.H - 1})
        self.value_heads = [h * group + n for h in self.heads for n in range(group)]
        self.sequences = None if self.packed else sorted({0, row.B - 1})

    def of(self, name: str, x: Tensor) -> Tensor:
        """The part of a tensor [B,T,heads,...], or of a state [N,HV,...]."""
        if self.sequences is not None:
            x = x[self.sequences]
        if name == "initial_state" or name == "final_state":
            return x[:, self.value_heads]
        return x[:, :, self.heads if name in ("q", "k") else self.value_heads]


def relative(x: Tensor, wanted: Tensor) -> float | None:
    """rms(x - wanted) / rms(wanted); None where that is not finite."""
    wanted = wanted.detach().double()
    error = float((x.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-300))
    return error if math.isfinite(error) else None


def leaves(row: Row, x: Inputs, sample: Sample) -> dict[str, Tensor]:
    """The sampled inputs in float64, asking for gradients."""
    parts = {name: sample.of(name, tensor) for name, tensor in x.given().items()}
    return {name: part.detach().double().requires_grad_() for name, part in parts.items()}


def outputs(row: Row, x: Inputs, sample: Sample, part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """o and the final state [N,HV,K,V] of sampled inputs."""
    q, k, v, beta, state = (part[name] for name in ("q", "k", "v", "beta", "initial_state"))
    g = part.get("g")
    if row.bounded:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
        beta = beta.sigmoid()
        rate = x.A_log.double().exp()[sample.value_heads, None]
        bias = x.dt_bias.double()[sample.value_heads]
        g = BOUND * torch.sigmoid(rate * (g + bias))
    group = row.HV // row.H
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    if g is None:
        g = torch.zeros_like(beta)
    if g.dim() == 3:
        g = g[..., None]
    q = q * row.D**-0.5
    chunk = CHUNK[row.op]
    if not sample.packed:
        return _sequences(q, k, v, beta, g, state, chunk)
    ends = x.cu_seqlens.tolist()
    os, states = [], []
    for n, (first, last) in enumerate(zip(ends, ends[1:], strict=False)):
        piece = [t[:, first:last] for t in (q, k, v, beta, g)]
        o, final = _sequences(*piece, state[n : n + 1], chunk)
        os.append(o)
        states.append(final)
    return torch.cat(os, 1), torch.cat(states)


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, S: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Of B sequences of equal length, all [B,T,heads,...], q scaled; S [B,heads,K,V]."""
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), S
    pad = -T % chunk

    def chunks(x: Tensor) -> tuple[Tensor, ...]:
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, pad]).transpose(1, 2)  # [B,heads,T,...]
        return x.split(chunk, 2)

    at = torch.arange(chunk, device=q.device)
    below = at[:, None] >= at
    one = torch.eye(chunk, dtype=q.dtype, device=q.device)
    os = []
    beta = beta[..., None]
    for qc, kc, vc, bc, gc in zip(*map(chunks, (q, k, v, beta, g)), strict=True):
        G = gc.cumsum(2)
        difference = G[:, :, :, None] - G[:, :, None]  # rows r, columns s, channels
        decay = difference.masked_fill(~below[..., None], -torch.inf).exp()
        if decay.shape[-1] == 1:
            A, P = (x @ kc.transpose(-1, -2) * decay[..., 0] for x in (kc, qc))
        else:
            A, P = (torch.einsum("bhrk,bhsk,bhrsk->bhrs", x, kc, decay) for x in (kc, qc))
        A = (bc * A).tril(-1)
        u = bc * (vc - (G.exp() * kc) @ S)
        u = torch.linalg.solve_triangular(one + A, u, upper=False, unitriangular=True)
        os.append((G.exp() * qc) @ S + P @ u)
        last = G[:, :, -1:]
        S = last.exp().transpose(-1, -2) * S + ((last - G).exp() * kc).transpose(-1, -2) @ u
    return torch.cat(os, 2).transpose(1, 2)[:, :T], S
