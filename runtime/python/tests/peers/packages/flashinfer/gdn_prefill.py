"""FlashInfer's prefill: decays, not their logarithms, rows packed without a batch, states [N, HV, V, K]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peers.adapters import decline, served

_NAME = "flashinfer.gdn_prefill.chunk_gated_delta_rule"
_SMALLEST = torch.finfo(torch.float32).tiny  # a decay of 0 has no logarithm


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,  # FlashInfer's own ignores it too
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Any = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    if checkpoint_every_n_tokens or state_checkpoints is not None:
        decline(_NAME, "checkpoints: wyvern.ops does not return the gated delta rule's states between chunks")
    if state_indices is not None and output_final_state and output_state is None:
        decline(_NAME, "state_indices without output_state: a refusal of FlashInfer's own")
    assert cu_seqlens is not None
    heads = max(q.shape[1], v.shape[1])
    if q.shape[1] > v.shape[1]:  # several query heads for a key head: Wyvern has a key head for each
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    rows = (1, q.shape[0], heads)
    o, state = served(
        "chunk_gated_delta_rule",
        q[None],
        k[None],
        v[None],
        g=q.new_zeros(rows, dtype=torch.float32) if g is None else g.clamp_min(_SMALLEST).log()[None],
        beta=q.new_ones(rows, dtype=torch.float32) if beta is None else beta[None],
        scale=scale or None,
        initial_state=_rows(initial_state, state_indices),
        output_final_state=output_final_state,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )
    o = o[0] if output is None else output.copy_(o[0])
    if not output_final_state:
        return o
    if output_state is None:
        return o, state
    # Its sequences without tokens leave their rows as they are.
    some = cu_seqlens.diff() > 0
    where = torch.arange(len(some), device=q.device) if state_indices is None else state_indices
    output_state[where[some].long()] = state[some].to(output_state.dtype)
    return o, output_state


def _rows(states: Tensor | None, indices: Tensor | None) -> Tensor | None:
    """The sequences' states of a pool, in a dtype that Wyvern takes."""
    if states is None:
        return None
    if indices is not None:
        states = states[indices.long()]
    return states if states.dtype in (torch.float32, torch.bfloat16) else states.float()
