"""vLLM's Kimi Delta Attention on the CPU: states [N, H, V, K], in a cache where slot 0 is nobody's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.adapters import served


def chunk_kda_with_fused_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor,
    g_bias: Tensor,
    *,
    safe_gate: bool,
    **options: Any,
) -> Any:
    return served(
        "chunk_kda",
        q,
        k,
        v,
        g=g,
        beta=beta,
        use_gate_in_kernel=True,
        safe_gate=safe_gate,
        A_log=a_log,
        dt_bias=g_bias,
        state_v_first=True,
        **options,
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    sigmoid_beta: bool,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = True,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    slots = ssm_state_indices.long()
    o, state = served(
        "fused_recurrent_kda",
        q,
        k,
        v,
        g=g,
        beta=beta,
        A_log=a_log,
        dt_bias=g_bias,
        initial_state=initial_state[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=compute_gate,
        use_beta_sigmoid_in_kernel=sigmoid_beta,
        lower_bound=lower_bound,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )
    taken = slots > 0
    initial_state[slots[taken]] = state[taken]
    return o, initial_state
