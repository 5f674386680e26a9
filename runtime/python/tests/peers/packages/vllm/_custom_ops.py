"""vLLM's CPU kernels of the gated delta rule: gates without a batch, states in pools."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.adapters import missing_from, served

__getattr__ = missing_from(__name__)


def chunk_gated_delta_rule_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> Any:
    return served(
        "chunk_gated_delta_rule",
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> Tensor:
    """o as ``[T, 1, HV, V]``; the states of the pool are updated in place."""
    rows = initial_state_indices.long()
    o, state = served(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        g=a[None],
        beta=b[None],
        initial_state=initial_state_source[rows],
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    initial_state_source[rows] = state
    return o.transpose(0, 1)
