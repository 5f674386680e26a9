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


def by_heads(context: CPContext, summaries: Tensor) -> bool:
    """Whether states pass by all-to-alls and not by an all-gather: alike in all ranks.

    summaries: as :func:`exchange` has them. ValueError where heads are asked for that do not divide.
    """
    P, HV = dist.get_world_size(context.group), summaries.shape[2]
    if context.exchange == "heads":
        if HV % P:
            raise ValueError(
                f"exchange is 'heads' and v has {HV} heads, which {P} ranks do not divide; use 'gather' or 'auto'"
            )
        return True
    bytes_of_rank = summaries.numel() * summaries.element_size()
    return (
        context.exchange == "auto"
        and P >= _LEAST_RANKS_BY_HEADS
        and HV % P == 0
        and bytes_of_rank >= _LEAST_BYTES_BY_HEADS
    )


def exchange(context: CPContext, summaries: Tensor, V: int, reverse: bool = False) -> Tensor:
    """The state that enters each range of this rank; with ``reverse`` the gradient of the one that leaves it.

    summaries: ``[ranges, B, HV, K, V]``, R of each range of this rank (dR with ``reverse``), with
    ``context.transition`` ``[ranges, B, HV, K, V + K]``, R and M; what nobody reads may be zeros.

    Returns ``[ranges, B, HV, K, V]``. Every rank of the group calls it. Collectives move bytes and add nothing,
    and both ways fold in one order: they have the same bits, run after run.
    """
    group, n = context.group, summaries.shape[0]
    P, rank = dist.get_world_size(group), dist.get_rank(group)
    if not by_heads(context, summaries):
        return fold(context, gather(group, summaries), V, reverse)[rank * n : (rank + 1) * n]
    # [P, n, B, HV / P, ...]: to each rank its heads, from each rank its ranges; and back.
    every = all_to_all(group, summaries, 2)
    states = fold(context, every.flatten(0, 1), V, reverse)
    return torch.cat(all_to_all(group, states, 0).unbind(), 2)


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
    parts = torch.stack(x.chunk(P, dim))
    if torch.compiler.is_compiling():
        return _wait(_functional.all_to_all_single(parts, [1] * P, [1] * P, group.group_name))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def fold(context: CPContext, summaries: Tensor, V: int, reverse: bool = False) -> Tensor:
    """The same of all ranks' ranges: S = 0; for each range in the order of tokens: it enters, S <- R + M S.

    ``reverse``: from the last range to the first, with M transposed. Products are in float64, states rounded
    behind each range: no setting of PyTorch's matrix products makes a difference.
    """
    states = summaries.new_zeros([*summaries.shape[:-1], V])
    S = states[0]
    for i in reversed(context.order) if reverse else context.order:
        states[i] = S
        R = summaries[i, ..., :V]
        if i in context.spanning:
            M = summaries[i, ..., V:].double()
            R = (R.double() + (M.mT if reverse else M) @ states[i].double()).to(R.dtype)
        S = R
    return states
