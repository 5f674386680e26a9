"""How the tokens of a sequence, or of a pack, lie on the ranks of a group."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .._torch import torch  # before what imports it by its own name
from torch import Tensor

from .._arguments import integer, tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_LAYOUTS = ("contiguous", "zigzag")
_EXCHANGES = ("auto", "gather", "heads", "ring")
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Range:
    """A stretch of consecutive tokens that one rank has.

    A *run* is what a range has of one sequence. Only a range's first run may have begun in another range, only
    its last may go on in one.
    """

    start: int  # of the tokens of this rank's tensors
    stop: int | None  # None: a dense batch whose tokens are not known before the call
    enters: bool  # its first run goes on from the range before
    leaves: bool  # its last run goes on in the range behind
    boundaries: tuple[int, ...] | None = None  # of its runs, from 0; None: dense, one run in every row of the batch
    cu_seqlens: Tensor | None = None  # the same on the device, and its copy on the CPU
    cu_seqlens_cpu: Tensor | None = None

    @property
    def spans(self) -> bool:
        """Whether one run both enters and leaves: the only ranges whose M anybody needs."""
        return self.enters and self.leaves and (self.boundaries is None or len(self.boundaries) == 2)


@dataclass(frozen=True, eq=False)
class CPContext:
    """What :func:`build_cp_context` gives, with the attributes of flash-linear-attention's ``FLACPContext``.

    Of a zigzag layout, where a rank has two ranges, ``is_first_rank``, ``is_last_rank``, ``pre_num_ranks``,
    ``post_num_ranks`` and ``pre_num_conv_tokens`` are None; of a dense batch whose tokens are not known the
    last is.
    """

    group: ProcessGroup
    ranges: tuple[Range, ...]  # of this rank, in the order of its tensors
    order: tuple[int, ...]  # all ranks' ranges in the order of tokens: rank * len(ranges) + number in the rank
    spanning: frozenset[int]  # which of these span; of another library's context those whose M this rank needs
    transition: bool  # whether some range of some rank spans: then every summary has K more columns, M
    layout: str = "contiguous"
    exchange: str = "auto"
    tokens: tuple[int, ...] | None = None  # of each rank
    boundaries: tuple[int, ...] | None = None  # of the whole pack's sequences; None: dense
    begins: tuple[int, ...] | None = None  # where each range begins in the order of tokens, and the last ends
    firsts: tuple[int, ...] | None = None  # where the sequences begin that go on at these places; None: dense
    cu_seqlens: Tensor | None = None  # of this rank's runs, on the device of the pack's
    cu_seqlens_cpu: Tensor | None = None
    is_first_rank: bool | None = None  # whether the first sequence here begins here
    is_last_rank: bool | None = None  # whether the last sequence here ends here
    pre_num_ranks: int | None = None  # ranks before this one that have a part of its first sequence
    post_num_ranks: int | None = None  # ranks behind it that have a part of its last
    conv1d_kernel_size: int | None = None
    pre_num_conv_tokens: int | None = None  # tokens of the first sequence on the ranks before
    may_decline: bool = False  # whether another library computes what the problem alone refuses

    @property
    def is_packed(self) -> bool:
        return self.ranges[0].boundaries is not None

    @property
    def num_seqs(self) -> int:
        return 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def is_cp_enabled(self) -> bool:
        return self.group is not None

    def copy_for_backward(self) -> CPContext:
        """Itself: nothing changes it."""
        return self


def build_cp_context(
    cu_seqlens: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    tokens: Sequence[int] | None = None,
    layout: str = "contiguous",
    exchange: str = "auto",
) -> CPContext:
    """How a pack, or a dense batch, lies on the ranks of ``group``: for ``cp_context=`` of ``wyvern.ops``.

    Nothing is exchanged: every rank calls it with the same arguments. It may serve any number of calls.

    Args:
        cu_seqlens: ``[N + 1]``, int32 or int64, the boundaries of the *whole* pack; None: a dense batch
            ``[B, T, ...]``, every row of which goes through all ranks.
        group: a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension, its ranks in the order of tokens; by
            default the whole job.
        conv1d_kernel_size: kept as an attribute, for flash-linear-attention's convolution.
        cu_seqlens_cpu: its copy on the CPU; without it a ``cu_seqlens`` on a GPU is waited for.
        tokens: the tokens of each rank, any numbers, also 0; by default equal ones of a pack, and of a dense
            batch those of each call.
        layout: "contiguous"; or "zigzag": of 2P pieces rank r has r and 2P - 1 - r, one behind the other, of
            equal lengths (the first has one token more where ``tokens`` is odd).
        exchange: how states pass between ranks (section 11 of the specification) where a sequence goes through a
            whole range: "gather", an all-gather of all summaries; "heads", two all-to-alls, between which each rank
            folds HV / P heads for all; "auto", heads from P = 4 and 2 MiB a rank on, where HV divides by P (where no
            sequence does, each state goes to the next rank alone); "ring", from rank to rank with
            ``batch_invariant`` and without gradients: the bits of one call.

    Raises ValueError or TypeError that names the argument, RuntimeError where ``torch.distributed`` is not
    initialized.
    """
    group = group_of(group)
    return lay_out(
        group, *place(group), cu_seqlens, conv1d_kernel_size, cu_seqlens_cpu, tokens, layout, exchange
    )


def place(group: ProcessGroup) -> tuple[int, int]:
    """This rank's number in the group, and how many there are."""
    import torch.distributed as dist

    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this rank is not in group; only its ranks make a context of it")
    return rank, dist.get_world_size(group)


def group_of(group: object) -> ProcessGroup:
    """The ProcessGroup of a group or mesh; of None that of the whole job."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed is not initialized; call torch.distributed.init_process_group() first"
        )
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; it must have 1: mesh[\"cp\"] is one of a mesh"
            )
        return group.get_group()
    raise TypeError(f"group is {type(group).__name__}; it must be a ProcessGroup or a DeviceMesh")


def lay_out(
    group: Any,
    rank: int,
    P: int,
    cu_seqlens: Tensor | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    tokens: Sequence[int] | None = None,
    layout: str = "contiguous",
    exchange: str = "auto",
) -> CPContext:
    """The context of rank ``rank`` of P."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, _LAYOUTS))}")
    if exchange not in _EXCHANGES:
        raise ValueError(f"exchange is {exchange!r}; it must be one of {', '.join(map(repr, _EXCHANGES))}")
    boundaries = None if cu_seqlens is None else _values(cu_seqlens, cu_seqlens_cpu)
    n = 1 if layout == "contiguous" else 2
    count = n * P
    tokens = _tokens(tokens, boundaries, P, count, layout)
    places, order = order_of(P, n)
    begins = None
    if tokens is not None:
        begins = [0]
        for i, place in enumerate(places):
            share = tokens[place] if n == 1 else (tokens[place] + (i < P)) // 2
            begins.append(begins[-1] + share)
    ranges = [_range(i, begins, boundaries, count) for i in range(count)]
    own = [i for i, place in enumerate(places) if place == rank]
    local: list[Range] = []
    runs = [0]  # the boundaries of this rank's runs
    for i in own:
        start = local[-1].stop if local else 0
        one = replace(ranges[i], start=start, stop=None if begins is None else start + begins[i + 1] - begins[i])
        if one.boundaries is not None:
            runs += [start + x for x in one.boundaries[1:]]
            one = replace(one, **_tensors(one.boundaries, cu_seqlens))
        local.append(one)
    spanning = frozenset(order[i] for i, one in enumerate(ranges) if one.spans)
    fla = _attributes(rank, begins, boundaries, P) if n == 1 else {}
    return CPContext(
        group=group,
        ranges=tuple(local),
        order=tuple(order),
        spanning=spanning,
        transition=bool(spanning),
        layout=layout,
        exchange=exchange,
        tokens=tokens,
        boundaries=boundaries,
        begins=None if begins is None else tuple(begins),
        firsts=None if boundaries is None else tuple(begin_of(boundaries, x) for x in begins),
        conv1d_kernel_size=conv1d_kernel_size,
        **({} if boundaries is None else _tensors(runs, cu_seqlens)),
        **fla,
    )


def order_of(P: int, n: int) -> tuple[list[int], list[int]]:
    """Of P ranks' ranges, n each, in the order of tokens: the rank that has each, and CPContext.order."""
    count = n * P
    places = [min(i, count - 1 - i) if n == 2 else i for i in range(count)]
    return places, [place * n + (i >= P) for i, place in enumerate(places)]


def _values(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> tuple[int, ...]:
    if tensor("cu_seqlens", cu_seqlens).dtype not in _INTEGERS:
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; it must be torch.int32 or torch.int64")
    values = tuple((cu_seqlens if cu_seqlens_cpu is None else tensor("cu_seqlens_cpu", cu_seqlens_cpu)).tolist())
    if not values or values[0] != 0 or list(values) != sorted(values):
        raise ValueError(f"cu_seqlens is {list(values)}; it must begin with 0 and never decrease")
    if len(values) != cu_seqlens.numel():
        raise ValueError(f"cu_seqlens_cpu has {len(values)} entries; it must be a copy of cu_seqlens")
    return values


def _tokens(
    tokens: Sequence[int] | None, boundaries: tuple[int, ...] | None, P: int, count: int, layout: str
) -> tuple[int, ...] | None:
    """The tokens of each rank, where they are known."""
    if tokens is not None:
        tokens = tuple(integer("tokens", x) for x in tokens)
        if len(tokens) != P or min(tokens) < 0:
            raise ValueError(f"tokens is {list(tokens)}; it must be the tokens of each of {P} ranks")
        if boundaries is not None and sum(tokens) != boundaries[-1]:
            raise ValueError(f"tokens is {list(tokens)}; its sum must be that of cu_seqlens, {boundaries[-1]}")
        return tokens
    if boundaries is None:
        if layout == "zigzag":
            raise ValueError("tokens is None; a dense batch in zigzag needs it: the tokens of each rank")
        return None
    if boundaries[-1] % count:
        raise ValueError(
            f"cu_seqlens ends at {boundaries[-1]}, which does not divide by {count}; pass tokens=, those of each rank"
        )
    return (boundaries[-1] // P,) * P


def _range(
    i: int, begins: list[int] | None, boundaries: tuple[int, ...] | None, count: int
) -> Range:
    """Range i in the order of tokens, with its runs."""
    if begins is None or boundaries is None:
        return Range(0, None, i > 0, i < count - 1)
    start, stop = begins[i], begins[i + 1]
    enters, leaves = (begin_of(boundaries, x) < x for x in (start, stop))
    inside = sorted({x for x in boundaries if start < x < stop})
    runs = [start, *inside, stop] if start < stop or enters else [start]
    return Range(0, 0, enters, leaves, tuple(x - start for x in runs))


def begin_of(boundaries: Sequence[int], token: int) -> int:
    """Where the sequence begins that goes on across ``token``; ``token`` itself where none does."""
    return boundaries[bisect_right(boundaries, token) - 1]


def _tensors(boundaries: Sequence[int], like: Tensor) -> dict[str, Tensor]:
    on_cpu = torch.tensor(boundaries, dtype=like.dtype)
    return {"cu_seqlens": on_cpu.to(like.device), "cu_seqlens_cpu": on_cpu}


def _attributes(
    rank: int, begins: list[int] | None, boundaries: tuple[int, ...] | None, P: int
) -> dict[str, Any]:
    """What flash-linear-attention asks of a contiguous context."""
    if begins is None or boundaries is None:
        before, behind = rank, P - 1 - rank
        halo = 0 if rank == 0 else None if begins is None else begins[rank]
    else:
        start, stop = begins[rank], begins[rank + 1]
        first = begin_of(boundaries, start)
        last = boundaries[bisect_left(boundaries, stop)]
        halo = start - first
        before = sum(first < x <= start for x in begins[1 : rank + 1])
        behind = sum(stop <= x < last for x in begins[rank + 1 : -1])
    return {
        "is_first_rank": before == 0,
        "is_last_rank": behind == 0,
        "pre_num_ranks": before,
        "post_num_ranks": behind,
        "pre_num_conv_tokens": halo,
    }


def context_of(cp_context: object) -> CPContext:
    """The context that a ``cp_context=`` stands for."""
    if isinstance(cp_context, CPContext):
        return cp_context
    import torch.distributed as dist

    if dist.is_available() and isinstance(cp_context, (dist.ProcessGroup, dist.DeviceMesh)):
        return build_cp_context(group=cp_context)
    raise ValueError(
        f"cp_context is given as {type(cp_context).__name__}; it must be a ProcessGroup, a DeviceMesh of one "
        "dimension, or what wyvern.distributed.build_cp_context() returns"
    )


_around: CPContext | None = None


@contextmanager
def context_parallel(cp_context: CPContext | ProcessGroup | DeviceMesh) -> Iterator[CPContext]:
    """Chunked operators inside the block have ``cp_context``, where their call names no other; recurrent
    ones, whose token is one rank's, raise ValueError.

    It holds for the whole process and not for a thread: activation checkpointing calls the operators again in
    PyTorch's threads of the backward pass, which then must be inside the block too. Without checkpointing it
    need not.
    """
    global _around
    before, _around = _around, context_of(cp_context)
    try:
        yield _around
    finally:
        _around = before


def around() -> CPContext | None:
    """The context of the innermost :func:`context_parallel` block."""
    return _around
