"""vLLM's convolutions of rows of channels ``[D, T]``, on windows in slots of a pool; slot 0 is of null sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from peers.adapters import counted
from wyvern import _stage, stages


def _convolve(
    name: str,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    index: Tensor,
    activation: str | None,
    cu_seqlens: Tensor | None,
    **more: Tensor | None,
) -> Tensor:
    """y as ``rows`` [B, T, D]; pool: [slots, D, columns], with columns or channels side by side."""
    fields, given = stages._convolution(rows, weight, bias, activation, None, cu_seqlens)
    tokens_first = pool.stride(1) == 1
    fields |= {
        "pass": "recurrent" if name == "short_conv_step" else "forward",
        "inplace_state": True,
        "inplace_conv_state": True,
        "conv_columns": pool.shape[2],
        "conv_tokens_first": tokens_first,
        "state_index": True,
        "null_slot_zero": True,
        "state_slots": pool.shape[0],
        "index_dtype": "int32",
        "has_initial_state": more.get("has_initial_state") is not None,
    }
    if "num_accepted" in more:
        fields["index_columns"] = index.shape[1]
    windows = pool.transpose(1, 2) if tokens_first else pool
    made = _stage.run(name, fields, given | {"state_index": index} | more, {"conv_state": windows})
    return torch.cat([made[f"{part}_conv"].flatten(2) for part in "qkv"], 2)


@counted
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None,
) -> Tensor:
    """Of a pack; there may be more indices than sequences."""
    index = cache_indices[: len(query_start_loc) - 1]
    y = _convolve(
        "short_conv", x.t()[None], weight, bias, conv_states, index, activation, query_start_loc,
        has_initial_state=has_initial_state,
    )  # fmt: skip
    return y[0].t()


@counted
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
) -> Tensor:
    """Of a few tokens of each sequence, ``[N, D, T]``, or of a pack of drafts, ``[T, D]``."""
    if query_start_loc is None:
        index = conv_state_indices[:, None]
        y = _convolve("short_conv_step", x.transpose(1, 2), weight, bias, conv_state, index, activation, None)
        return y.transpose(1, 2)
    # The stage has a slot for each draft, as states do; windows are in the first.
    index = conv_state_indices[:, None].expand(-1, max_query_len).contiguous()
    return _convolve(
        "short_conv_step", x[None], weight, bias, conv_state, index, activation, query_start_loc,
        num_accepted=num_accepted_tokens,
    )[0]  # fmt: skip
