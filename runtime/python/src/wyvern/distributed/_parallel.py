"""Operators whose sequences lie on several ranks, by the ordinary passes of each rank.

A rank's tokens act on a state by an affine map, S -> M S + R (section 11 of runtime/SPECIFICATION.md). So each
range computes R and, where one sequence goes through it, M; one exchange tells it the state that enters it; the
ordinary pass goes on from there. The backward pass does so from the right, with dR and the same M, transposed.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from .. import _recurrence
from .._call import (
    Inputs,
    Problem,
    _OnceDifferentiable,
    backward_op,
    by_parameter,
    forward_op,
    is_transformed,
    raise_as_python,
    refuse_tangents,
    text_of,
)
from .._extension import version
from .._stage import dtype_name, validate
from ._context import CPContext, Range, context_of
from ._exchange import agree, exchange, exchanging, is_agreed

# M of a longer run is the product of those of its parts: 16-bit operands lose digits of long walks of the identity.
_TOKENS_OF_M = 2048
_OF_A_RANK = ("output_final_state", "seqlens_hint")  # options that may differ between ranks
_PER_STEP = ("k", "v", "beta")
_PER_CALL = ("initial_state", "cu_seqlens", "A_log", "dt_bias", "cu_seqlens_cpu")


def _rows(x: Inputs, start: int, stop: int, initial_state: Tensor) -> Inputs:
    """Tokens start to stop of x, from these states."""
    T = x.q.shape[1]

    def cut(name: str, y: Tensor | None) -> Tensor | None:
        if y is None or name in _PER_CALL:
            return y
        steps = y.shape[1] // T if T and name in _PER_STEP else 1
        return y[:, start * steps : stop * steps]

    return Inputs(*(cut(*one) for one in x._asdict().items()))._replace(initial_state=initial_state)


class _Problem(NamedTuple):
    """An operator with its options, computed by its kernels or, of float64, by the recurrence."""

    fields: Problem
    text: str
    exact: bool

    def forward(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """o and the final states ``[N, HV, K, V]``."""
        o, state = _recurrence.run(self.fields, x) if self.exact else forward_op(self.text, *x)
        return o, state

    def backward(self, x: Inputs, do: Tensor, dht: Tensor) -> Inputs:
        """The gradients of x, whose initial_state is given."""
        given = {
            name: y for name, y in x._asdict().items() if y is not None and not name.startswith("cu_seqlens")
        }
        if self.exact:
            leaves = {name: y.detach().requires_grad_() for name, y in given.items()}
            with torch.enable_grad():
                outputs = self.forward(x._replace(**leaves))
            pairs = [(y, dy) for y, dy in zip(outputs, (do, dht), strict=True) if y.requires_grad]
            gradients = torch.autograd.grad(
                [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        else:
            gradients = backward_op(self.text, *x, do, dht, None, [])
        nothing = Inputs(*(None for _ in Inputs._fields))
        return nothing._replace(**dict(zip(given, gradients, strict=True)))


class _Part(NamedTuple):
    """A range of this rank: its tokens, and the states that its runs start from."""

    range: Range
    tokens: slice  # of this rank's tensors
    sequences: slice  # of the caller's states
    x: Inputs  # without boundaries

    @property
    def packed(self) -> Inputs:
        """x with the boundaries of the range's runs."""
        return self.x._replace(cu_seqlens=self.range.cu_seqlens, cu_seqlens_cpu=self.range.cu_seqlens_cpu)

    def run(self, i: int) -> tuple[slice, slice]:
        """The first (0) or last (-1) run: its tokens of x, and its rows of the states (of a dense batch all)."""
        bounds = self.range.boundaries
        if bounds is None:
            return slice(0, self.x.q.shape[1]), slice(None)
        n = i % (len(bounds) - 1)
        return slice(bounds[n], bounds[n + 1]), slice(n, n + 1)

    def run_alone(self, i: int) -> Inputs:
        tokens, rows = self.run(i)
        return _rows(self.x, tokens.start, tokens.stop, self.x.initial_state[rows])


def _parts(context: CPContext, x: Inputs) -> list[_Part]:
    """This rank's ranges; states that enter them are zeros."""
    (B, T, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    parts = []
    first = 0
    for one in context.ranges:
        count = B if one.boundaries is None else len(one.boundaries) - 1
        tokens = slice(one.start, T if one.stop is None else one.stop)
        # Of a dense batch in zigzag the second range has the same sequences; the first has their beginnings.
        sequences = slice(None) if one.boundaries is None else slice(first, first + count)
        if x.initial_state is None:
            states = x.q.new_zeros([count, HV, K, V], dtype=_state_dtype(x))
        else:
            states = x.initial_state[sequences].clone(memory_format=torch.contiguous_format)
        part = _Part(one, tokens, sequences, _rows(x, tokens.start, tokens.stop, states))
        if one.enters:
            states[part.run(0)[1]] = 0
        parts.append(part)
        first += count
    return parts


def _state_dtype(x: Inputs) -> torch.dtype:
    return torch.float64 if x.q.dtype is torch.float64 else torch.float32


def _transition(problem: _Problem, x: Inputs) -> Tensor:
    """M ``[B, HV, K, K]`` of a run: what it makes of the identity where the values that it writes are 0."""
    (B, T, _, K), HV = x.q.shape, x.v.shape[2]
    identity = torch.eye(K, dtype=_state_dtype(x), device=x.q.device).repeat(B, HV, 1, 1)
    M = identity
    for n in range((T + _TOKENS_OF_M - 1) // _TOKENS_OF_M):  # in a trace no condition on T itself
        part = _rows(x, n * _TOKENS_OF_M, min((n + 1) * _TOKENS_OF_M, T), identity)
        v = part.v.new_zeros([*part.v.shape[:3], K])
        write = None if part.write is None else part.write.new_zeros(v.shape)
        one = problem.forward(part._replace(v=v, write=write))[1]
        M = (one.double() @ M.double()).to(M.dtype) if n else one
    return M


class _ContextParallel(torch.autograd.Function):
    """o, and the state behind this rank's tokens of each of its sequences."""

    @staticmethod
    def forward(
        ctx: Any, context: CPContext, problem: _Problem, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x = Inputs(*tensors)
        parts = _parts(context, x)
        (B, _, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
        columns = V + K if context.transition else V
        summaries = x.q.new_zeros([len(parts), B, HV, K, columns], dtype=_state_dtype(x))
        for summary, part in zip(summaries, parts, strict=True):
            if part.range.leaves:
                last = part.run_alone(-1)
                summary[..., :V] = problem.forward(last)[1]
                if part.range.spans:
                    summary[..., V:] = _transition(problem, last)
        entering = exchange(context, summaries, V)
        outputs, states = [], []
        for part, state in zip(parts, entering, strict=True):
            if part.range.enters:
                part.x.initial_state[part.run(0)[1]] = state
            o, final_states = problem.forward(part.packed)
            outputs.append(o)
            states.append(final_states)
        ctx.of = context, problem
        M = summaries[..., V:].clone() if any(part.range.spans for part in parts) else None
        ctx.save_for_backward(*tensors, entering, M)
        return torch.cat(outputs, 1), _by_sequence(parts, states)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dstates: Tensor) -> tuple[Any, ...]:
        context, problem = ctx.of
        *tensors, entering, M = ctx.saved_tensors
        gradients = _gradients(context, problem, Inputs(*tensors), entering, M, do, dstates)
        if torch.is_grad_enabled():  # create_graph=True
            count = len(gradients)
            gradients = _OnceDifferentiable.apply(problem.text, count, *gradients, *tensors, do, dstates)
        return None, None, *gradients


@torch.no_grad()
def _gradients(
    context: CPContext,
    problem: _Problem,
    x: Inputs,
    entering: Tensor,
    M: Tensor | None,
    do: Tensor,
    dstates: Tensor,
) -> list[Tensor | None]:
    """The gradients of x; entering and M ``[ranges, B, HV, K, V or K]`` are kept from the forward pass."""
    parts = _parts(context, x)
    dense = parts[0].range.boundaries is None
    V = entering.shape[-1]
    columns = V + x.q.shape[3] if context.transition else V
    summaries = entering.new_zeros([*entering.shape[:-1], columns])
    if M is not None:
        summaries[..., V:] = M
    behind = []  # of each range the gradients of the states behind its runs
    for i, (summary, part) in enumerate(zip(summaries, parts, strict=True)):
        dht = dstates[part.sequences].clone(memory_format=torch.contiguous_format)
        if dense and i < len(parts) - 1:
            dht.zero_()
        behind.append(dht)
        if part.range.enters:
            tokens, rows = part.run(0)
            part.x.initial_state[rows] = entering[i]
            of_first = problem.backward(part.run_alone(0), do[:, part.tokens][:, tokens], dht[rows])
            summary[..., :V] = of_first.initial_state
    leaving = exchange(context, summaries, V, reverse=True)
    found: list[Inputs] = []
    for part, dht, gradient in zip(parts, behind, leaving, strict=True):
        if part.range.leaves:
            dht[part.run(-1)[1]] += gradient
        found.append(problem.backward(part.packed, do[:, part.tokens], dht))
        if part.range.enters:
            found[-1].initial_state[part.run(0)[1]] = 0
    gradients: list[Tensor | None] = []
    for name, given, ours in zip(Inputs._fields, x, zip(*found, strict=True), strict=True):
        if given is None:
            gradients.append(None)
        elif name == "initial_state":
            gradients.append(ours[0] if dense else torch.cat(ours))
        else:
            gradients.append(torch.stack(ours).sum(0) if name in _PER_CALL else torch.cat(ours, 1))
    return gradients


def _by_sequence(parts: list[_Part], states: list[Tensor]) -> Tensor:
    """The states behind this rank's sequences: of a dense batch those behind its last range."""
    return states[-1] if parts[0].range.boundaries is None else torch.cat(states)


def _ring(context: CPContext, problem: _Problem, x: Inputs) -> tuple[Tensor, Tensor]:
    """The same from rank to rank: each range waits for the state that the one before it ends with."""
    rank, n = dist.get_rank(context.group), len(context.ranges)
    outputs, states = [], []
    parts = _parts(context, x)
    for i, part in enumerate(parts):
        at = context.order.index(rank * n + i)
        if part.range.enters:
            owner = context.order[at - 1] // n
            rows = part.run(0)[1]
            state = torch.empty_like(part.x.initial_state[rows])
            if owner == rank:
                state.copy_(states[-1][parts[i - 1].run(-1)[1]])
            else:
                dist.recv(state, group=context.group, group_src=owner)
            part.x.initial_state[rows] = state
        o, final_states = problem.forward(part.packed)
        outputs.append(o)
        states.append(final_states)
        if part.range.leaves and (owner := context.order[at + 1] // n) != rank:
            dist.send(final_states[part.run(-1)[1]].contiguous(), group=context.group, group_dst=owner)
    return torch.cat(outputs, 1), _by_sequence(parts, states)


def run(
    cp_context: object, refused: str | None, problem: Problem, x: Inputs
) -> tuple[Tensor, Tensor | None]:
    """o and, where the problem asks for it, the states behind this rank's tokens, with their gradients.

    Collective: every rank of the group calls it, and every rank's backward pass has to run.

    Args:
        cp_context: as the operators of wyvern.ops have it.
        refused: the name of an argument that was given and cannot be with a context; None: there is none.
        x: states with V first where the problem says so; its boundaries are not looked at.
    """
    context = context_of(cp_context)
    x = x._replace(cu_seqlens=None, cu_seqlens_cpu=None)
    if is_transformed():
        raise ValueError("cp_context is given; torch.func cannot transform what several ranks compute")
    if forward_ad._current_level >= 0:
        refuse_tangents(problem["op"], *x)
    gradients = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in x)
    error = _error(context, x, problem, refused, gradients)
    v_first = "state_v_first" in problem
    fields = {name: value for name, value in problem.items() if name not in ("state_v_first", *_OF_A_RANK)}
    exact = x.q.dtype is torch.float64
    with_state = {**fields, "output_final_state": 1}
    one = _Problem(with_state, text_of(with_state), exact)
    if exact:
        x = Inputs(*(y if y is None else y.double() for y in x))
        x = x if x.A_log is None else x._replace(A_log=x.A_log.reshape(-1))
    if x.initial_state is not None:
        state = x.initial_state.mT if v_first else x.initial_state
        x = x._replace(initial_state=state.to(_state_dtype(x)).contiguous())
    if context.may_decline:
        _refuse(fields, x)
    if torch.compiler.is_compiling():  # ranks compare calls that run, not ones that are traced
        if error is not None:
            raise error
        o, state = _compute(context, one, x)
    else:
        with exchanging():
            _agree(context, one, x, _call_of(context, x, fields, gradients), error)
            o, state = _compute(context, one, x)
    if "output_final_state" not in problem:
        return o, None
    return o, state.mT.contiguous() if v_first else state


def _compute(context: CPContext, problem: _Problem, x: Inputs) -> tuple[Tensor, Tensor]:
    if context.exchange == "ring" or problem.exact:
        return _compute_untraced(context, problem, x)
    return _ContextParallel.apply(context, problem, *x)


@torch.compiler.disable
def _compute_untraced(context: CPContext, problem: _Problem, x: Inputs) -> tuple[Tensor, Tensor]:
    """What torch.compile has no graph of: send and receive, and float64, whose gradient is autograd's."""
    if context.exchange == "ring":
        return _ring(context, problem, x)
    return _ContextParallel.apply(context, problem, *x)


def _agree(
    context: CPContext, problem: _Problem, x: Inputs, call: dict[str, str], error: ValueError | None
) -> None:
    """Compares a call with the other ranks' where it is the first of its kind; raises this rank's error in any."""
    capturing = x.q.is_cuda and torch.cuda.is_current_stream_capturing()
    if not (capturing or is_agreed(context, call)):
        agree(context, call, error or _first_error(context, problem, x))
    elif error is not None:
        raise error


def _refuse(fields: Problem, x: Inputs) -> None:
    """Raises what fields, dtypes, heads and dimensions alone say against a problem: the same in all ranks."""
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v)):
        if y.dim() != 4:
            raise ValueError(f"{name} has {y.dim()} dimensions; it must have 4")
        if y.dtype is not x.q.dtype:
            raise TypeError(f"{name} is {y.dtype}; it must be {x.q.dtype}, as q is")
    if x.q.dtype is not torch.float64 or not x.q.is_cpu:
        (H, K), (HV, V), dtype = x.q.shape[2:], x.v.shape[2:], dtype_name("q", x.q)
        dtypes = {"dtype": dtype, "beta_dtype": dtype}
        validate(fields | dtypes | {"B": 1, "N": 1, "T": 1, "H": H, "HV": HV, "K": K, "V": V})


def _error(
    context: CPContext, x: Inputs, fields: Problem, refused: str | None, gradients: bool
) -> ValueError | None:
    """Why this rank cannot compute, by what can be seen without computing."""
    if refused is not None:
        return ValueError(f"{refused} is given; it must be left out with cp_context")
    ring, invariant = context.exchange == "ring", "batch_invariant" in fields
    if ring != invariant:
        return ValueError(
            "exchange is 'ring', which is for batch_invariant=True; use 'auto'"
            if ring
            else "batch_invariant is true; with cp_context it needs exchange='ring' of build_cp_context()"
        )
    if ring and gradients:
        return ValueError("batch_invariant is true; it has no gradient, so call under torch.no_grad()")
    if x.q.dim() != 4:
        return None  # the operator says so
    B, T = x.q.shape[:2]
    if context.is_packed and B != 1:
        return ValueError(f"B is {B}; it must be 1 with a cp_context of cu_seqlens")
    wanted = context.ranges[-1].stop
    if wanted is not None and T != wanted:
        return ValueError(f"q has {T} tokens; cp_context has {wanted} for this rank")
    return None


def _first_error(context: CPContext, problem: _Problem, x: Inputs) -> Exception | None:
    """What the ordinary pass of this rank's tokens raises, which others are to hear of: a wrong shape, a missing
    compiler."""
    try:
        with torch.no_grad():
            problem.forward(x._replace(cu_seqlens=context.cu_seqlens, cu_seqlens_cpu=context.cu_seqlens_cpu))
    except (TypeError, ValueError, RuntimeError) as error:
        try:
            named = by_parameter(problem.fields, x)
            raise_as_python(error, **{name: y for name, y in named.items() if y is not None})
        except (TypeError, ValueError, RuntimeError) as told:
            return told
    return None


def _call_of(
    context: CPContext, x: Inputs, fields: Problem, gradients: bool
) -> dict[str, str]:
    """What must be the same in all ranks, by the names of arguments."""
    call = {"the version of wyvern": version()} | {name: str(value) for name, value in fields.items()}
    for name, shown, y in zip(Inputs._fields, by_parameter(fields, x), x, strict=True):
        if y is None or name == "initial_state":
            continue
        shape: list[int | str] = list(y.shape)
        if name not in _PER_CALL and len(shape) > 1 and x.q.dim() == 4:
            steps = fields.get("num_householder", 1) if name in _PER_STEP else 1
            if shape[1] == x.q.shape[1] * steps:
                shape[1] = "T"
        call[shown] = f"{y.dtype} [{', '.join(map(str, shape))}]"
    for name in ("boundaries", "tokens", "layout", "exchange"):
        value = repr(getattr(context, name))
        if len(value) > 200:
            value = f"one of SHA-256 {hashlib.sha256(value.encode()).hexdigest()[:16]}"
        call["cu_seqlens" if name == "boundaries" else name] = value
    return call | {"the device": x.q.device.type, "whether a gradient is wanted": str(gradients)}
