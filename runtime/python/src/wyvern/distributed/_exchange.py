"""What ranks tell each other: whether their calls agree, and what their tokens make of a state."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._call import fold_op
from ._context import CPContext

_functional = torch.ops._c10d_functional  # what a trace has of the collectives
_wait = _functional.wait_tensor
_LEAST_RANKS_BY_HEADS = 4
_LEAST_BYTES_BY_HEADS = 2 << 20  # of a rank's summaries; below it the second collective costs more than it saves


class ContextError(RuntimeError):
    """A call that flash-linear-attention, or another library, made with a ``cp_context`` failed after the ranks
    had begun to exchange: one rank alone must not turn to another computation."""


@contextmanager
def exchanging() -> Iterator[None]:
    """Marks errors that are raised where the other ranks of a call may wait for this one."""
    try:
        yield
    except Exception as error:
        error.while_exchanging = True  # type: ignore[attr-defined]
        raise


class _Refusal(NamedTuple):
    kind: str
    message: str


@dataclass
class _Calls:
    """What a group's calls were, as far as this rank knows."""

    kinds: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)  # compared ones, by digests
    count: int = 0
    digest: int = 0  # of all in their order

    def add(self, kind: int) -> None:
        self.count += 1
        self.digest = (self.digest * 1_000_003 + kind) % (1 << 64)

    def __str__(self) -> str:
        return f"{self.count} with the digest {self.digest:016x}"


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()
_EARLIER = "the sequence of earlier calls"
_KINDS = {"TypeError": TypeError, "ValueError": ValueError, "RuntimeError": RuntimeError}


def is_agreed(context: CPContext, call: dict[str, str]) -> bool:
    """Whether the ranks have compared such calls before, or are not to. Of those that they have it keeps count."""
    if os.environ.get("WYVERN_CP_CHECK", "1") == "0":
        return True
    calls = _calls.get(context.group)
    kind = None if calls is None else calls.kinds.get(tuple(call.items()))
    if kind is None:
        return False
    calls.add(kind)
    return True


def calls_of(group: dist.ProcessGroup) -> str:
    """What the group's compared calls were so far: the same text in all ranks that made them in one order."""
    return str(_calls.get(group, _Calls()))


def agree(context: CPContext, call: dict[str, str], error: Exception | None) -> None:
    """Compares what each rank is about to compute, before anything else is exchanged, and what it computed before.

    call: by the names of arguments what must be the same in all ranks. error: why this rank cannot compute.

    Every rank of the group calls it. Raises, the same sentence in every rank, a ValueError that names the first
    argument that differs and who has which value, or an error of the kind of the lowest rank's.
    """
    calls = _calls.setdefault(context.group, _Calls())
    mine = (call | {_EARLIER: str(calls)}, error and _Refusal(_kind(error), str(error)))
    every: list[tuple[dict[str, str], _Refusal | None]] = [mine] * dist.get_world_size(context.group)
    dist.all_gather_object(every, mine, group=context.group)
    asked = [one for one, _ in every]
    for name in dict.fromkeys(name for one in asked for name in one):
        values: dict[str, list[int]] = {}
        for rank, one in enumerate(asked):
            values.setdefault(one.get(name, "not given"), []).append(rank)
        if len(values) > 1:
            if name == _EARLIER:
                calls.count = calls.digest = 0  # in all ranks: it is said once
            found = "; ".join(f"{value} in {_ranks(ranks)}" for value, ranks in values.items())
            raise ValueError(
                f"{name} differs between the ranks of cp_context: {found}; it must be the same in all"
            ) from error
    refusals = [(rank, why) for rank, (_, why) in enumerate(every) if why is not None]
    if refusals:
        why = refusals[0][1]
        ranks = _ranks([rank for rank, _ in refusals])
        raise _KINDS[why.kind](f"{why.message} (in {ranks} of cp_context)") from error
    key = tuple(call.items())
    calls.kinds[key] = zlib.crc32(repr(key).encode())
    calls.add(calls.kinds[key])


def _kind(error: Exception) -> str:
    return next(name for name in _KINDS if isinstance(error, _KINDS[name]))


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def by_heads(context: CPContext, states: Tensor) -> bool:
    """Whether summaries pass by all-to-alls and not by an all-gather: alike in all ranks.

    states: ``[ranges, B, HV, K, V or more]``; M comes to it. ValueError where heads are asked for that do not divide.
    """
    P, HV = dist.get_world_size(context.group), states.shape[2]
    if context.exchange == "heads":
        if HV % P:
            raise ValueError(
                f"exchange is 'heads' and v has {HV} heads, which {P} ranks do not divide; use 'gather' or 'auto'"
            )
        return True
    n, B, _, K, V = states.shape
    bytes_of_rank = n * B * HV * K * (V + K) * states.element_size()
    return (
        context.exchange == "auto"
        and P >= _LEAST_RANKS_BY_HEADS
        and HV % P == 0
        and bytes_of_rank >= _LEAST_BYTES_BY_HEADS
    )


def exchange(context: CPContext, summaries: Tensor, V: int) -> tuple[list[Tensor | None], Tensor | None]:
    """The state ``[B, HV, K, V]`` that enters each range of this rank, and M for :func:`exchange_gradients`.

    summaries: ``[ranges, B, HV, K, V]``, R of each range of this rank, with ``context.transition``
    ``[ranges, B, HV, K, V + K]``, R and M: R is 0 unless the range leaves, M unless it spans.

    Every rank of the group calls it. Collectives move bytes and add nothing, and both ways fold in one order:
    they have the same bits, run after run. Of ranges that nothing enters the state is None or any.
    """
    if not context.transition:
        return _passed_on(context, summaries, 1), None
    if by_heads(context, summaries[..., :V]):
        every = _to_heads(context, summaries)
        return _from_heads(context, fold(context, every, V)), every[..., V:]
    states = fold(context, gather(context.group, summaries), V)
    return _own(context, states), summaries[..., V:]


def exchange_gradients(context: CPContext, gradients: Tensor, M: Tensor | None) -> list[Tensor | None]:
    """The gradient ``[B, HV, K, V]`` of the state that leaves each range of this rank; else as :func:`exchange`.

    gradients: ``[ranges, B, HV, K, V]``, dR of each range, 0 unless it enters. M: what exchange() gave.
    """
    V = gradients.shape[-1]
    if M is None:
        return _passed_on(context, gradients, -1)
    if by_heads(context, gradients):
        every = torch.cat([_to_heads(context, gradients), M], -1)
        return _from_heads(context, fold(context, every, V, reverse=True))
    every = gather(context.group, torch.cat([gradients, M], -1))
    return _own(context, fold(context, every, V, reverse=True))


def _own(context: CPContext, states: Tensor) -> list[Tensor | None]:
    """This rank's of all, copied: what is kept until the backward pass would keep all of them."""
    n = len(context.ranges)
    first = dist.get_rank(context.group) * n
    return list(states[first : first + n].clone())


def _to_heads(context: CPContext, x: Tensor) -> Tensor:
    """``[P * n, B, HV / P, ...]``: all ranges' x ``[n, B, HV, ...]``, of this rank's part of the heads."""
    return all_to_all(context.group, x, 2).flatten(0, 1)


def _from_heads(context: CPContext, states: Tensor) -> list[Tensor | None]:
    """Of all ranges' states of a part of the heads this rank's with all heads."""
    received = all_to_all(context.group, states, 0)  # [P, n, B, HV / P, K, V]
    return list(received.movedim(0, 2).flatten(2, 3))


def _passed_on(context: CPContext, x: Tensor, step: int) -> list[Tensor | None]:
    """Where no range has maps: of each of this rank's ranges the x ``[n, ...]`` of the one ``step`` before it.

    Each goes to one rank alone, by one all-to-all of what there is.
    """
    group, order, n = context.group, context.order, len(context.ranges)
    P, rank = dist.get_world_size(group), dist.get_rank(group)
    sent: list[tuple[int, int, int]] = []  # the other rank, the place in the order, and the range of this rank
    received: list[tuple[int, int, int]] = []
    for at, source in enumerate(order):
        if 0 <= at + step < len(order):
            target = order[at + step]
            if source // n == rank:
                sent.append((target // n, at, source % n))
            if target // n == rank:
                received.append((source // n, at, target % n))
    sent.sort()
    received.sort()
    given = x[: len(sent)] if n == 1 else torch.cat([x[i : i + 1] for _, _, i in sent])
    counts = [[sum(one[0] == other for one in ends) for other in range(P)] for ends in (received, sent)]
    if torch.compiler.is_compiling():
        got = _wait(_functional.all_to_all_single(given.contiguous(), *counts, group.group_name))
    else:
        got = x.new_empty([len(received), *x.shape[1:]])
        dist.all_to_all_single(got, given.contiguous(), *counts, group=group)
    states: list[Tensor | None] = [None] * n
    for m, (_, _, i) in enumerate(received):
        states[i] = got[m]
    return states


def behind(x: Tensor, gradient: Tensor) -> Tensor:
    """x, which a trace sends in the backward pass: what does not depend on a gradient it would send in the forward
    pass, where other ranks send something else."""
    if not torch.compiler.is_compiling():
        return x
    one = gradient[:, :1, :1, :1]
    return x + (one.isnan() & one.isfinite()).any().to(x.dtype)  # 0


def gather(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """``[P * n, ...]`` of every rank's x ``[n, ...]``."""
    P = dist.get_world_size(group)
    if torch.compiler.is_compiling():
        return _wait(_functional.all_gather_into_tensor(x.contiguous(), P, group.group_name))
    every = x.new_empty([P * x.shape[0], *x.shape[1:]])
    dist.all_gather_into_tensor(every, x.contiguous(), group=group)
    return every


def all_to_all(group: dist.ProcessGroup, x: Tensor, dim: int) -> Tensor:
    """``[P, ...]``: of every rank's x the part for this rank, where ranks divide dimension ``dim``."""
    P = dist.get_world_size(group)
    # A copy only where the parts do not lie one behind the other.
    parts = x.unflatten(dim, (P, x.shape[dim] // P)).movedim(dim, 0).contiguous()
    if torch.compiler.is_compiling():
        return _wait(_functional.all_to_all_single(parts, [1] * P, [1] * P, group.group_name))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def fold(context: CPContext, summaries: Tensor, V: int, reverse: bool = False) -> Tensor:
    """The same of all ranks' ranges: S = 0; for each range in the order of tokens: it enters, S <- R + M S.

    ``reverse``: from the last range to the first, with M transposed. Sums are in IEEE float32 and have one order
    (of float64 in float64): no setting of PyTorch's matrix products makes a difference.
    """
    if summaries.dtype is torch.float32:
        return fold_op(summaries, context.order, V, reverse)
    states = summaries.new_zeros([*summaries.shape[:-1], V])
    S = states[0]
    for i in reversed(context.order) if reverse else context.order:
        states[i] = S
        M = summaries[i, ..., V:]
        # Zeros would make NaN of another sequence's state that is not finite.
        S = summaries[i, ..., :V] + ((M.mT if reverse else M) @ S if i in context.spanning else 0)
    return states
