"""FlashInfer's kernels for pools ``[slots, HV, V, K]`` in bfloat16, below its decoding functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peers.adapters import decline

from ..gdn_decode import gated_delta_rule_mtp as mtp


def gated_delta_rule_mtp(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    *,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    output_state_indices: Tensor | None = None,
    accepted_steps: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    disable_output: bool = False,
    recovery_steps: int = 0,
    **options: Any,
) -> Tensor:
    """accepted_steps, recovery_steps: a state is left after so many tokens, and after none later."""
    if (softplus_beta, softplus_threshold) != (1.0, 20.0):
        decline(f"{__name__}.gated_delta_rule_mtp", "softplus_beta and softplus_threshold: the gate has none")
    token = torch.arange(a.shape[1], device=a.device)
    last = token[-1:] if accepted_steps is None else accepted_steps[:, None]
    if recovery_steps:
        last = token[recovery_steps - 1]
    also = None  # where a state goes that has a slot of its own too
    if ssm_state_indices is not None:
        also, output_state_indices = output_state_indices, None
        ssm_state_indices = torch.where(token <= last, ssm_state_indices, -1)
    elif not disable_state_update and (recovery_steps or accepted_steps is not None):
        slot = initial_state_indices if output_state_indices is None else output_state_indices
        ssm_state_indices = torch.where(token == last, slot[:, None], -1)
        output_state_indices = None
    o, _ = mtp(
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        A_log=A_log,
        a=a,
        dt_bias=dt_bias,
        ssm_state_indices=ssm_state_indices,
        disable_state_update=disable_state_update,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        output_state_indices=output_state_indices,
        **options,
    )
    if also is not None:
        initial_state_source[also] = initial_state_source[ssm_state_indices[:, -1]]
    return o


def gated_delta_rule(*args: Any, **options: Any) -> Tensor:
    """One token, the same otherwise."""
    return gated_delta_rule_mtp(*args, **options)
