"""flash-linear-attention's contexts of context parallelism, read as Wyvern's.

Its ``FLACPContext`` says what one rank has of a pack. One that is built while ``wyvern.fla`` is enabled carries
Wyvern's, which is of all ranks; of another, a copy for example, each rank reads what it needs for itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ._torch import torch  # noqa: F401 (before what imports it by its own name)
from torch import Tensor

from .distributed._context import CPContext, Range, lay_out, order_of, place

_OURS = "_wyvern"
# Replaced by the context, or of no use to Wyvern.
_OF_ONE_RANK = ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices")


def pairs() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """The library's function that makes contexts, with one that gives them Wyvern's too."""
    original = importlib.import_module("fla.ops.cp.context").get_cp_cu_seqlens
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_cp_cu_seqlens(*args: Any, **kwargs: Any) -> Any:
        theirs = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group")
        if group is None or "world_size" in given or hasattr(theirs, _OURS):
            return theirs
        try:
            ours = lay_out(
                group, *place(group), given["cu_seqlens"], given.get("conv1d_kernel_size"),
                given.get("cu_seqlens_cpu"), layout=given.get("layout", "contiguous"),
            )  # fmt: skip
        except (TypeError, ValueError):
            return theirs  # boundaries that the library takes and Wyvern does not
        setattr(theirs, _OURS, replace(ours, may_decline=True))
        return theirs

    return [(original, get_cp_cu_seqlens)]


def taking_theirs(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of wyvern.ops whose ``cp_context`` may be the library's; ``cu_seqlens`` then counts for nothing,
    as there."""
    kind = importlib.import_module("fla.ops.cp").FLACPContext
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, kind) for x in (*args, kwargs.get("cp_context"))):
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        theirs = given.get("cp_context")
        if not isinstance(theirs, kind):
            raise TypeError("cp_context is in the place of another argument; pass it by name")
        for name in _OF_ONE_RANK:
            given.pop(name, None)
        if theirs.group is None:  # one rank has all
            given.pop("cp_context")
            return function(**given, cu_seqlens=theirs.cu_seqlens, cu_seqlens_cpu=theirs.cu_seqlens_cpu)
        if given.get("use_graph") or theirs.pre_num_ranks_dev is not None:
            raise ValueError(
                "cp_context is given with use_graph, where a graph reads boundaries that change; Wyvern keeps them"
            )
        given["cp_context"] = context_of(theirs)
        return function(**given)

    return call


def context_of(theirs: Any) -> CPContext:
    """Wyvern's context for the library's, whose group is given; ValueError where it has no boundaries."""
    ours = getattr(theirs, _OURS, None)
    return read(theirs, *place(theirs.group)) if ours is None else ours


def read(theirs: Any, rank: int, P: int) -> CPContext:
    """The same by its attributes alone, for rank ``rank`` of P. No rank knows other ranks' boundaries."""
    if theirs.cu_seqlens is None:
        raise ValueError("cp_context has no cu_seqlens; it must have this rank's")
    on_cpu = theirs.cu_seqlens.cpu() if theirs.cu_seqlens_cpu is None else theirs.cu_seqlens_cpu
    local = theirs.cu_seqlens
    # How many ranges before each of this rank's have its first sequence, and behind it its last.
    if theirs.layout == "zigzag":
        n, split, part = 2, theirs.front_num_seqs, theirs.part_len
        counts = list(zip(theirs.pre_num_ranks_by_part, theirs.post_num_ranks_by_part, strict=True))
        ranges = (
            _range(0, local[: split + 1], on_cpu[: split + 1], *counts[0]),
            _range(part, local[split:] - part, on_cpu[split:] - part, *counts[1]),
        )
    else:
        n, counts = 1, [(theirs.pre_num_ranks, theirs.post_num_ranks)]
        ranges = (_range(0, local, on_cpu, *counts[0]),)
    _, order = order_of(P, n)
    spanning: set[int] = set()
    for number, (one, (before, behind)) in enumerate(zip(ranges, counts, strict=True)):
        at = order.index(rank * n + number)
        between = [*range(at - before + 1, at), *range(at + 1, at + behind)]
        spanning.update(order[i] for i in (between + [at] if one.spans else between))
    return CPContext(
        group=theirs.group,
        ranges=ranges,
        order=tuple(order),
        spanning=frozenset(spanning),
        transition=n * P > 2,
        layout=theirs.layout,
        exchange="gather",  # each rank folds for itself
        cu_seqlens=local,
        cu_seqlens_cpu=on_cpu,
        may_decline=True,
    )


def _range(start: int, cu_seqlens: Tensor, on_cpu: Tensor, before: int, behind: int) -> Range:
    boundaries = tuple(on_cpu.tolist())
    return Range(start, start + boundaries[-1], before > 0, behind > 0, boundaries, cu_seqlens, on_cpu)
