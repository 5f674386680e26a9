"""Tokens that go to other ranks: those before a short convolution's, and all of them, by heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._arguments import integer, tensor
from ._context import CPContext, context_of, group_of
from ._exchange import all_to_all, gather

_Source = tuple[int, int] | None  # a range in the order of tokens, and a row of its last ones; None: zeros


def halo(x: Tensor, cp_context: object, width: int) -> Tensor:
    """The ``width`` tokens before each range of this rank, with their gradient; zeros before a sequence's start.

    What a causal convolution of ``width + 1`` taps reads before a rank's own tokens: over several ranks where
    they are short.

    Args:
        x: ``[B, T, ...]``, the tokens of this rank; the same B, dtype and later dimensions in all ranks.
        cp_context: as the operators have it. Without ``tokens`` (a plain group) each rank has at least ``width``.
        width: at least 1, the same in all ranks.

    Returns ``[B, width, ...]``; of a pack, where B is 1, and in zigzag ``[ranges * B, width, ...]``, one range
    behind the other. A pack's runs but the first of each range begin with their sequence and read nothing before.

    Collective, forwards and backwards. ValueError where T is not what the context says.
    """
    context = context_of(cp_context)
    width = integer("width", width)
    if width < 1:
        raise ValueError(f"width is {width}; it must be at least 1")
    B, T = tensor("x", x).shape[:2]
    wanted = context.ranges[-1].stop
    if wanted is None and T < width:
        raise ValueError(f"x has {T} tokens; without tokens= of build_cp_context() it must have {width} or more")
    if wanted is not None and T != wanted:
        raise ValueError(f"x has {T} tokens; cp_context has {wanted} for this rank")
    if context.is_packed and B != 1:
        raise ValueError(f"B is {B}; it must be 1 with a cp_context of cu_seqlens")
    ends = []
    for one in context.ranges:
        first = one.start if one.boundaries is None else one.start + one.boundaries[-2:][0]  # of its last run
        rows = x[:, first : T if one.stop is None else one.stop][:, -width:]
        missing = width - rows.shape[1]
        ends.append(torch.cat([rows.new_zeros([B, missing, *x.shape[2:]]), rows], 1) if missing else rows)
    return _Halo.apply(context, torch.stack(ends)).flatten(0, 1)


def rows_before(context: CPContext, ends: Tensor) -> Tensor:
    """Of the last rows ``[ranges, B, width, ...]`` of each range of this rank the rows before each.

    ends: the last rows of what a range's last run begins with (where its sequence does not come from another range)
    and of its own tokens.

    Every rank of the group calls it.
    """
    n, width = ends.shape[0], ends.shape[2]
    every = gather(context.group, ends)
    rank = dist.get_rank(context.group)
    result = torch.zeros_like(ends)
    for local in range(n):
        for row, source in enumerate(_sources(context, width, context.order.index(rank * n + local))):
            if source is not None:
                result[local, :, row] = every[context.order[source[0]], :, source[1]]
    return result


def gradients_of_ends(context: CPContext, gradient: Tensor) -> Tensor:
    """The gradients of what :func:`rows_before` took, added in the order of the ranges that read them."""
    n, width = gradient.shape[0], gradient.shape[2]
    every = gather(context.group, gradient)
    rank = dist.get_rank(context.group)
    result = torch.zeros_like(gradient)
    for i, reader in enumerate(context.order):
        for row, source in enumerate(_sources(context, width, i)):
            if source is not None and context.order[source[0]] // n == rank:
                result[context.order[source[0]] % n, :, source[1]] += every[reader, :, row]
    return result


def _sources(context: CPContext, width: int, i: int) -> list[_Source]:
    """Where the tokens before range i, in the order of tokens, are. Before the first of their sequence they are in
    front of the tokens of the range that has that one, which for a dense batch is the first."""
    begins, firsts = context.begins, context.firsts
    if begins is None:
        return [(i - 1, row) if i else None for row in range(width)]
    start = begins[i]
    if i == 0 or (firsts is not None and firsts[i] == start):
        return [None] * width
    found: list[_Source] = []
    owner = i - 1
    for token in range(start - 1, start - width - 1, -1):
        while owner and begins[owner] > (token if firsts is None else max(token, firsts[i])):
            owner -= 1
        found.append((owner, width - (begins[owner + 1] - token)))
    return found[::-1]


class _Halo(torch.autograd.Function):
    """:func:`rows_before` with its gradient."""

    @staticmethod
    def forward(ctx: Any, context: CPContext, ends: Tensor) -> Tensor:
        ctx.context = context
        return rows_before(context, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, gradients_of_ends(ctx.context, gradient)


class _AllToAll(torch.autograd.Function):
    """Dimension ``scatter`` is divided over the ranks, dimension ``join`` put together from them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, scatter: int, join: int) -> Tensor:
        ctx.of = group, join, scatter
        return torch.cat(all_to_all(group, x, scatter).unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _AllToAll.apply(gradient, *ctx.of), None, None, None


def by_heads(
    op: Callable[..., tuple[Any, ...]], *tensors: Tensor | None, group: object = None, **options: Any
) -> tuple[Any, ...]:
    """The same by heads: every rank computes whole sequences of a part of the heads.

    Two all-to-alls of tokens, where ``cp_context=`` exchanges states alone; with K = V = 128 these are
    fewer bytes where a rank has less than about 128 P tokens. It gives the bits of one rank's heads. With gradients.

    Args:
        op: an operator, ``wyvern.ops.chunk_kda``, or any function of such tensors whose first result is o.
        tensors: ``[B, T, heads, ...]`` or None, in the order of op's parameters: this rank's tokens, as many in
            each rank, ranks in the order of tokens, and all heads, whose numbers the group divides.
        group: a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension; by default the whole job.
        options: op's others, by name: ``cu_seqlens`` of whole sequences; A_log, dt_bias and initial_state of this
            rank's heads.

    Returns what op returns, o with this rank's tokens and all heads, states with this rank's heads.
    Collective, forwards and backwards. ValueError where the group does not divide a number of heads.
    """
    group = group_of(group)
    P = dist.get_world_size(group)
    for i, x in enumerate(tensors):
        if x is not None and tensor(f"tensor {i} of by_heads()", x).shape[2] % P:
            raise ValueError(f"tensor {i} of by_heads() has {x.shape[2]} heads, which {P} ranks do not divide")
    o, *others = op(*(x if x is None else _AllToAll.apply(x, group, 2, 1) for x in tensors), **options)
    return _AllToAll.apply(o, group, 1, 2), *others
