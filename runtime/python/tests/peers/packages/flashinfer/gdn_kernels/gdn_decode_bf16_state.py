"""FlashInfer's decoding with a pool of states ``[pool, HV, V, K]`` in bfloat16."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from peers.adapters import decline

from ..gdn_decode import gated_delta_rule_mtp as mtp


def gated_delta_rule_mtp(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
) -> Tensor:
    name = f"{__name__}.gated_delta_rule_mtp"
    if accepted_steps is not None or recovery_steps:
        decline(name, "accepted_steps: no operator runs another number of tokens for each sequence so")
    if disable_output:
        decline(name, "disable_output: every operator computes its output")
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        decline(name, "softplus_beta and softplus_threshold: the gate has none")
    given: Any = (q, k, v, initial_state_source, initial_state_indices)
    o, _ = mtp(
        given[0],
        given[1],
        given[2],
        given[3],
        given[4].clamp_min(0),  # slot 0 is the rows' to pass over
        A_log,
        a,
        dt_bias,
        b,
        scale,
        output,
        intermediate_states_buffer,
        ssm_state_indices,
        disable_state_update,
        use_qk_l2norm_in_kernel,
        output_state_indices,
    )
    return o


def gated_delta_rule(*args: Any, **options: Any) -> Tensor:
    """One token, the same otherwise."""
    return gated_delta_rule_mtp(*args, **options)
