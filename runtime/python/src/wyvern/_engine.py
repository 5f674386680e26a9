"""What the adapters of serving engines share: raw gates, states in a pool, a result in a given buffer."""

from __future__ import annotations

from typing import Any

from ._torch import torch  # noqa: F401 (before what imports it by its own name)
from torch import Tensor

from . import ops


def decline_if(asked: bool, why: str) -> None:
    """Raises ValueError, with which a call goes to the engine's own function."""
    if asked:
        raise ValueError(why)


def packed_heads(mixed_qkv: Tensor, pool: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k ``[N, 1, H, K]``, v ``[N, 1, HV, V]``, views of rows ``[N, 2 H K + HV V]``, by the pool.

    Raises:
        ValueError: the rows are not of such heads.
    """
    HV, V, K = pool.shape[1:]
    values = HV * V
    keys, rest = divmod(mixed_qkv.shape[-1] - values, 2 * K)
    if mixed_qkv.dim() != 2 or keys <= 0 or rest:
        raise ValueError(
            f"mixed_qkv has shape {list(mixed_qkv.shape)}; it must be [N, 2 H K + HV V] of states "
            f"[HV, V, K] = {[HV, V, K]}"
        )
    q, k, v = mixed_qkv.unsqueeze(1).split([keys * K, keys * K, values], dim=-1)
    return q.unflatten(-1, (keys, K)), k.unflatten(-1, (keys, K)), v.unflatten(-1, (HV, V))


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    kda: bool,
    pool: Tensor,
    scale: float | None = None,
    lower_bound: float | None = None,
    l2norm: bool = True,
    raw_gate: bool = True,
    raw_beta: bool = True,
    out: Tensor | None = None,
    state_v_first: bool = True,
    **options: Any,
) -> Tensor:
    """o of the recurrent pass over a pool ``[slots, HV, V, K]``, with gates and norms in the kernel.

    state_v_first: false: slots are ``[HV, K, V]``.
    a, b: gates and rates of the tokens of q, in any shape of as many elements; raw unless said otherwise.
    out: what o is written to, as :func:`place_in` has it, and what is returned.
    options: of :func:`wyvern.ops.fused_recurrent_kda`, of the pool.
    """
    tokens = v.shape[:3]
    function = ops.fused_recurrent_kda if kda else ops.fused_recurrent_gated_delta_rule
    if kda:
        options["lower_bound"] = lower_bound
    elif lower_bound is not None:
        raise ValueError(f"lower_bound is {lower_bound}; a gate of heads has none")
    o, _ = function(
        q,
        k,
        v,
        g=a.reshape(*tokens, q.shape[3]) if kda else a.reshape(tokens),
        beta=b.reshape(tokens),
        A_log=A_log,
        dt_bias=dt_bias,
        scale=scale,
        use_qk_l2norm_in_kernel=l2norm,
        use_gate_in_kernel=raw_gate,
        use_beta_sigmoid_in_kernel=raw_beta,
        state_v_first=state_v_first,
        state=pool,
        out=place_in(out, v),
        **options,
    )
    return o if out is None else out


def place_in(out: Tensor | None, v: Tensor) -> Tensor | None:
    """The first elements of out in the shape of v, which is that of o, for an operator to write to.

    Raises:
        ValueError: out is not contiguous, or too small.
    """
    if out is None:
        return None
    if not out.is_contiguous() or out.numel() < v.numel():
        raise ValueError(
            f"out has shape {list(out.shape)} and strides {list(out.stride())}; it must be contiguous, of the "
            f"{v.numel()} elements of v or more"
        )
    return out.view(-1)[: v.numel()].view(v.shape)
