"""FlashInfer's decoding: raw gates, states in place or in pools, an index below 0 for a row to pass over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peers.adapters import served

# Takes rows of the batch, a token and the states of these rows after it.
Keep = Callable[[Tensor, int, Tensor], None]


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """States ``[B, HV, K, V]``, updated in place."""
    o, new = _decode(q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm, v_first=False)
    return _given(o, output), state.copy_(new)


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """States ``[B, HV, V, K]``, updated in place, or a pool of them."""
    if initial_state is None:
        assert state is not None
        initial_state = state
        initial_state_indices = torch.arange(len(q), device=q.device)
    assert initial_state_indices is not None
    if initial_state.dtype is torch.bfloat16:  # there rows to pass over have slot 0
        initial_state_indices = initial_state_indices.clamp_min(0)
    o = _in_pool(
        q, k, v, initial_state, initial_state_indices, output_state_indices, A_log, a, dt_bias, b,
        scale, use_qk_l2norm, None,
    )  # fmt: skip
    return _given(o, output), initial_state


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Several tokens; the states after each go to a buffer for them, or to rows of the pool."""
    keep: Keep | None = None
    if ssm_state_indices is not None:

        def keep(live: Tensor, t: int, state: Tensor) -> None:
            rows = ssm_state_indices[live, t].long()
            initial_state[rows[rows >= 0]] = state[rows >= 0].to(initial_state.dtype)

    elif intermediate_states_buffer is not None:

        def keep(live: Tensor, t: int, state: Tensor) -> None:
            intermediate_states_buffer[live, t] = state.to(intermediate_states_buffer.dtype)

    write_to = output_state_indices
    in_rows = ssm_state_indices is not None and output_state_indices is None
    if disable_state_update in (None, True) or in_rows:
        write_to = torch.full_like(initial_state_indices, -1)
    o = _in_pool(
        q, k, v, initial_state, initial_state_indices, write_to, A_log, a, dt_bias, b, scale,
        use_qk_l2norm, keep,
    )  # fmt: skip
    if output is None:
        return o, initial_state
    live = initial_state_indices >= 0  # the others' rows of a given output stay as they are
    output[live] = o[live].to(output.dtype)
    return output, initial_state


def _in_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    read_from: Tensor,
    write_to: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
    keep: Keep | None,
) -> Tensor:
    """o, zero where the index of a row's state is below 0; the pool's rows are updated in place.

    keep: gets the states after each token.
    """
    write_to = read_from if write_to is None else write_to
    o = v.new_zeros(v.shape, dtype=q.dtype)
    live = (read_from >= 0).nonzero()[:, 0]
    if len(live) == 0:
        return o
    q, k, v, a, b = (x[live] for x in (q, k, v, a, b))
    state = pool[read_from[live].long()]
    if keep is None:
        o[live], state = _decode(q, k, v, state, A_log, a, dt_bias, b, scale, use_qk_l2norm, v_first=True)
    else:
        for t in range(q.shape[1]):
            one = slice(t, t + 1)
            o[live, one], state = _decode(
                q[:, one], k[:, one], v[:, one], state, A_log, a[:, one], dt_bias, b[:, one], scale,
                use_qk_l2norm, v_first=True,
            )  # fmt: skip
            keep(live, t, state)
    written = write_to[live] >= 0
    pool[write_to[live][written].long()] = state[written].to(pool.dtype)
    return o


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
    v_first: bool,
) -> tuple[Tensor, Tensor]:
    return served(
        "fused_recurrent_gated_delta_rule",
        q,
        k,
        v,
        g=a,
        beta=b,
        scale=scale,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=v_first,
    )


def _given(o: Tensor, output: Tensor | None) -> Tensor:
    return o if output is None else output.copy_(o)
