"""Operators whose sequences lie on several ranks, by summaries and the ordinary passes of each rank.

A rank's tokens act on a state by an affine map, S -> M S + R (section 11 of runtime/SPECIFICATION.md). So each
range that a sequence leaves computes R of its last run, and M too where that run spans the range, by one problem
with ``summary``; one exchange tells it the state that enters it; the ordinary pass goes on from there. The backward
pass does so from the right, with dR of the first run of each range that a sequence enters, by one backward problem
with ``summary``, and the M of the forward pass, transposed.

A dense call on one range, which is what long sequences are, launches the summary, the exchange, the fold and the
pass, and copies nothing: tensors go from one to the next as they are. Where both then cost less by the model that
chooses plans, the summary hands the maps of its segments to the pass, which does not find them again.

The rows before a range's first run, which its convolution reads, come from other ranks; _layer.py convolves before all
that, and takes gradients through the norm of o before the backward pass.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from .. import _recurrence
from .._call import (
    Inputs,
    Problem,
    _OnceDifferentiable,
    backward_op,
    backward_summary_op,
    by_parameter,
    forward_op,
    is_transformed,
    raise_as_python,
    refuse_tangents,
    resume_op,
    shared_summary_op,
    summary_op,
    text_of,
)
from .._extension import version
from .._stage import FLOATS, dtype_name, shared_segments, validate
from ._context import CPContext, Range, context_of
from ._exchange import agree, behind, exchange, exchange_gradients, exchanging, is_agreed
from ._layer import (
    apart,
    bare,
    by_autograd,
    check_rows,
    convolve,
    convolve_gradients,
    normalize,
    normalize_gradients,
)
from ._tokens import gradients_of_ends, rows_before

_OF_A_RANK = ("output_final_state", "output_conv_state", "seqlens_hint")  # options that may differ between ranks
_PER_STEP = ("k", "v", "beta")
_STATES = ("initial_state", "initial_conv_state")
_PER_CALL = (
    *_STATES, "cu_seqlens", "A_log", "dt_bias", "norm_weight", "conv_weight", "conv_bias", "cu_seqlens_cpu",
)  # fmt: skip


class _Segments(NamedTuple):
    """What a summary found of its segments, for the pass over the same rows."""

    fields: Problem  # chunk_size and segment_chunks
    M: Tensor
    R: Tensor


class _Problem(NamedTuple):
    """An operator with its options, computed by its kernels or, of float64, by the recurrence."""

    fields: Problem
    layer: Problem  # those of the convolution and the norm
    exact: bool
    keeps: bool  # whether a backward pass is to follow

    @property
    def text(self) -> str:
        return text_of(self.fields)

    @property
    def steps(self) -> int:
        """Rows of k of a token."""
        return int(self.fields.get("num_householder", 1))

    def forward(
        self, x: Inputs, with_states: bool = True, segments: _Segments | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of convolved rows o, the final states ``[N, HV, K, V]`` and, for a backward pass, o before the norm; from
        the segments that a summary of these rows gave, where it did."""
        fields = {**self.fields, "output_final_state": 1} if with_states else self.fields
        if self.exact:
            raw, *states = _recurrence.run(fields, bare(x))
            o = raw if x.norm_gate is None else normalize(raw, x, self.layer)
            return o, states[0], raw
        raw = None
        if x.norm_gate is not None:
            fields = fields | {name: self.layer[name] for name in ("output_norm", "norm_eps")}
            fields |= {"keep_output": 1} if self.keeps else {}
        if segments is None:
            o, *others = forward_op(text_of(fields), *x)
        else:
            o, *others = resume_op(text_of(fields | segments.fields), *x, segments.M, segments.R)
        if "keep_output" in fields:
            raw = others.pop()
        return o, others[0] if others else None, raw

    def backward(self, x: Inputs, do: Tensor, dht: Tensor | None) -> Inputs:
        """The gradients of x."""
        given = {
            name: y for name, y in x._asdict().items() if y is not None and not name.startswith("cu_seqlens")
        }
        if self.exact:
            found = by_autograd(lambda leaves: self.forward(x._replace(**leaves))[:2], given, (do, dht))
        else:
            found = dict(zip(given, backward_op(self.text, *x, do, dht, None, []), strict=True))
        return Inputs(*(found.get(name) for name in Inputs._fields))

    def summary(self, x: Inputs, transition: bool, alone: bool = False) -> tuple[Tensor, _Segments | None]:
        """R ``[N, HV, K, V]`` of each sequence, with ``transition`` R and M ``[N, HV, K, V + K]``; and where x is
        ``alone``, all that the pass behind it has, and sharing them pays, its segments."""
        x = bare(x)
        if not self.exact:
            fields = {**self.fields, "transition": 1} if transition else self.fields
            shared = self._shared(x, transition) if alone else {}
            if not shared:
                return summary_op(text_of(fields), *x), None
            summary, M, R = shared_summary_op(text_of(fields | shared), *x)
            return summary, _Segments(shared, M, R)
        R = self.forward(x)[1]
        if not transition:
            return R, None
        # M is what the tokens make of the identity where the values that they write are 0.
        N, HV, K, _ = R.shape
        identity = torch.eye(K, dtype=R.dtype).repeat(N, HV, 1, 1)
        v = x.v.new_zeros([*x.v.shape[:3], K])
        write = None if x.write is None else torch.zeros_like(v)
        return torch.cat([R, self.forward(x._replace(v=v, write=write, initial_state=identity))[1]], -1), None

    def _shared(self, x: Inputs, transition: bool) -> Problem:
        """The fields by which the pass takes the summary's segments; none where the cost model says that both alone
        are faster, and in a trace, which cannot ask it."""
        if torch.compiler.is_compiling() or isinstance(x.q, FakeTensor):
            return {}
        rate = next((y for y in (x.beta, x.erase) if y is not None), x.q)
        typed = {"dtype": x.q, "beta_dtype": rate} | ({} if x.g is None else {"g_dtype": x.g})
        if x.q.dim() != 4 or x.v.dim() != 4 or any(y.dtype not in FLOATS for y in typed.values()):
            return {}  # the operator says so
        (B, T, H, K), (HV, V) = x.q.shape, x.v.shape[2:]
        fields = {**self.fields, "B": B, "N": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}
        fields |= {name: dtype_name(name, y) for name, y in typed.items()}
        fields |= {"initial_state": 1, "output_final_state": 1}
        chunk_size, segment_chunks = shared_segments(x.q.device, tuple(fields.items()), transition)
        return {"chunk_size": chunk_size, "segment_chunks": segment_chunks} if segment_chunks else {}

    def backward_summary(self, x: Inputs, do: Tensor, dht: Tensor | None) -> Tensor:
        """dR ``[N, HV, K, V]``: the gradient of the state before each sequence's first token."""
        if not self.exact:
            return backward_summary_op(self.text, *x._replace(initial_state=None), do, dht)
        (B, _, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
        any_state = x.q.new_zeros([B, HV, K, V])
        return self.backward(x._replace(initial_state=any_state), do, dht).initial_state


class _Part(NamedTuple):
    """A range of this rank: its tokens, and the states that its runs start from."""

    range: Range
    tokens: slice  # of this rank's tensors
    sequences: slice  # of the caller's states
    x: Inputs  # without boundaries, with the caller's states

    def run(self, i: int) -> tuple[slice, slice]:
        """The first (0) or last (-1) run: its tokens of x, and its rows of the states (of a dense batch all)."""
        bounds = self.range.boundaries
        if bounds is None:
            return slice(0, self.x.q.shape[1]), slice(None)
        n = i % (len(bounds) - 1)
        return slice(bounds[n], bounds[n + 1]), slice(n, n + 1)

    def begins(self, i: int) -> bool:
        """Whether the first (0) or last (-1) run begins with its sequence."""
        return not self.range.enters or (self.range.boundaries is not None and self.run(i)[1].start != 0)

    def run_alone(self, i: int) -> Inputs:
        """Its tensors; from no state where it comes from the range before."""
        tokens, rows = self.run(i)
        given = self.x.initial_state if self.begins(i) else None
        return _rows(self.x, tokens, None if given is None else given[rows])

    def start(self, entering: Tensor | None) -> Inputs:
        """x with the boundaries of the range's runs, the first from the state that enters."""
        one = self.range
        states = self.entered(self.x.initial_state, entering)
        if self.count == 1:  # as its summary is made
            return self.x._replace(initial_state=states)
        return self.x._replace(
            initial_state=states, cu_seqlens=one.cu_seqlens, cu_seqlens_cpu=one.cu_seqlens_cpu
        )

    def entered(self, given: Tensor | None, entering: Tensor | None) -> Tensor | None:
        """What its runs start from: what is given, and of a first run that enters the other."""
        return _with_row(given, 0, entering, self.count) if self.range.enters else given

    @property
    def count(self) -> int:
        """Its runs; of a dense batch 1."""
        return 1 if self.range.boundaries is None else len(self.range.boundaries) - 1


def _rows(x: Inputs, tokens: slice, initial_state: Tensor | None) -> Inputs:
    """These tokens of x, from these states."""
    T = x.q.shape[1]

    def cut(name: str, y: Tensor | None) -> Tensor | None:
        if y is None or name in _PER_CALL:
            return y
        steps = y.shape[1] // T if T and name in _PER_STEP else 1
        return y[:, tokens.start * steps : tokens.stop * steps]

    return Inputs(*(cut(*one) for one in x._asdict().items()))._replace(initial_state=initial_state)


def _with_row(states: Tensor | None, row: int, state: Tensor, count: int) -> Tensor:
    """``count`` states, of a pack's runs, with this in the place of the first (0) or last (-1); of one, or of a
    dense batch, this alone."""
    if count == 1:
        return state
    if states is None:
        others = state.new_zeros([count - 1, *state.shape[1:]])
    else:
        others = states[1:] if row == 0 else states[:-1]
    return torch.cat([state, others] if row == 0 else [others, state])


def _parts(context: CPContext, x: Inputs) -> list[_Part]:
    """This rank's ranges."""
    B, T = x.q.shape[:2]
    parts = []
    first = 0
    for one in context.ranges:
        count = B if one.boundaries is None else len(one.boundaries) - 1
        tokens = slice(one.start, T if one.stop is None else one.stop)
        # Of a dense batch in zigzag the second range has the same sequences; the first has their beginnings.
        sequences = slice(None) if one.boundaries is None else slice(first, first + count)
        states = {name: y[sequences] for name in _STATES if (y := getattr(x, name)) is not None}
        parts.append(_Part(one, tokens, sequences, _rows(x, tokens, None)._replace(**states)))
        first += count
    return parts


def _convolved(
    context: CPContext, problem: _Problem, x: Inputs
) -> tuple[Inputs, list[Inputs], Tensor | None]:
    """x with convolved rows; what they were convolved from (:func:`_pieces`); and the rows behind this rank's
    sequences."""
    if x.conv_weight is None:
        return x, [], None
    parts, width = _parts(context, x), x.conv_weight.shape[1] - 1
    before = rows_before(context, torch.stack([_end(part, problem.steps, width) for part in parts]))
    # The caller's, with those of other ranks in the place of the first where that run comes from one.
    windows = [part.entered(part.x.initial_conv_state, y.mT) for part, y in zip(parts, before, strict=True)]
    if context.is_packed:
        windows = [_of_pack(x, parts, windows)]
    pieces = _pieces(context, x, windows)
    convolved, last = zip(*(convolve(y, problem.layer, problem.steps, problem.exact) for y in pieces), strict=True)
    rows = {name: _joined([getattr(y, name) for y in convolved], 1) for name in "qkv"}
    return x._replace(**rows, conv_weight=None, conv_bias=None, initial_conv_state=None), pieces, last[-1]


def _end(part: _Part, steps: int, width: int) -> Tensor:
    """The last ``width`` rows ``[B, width, C]`` of q, k and v side by side that the range behind goes on from."""
    x, B = part.x, part.x.q.shape[0]
    end = x.q.new_zeros([B, width, x.conv_weight.shape[0]])
    if not part.range.leaves:
        return end
    tokens, rows = part.run(-1)
    if part.begins(-1) and x.initial_conv_state is not None:
        end = x.initial_conv_state[rows].mT
    count = min(width, tokens.stop - tokens.start)
    if count == 0:
        return end
    last = [y[:, (tokens.stop - count) * n : tokens.stop * n].reshape(B, count, -1) for y, n in _by_steps(x, steps)]
    return torch.cat([end[:, count:], torch.cat(last, -1)], 1)


def _of_pack(x: Inputs, parts: list[_Part], windows: list[Tensor | None]) -> Tensor | None:
    """The windows of all ranges' runs; None where all are zeros."""
    if all(y is None for y in windows):
        return None
    C, W = x.conv_weight.shape
    found = zip(parts, windows, strict=True)
    return _joined([x.q.new_zeros([part.count, C, W - 1]) if y is None else y for part, y in found], 0)


def _by_steps(x: Inputs, steps: int) -> tuple[tuple[Tensor, int], ...]:
    """q, k and v, each with its rows of a token."""
    return (x.q, 1), (x.k, steps), (x.v, steps)


def _pieces(context: CPContext, x: Inputs, windows: list[Tensor | None]) -> list[Inputs]:
    """The tensors of each convolution, from these rows: of a pack one, of a dense batch one for every range."""
    pieces = [x._replace(cu_seqlens=context.cu_seqlens)]
    if not context.is_packed:
        pieces = [part.x for part in _parts(context, x)]
    return [piece._replace(initial_conv_state=y) for piece, y in zip(pieces, windows, strict=True)]


def _convolved_gradients(
    context: CPContext,
    problem: _Problem,
    x: Inputs,
    pieces: list[Inputs],
    found: Inputs,
    dlast: Tensor | None,
) -> Inputs:
    """The gradients of x; found and dlast are those of what :func:`_convolved` gave."""
    parts, width = _parts(context, x), x.conv_weight.shape[1] - 1
    made = []
    for i, piece in enumerate(pieces):
        rows = found if len(pieces) == 1 else _rows(found, parts[i].tokens, None)
        seen = dlast if i == len(pieces) - 1 else None
        made.append(convolve_gradients(piece, rows[:3], seen, problem.layer, problem.steps, problem.exact))
    whole = {name: _joined([one[name] for one in made], 1) for name in "qkv"}
    for name in ("conv_weight", "conv_bias"):
        if getattr(x, name) is not None:
            whole[name] = _total([one[name] for one in made])
    windows = [one.get("initial_conv_state") for one in made]
    if context.is_packed:
        windows = [None if windows[0] is None else windows[0][part.sequences] for part in parts]
    nothing = x.q.new_zeros([x.q.shape[0], width, x.conv_weight.shape[0]])
    before = [
        y[part.run(0)[1]].mT if part.range.enters else nothing for part, y in zip(parts, windows, strict=True)
    ]
    ends = gradients_of_ends(context, behind(torch.stack(before), whole["q"]))
    if x.initial_conv_state is not None:
        whole["initial_conv_state"] = _of_states(x.initial_conv_state, parts, tuple(windows))
    for part, end in zip(parts, ends, strict=True):
        if not part.range.leaves:
            continue
        tokens, rows = part.run(-1)
        count = min(width, tokens.stop - tokens.start)
        last, at = part.tokens.start + tokens.stop, 0
        for name, (y, n) in zip("qkv", _by_steps(x, problem.steps), strict=True):
            channels = n * y.shape[2] * y.shape[3]
            to = whole[name][:, (last - count) * n : last * n]
            to += end[:, width - count :, at : at + channels].reshape(to.shape)
            at += channels
        if part.begins(-1) and x.initial_conv_state is not None:
            whole["initial_conv_state"][part.sequences][rows][..., count:] += end[:, : width - count].mT
    return found._replace(**whole)


def _message(x: Inputs, summaries: list[Tensor | None], columns: int) -> Tensor:
    """``[ranges, B, HV, K, columns]``: of each range what it tells, in the first columns; the others are zeros."""
    if len(summaries) == 1 and summaries[0] is not None and summaries[0].shape[-1] == columns:
        return summaries[0].unsqueeze(0)
    (B, _, _, K), HV = x.q.shape, x.v.shape[2]
    message = x.q.new_zeros([len(summaries), B, HV, K, columns], dtype=_state_dtype(x))
    for to, one in zip(message, summaries, strict=True):
        if one is not None:
            to[..., : one.shape[-1]] = one
    return message


def _summaries(
    context: CPContext, problem: _Problem, x: Inputs, parts: list[_Part]
) -> tuple[Tensor, list[_Segments | None]]:
    """R of each range that a sequence leaves, with M where it spans: as :func:`exchange` takes them. And the segments
    of ranges of one run, where the pass is to take them."""
    found, segments = zip(
        *(
            problem.summary(part.run_alone(-1), part.range.spans, part.count == 1)
            if part.range.leaves
            else (None, None)
            for part in parts
        ),
        strict=True,
    )
    K, V = x.q.shape[3], x.v.shape[3]
    return _message(x, list(found), V + K if context.transition else V), list(segments)


def _state_dtype(x: Inputs) -> torch.dtype:
    return torch.float64 if x.q.dtype is torch.float64 else torch.float32


def _joined(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class _ContextParallel(torch.autograd.Function):
    """o, the state behind this rank's tokens of each of its sequences, and the rows that their convolution goes on
    from."""

    @staticmethod
    def forward(
        ctx: Any, context: CPContext, problem: _Problem, with_states: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        given = Inputs(*tensors)
        x, pieces, last = _convolved(context, problem, given)
        parts = _parts(context, x)
        summaries, segments = _summaries(context, problem, x, parts)
        entering, M = exchange(context, summaries, x.v.shape[3])
        outputs, states, raw = zip(
            *(
                problem.forward(part.start(state), with_states, maps)
                for part, state, maps in zip(parts, entering, segments, strict=True)
            ),
            strict=True,
        )
        del segments
        ctx.of = context, problem
        ctx.set_materialize_grads(False)
        o_raw = _joined(list(raw), 1) if given.norm_gate is not None and problem.keeps else None
        windows = [piece.initial_conv_state for piece in pieces]
        ctx.save_for_backward(M, o_raw, *entering, *x[:3], *tensors, *windows)
        return _joined(list(outputs), 1), _by_sequence(parts, list(states)) if with_states else None, last

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dstates: Tensor | None, dlast: Tensor | None
    ) -> tuple[Any, ...]:
        context, problem = ctx.of
        n, count = len(context.ranges), len(Inputs._fields)
        M, o_raw, *saved = ctx.saved_tensors
        entering, rows, tensors, windows = (
            saved[:n], saved[n : n + 3], saved[n + 3 : n + 3 + count], saved[n + 3 + count :],
        )  # fmt: skip
        x = Inputs(*tensors)
        if do is None:
            do = x.q.new_zeros([*x.q.shape[:2], *x.v.shape[2:]])
        gradients = _layer_gradients(context, problem, x, rows, windows, o_raw, entering, M, do, dstates, dlast)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _OnceDifferentiable.apply(
                problem.text, count, *gradients, *tensors, do, dstates, dlast
            )
        return None, None, None, *gradients


@torch.no_grad()
def _layer_gradients(
    context: CPContext,
    problem: _Problem,
    given: Inputs,
    rows: list[Tensor],
    windows: list[Tensor | None],
    o_raw: Tensor | None,
    entering: list[Tensor | None],
    M: Tensor | None,
    do: Tensor,
    dstates: Tensor | None,
    dlast: Tensor | None,
) -> Inputs:
    """The gradients of what is given. rows are the convolved q, k and v, windows the rows before each convolution's
    tokens, o_raw is o before the norm; they, the states that enter this rank's ranges, and M are kept from the forward
    pass."""
    of_norm: dict[str, Tensor] = {}
    if o_raw is not None:
        do, dweight, dgate = normalize_gradients(do, o_raw, given, problem.layer, problem.exact)
        of_norm = {"norm_weight": dweight, "norm_gate": dgate}
    x = bare(given)._replace(q=rows[0], k=rows[1], v=rows[2])
    found = Inputs(*_gradients(context, problem, x, entering, M, do, dstates))._replace(**of_norm)
    if given.conv_weight is None:
        return found
    pieces = _pieces(context, given, windows)
    return _convolved_gradients(context, problem, given, pieces, found, dlast)


def _gradients(
    context: CPContext,
    problem: _Problem,
    x: Inputs,
    entering: list[Tensor | None],
    M: Tensor | None,
    do: Tensor,
    dstates: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of x, whose rows are convolved, from that of o before the norm."""
    parts = _parts(context, x)
    dense = parts[0].range.boundaries is None
    dhts: list[Tensor | None] = []  # of each range the gradients of the states behind its runs
    found_dR: list[Tensor | None] = []
    for i, part in enumerate(parts):
        unseen = dstates is None or (dense and i < len(parts) - 1)
        dhts.append(None if unseen else dstates[part.sequences])
        dR = None
        if part.range.enters:
            tokens, rows = part.run(0)
            dht = None if unseen else dhts[i][rows]
            dR = problem.backward_summary(part.run_alone(0), do[:, part.tokens][:, tokens], dht)
        found_dR.append(dR)
    leaving = exchange_gradients(context, behind(_message(x, found_dR, x.v.shape[3]), do), M)
    found: list[Inputs] = []
    for part, dht, state, gradient in zip(parts, dhts, entering, leaving, strict=True):
        if part.range.leaves:
            last = gradient if dht is None else dht[part.run(-1)[1]] + gradient
            dht = _with_row(dht, -1, last, part.count)
        found.append(problem.backward(part.start(state), do[:, part.tokens], dht))
    gradients: list[Tensor | None] = []
    for name, given, ours in zip(Inputs._fields, x, zip(*found, strict=True), strict=True):
        if given is None:
            gradients.append(None)
        elif name == "initial_state":
            gradients.append(_of_states(given, parts, ours))
        elif name in _PER_CALL:
            gradients.append(_total(list(ours)))
        else:
            gradients.append(_joined(list(ours), 1))
    return gradients


def _of_states(given: Tensor, parts: list[_Part], found: tuple[Tensor, ...]) -> Tensor:
    """The gradient of the caller's states: 0 of those that nobody reads, since their sequence comes from elsewhere."""
    if parts[0].range.boundaries is None:
        return torch.zeros_like(given) if parts[0].range.enters else found[0]
    for part, gradient in zip(parts, found, strict=True):
        if part.range.enters:
            gradient[:1] = 0
    return _joined(list(found), 0)


def _by_sequence(parts: list[_Part], states: list[Tensor]) -> Tensor:
    """The states behind this rank's sequences: of a dense batch those behind its last range."""
    return states[-1] if parts[0].range.boundaries is None else _joined(states, 0)


def _ring(
    context: CPContext, problem: _Problem, x: Inputs
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same from rank to rank: each range waits for the state that the one before it ends with."""
    x, _, last = _convolved(context, problem, x)
    rank, n = dist.get_rank(context.group), len(context.ranges)
    outputs, states = [], []
    parts = _parts(context, x)
    (B, _, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    for i, part in enumerate(parts):
        at = context.order.index(rank * n + i)
        state = None
        if part.range.enters:
            owner = context.order[at - 1] // n
            if owner == rank:
                state = states[-1][parts[i - 1].run(-1)[1]]
            else:
                state = x.q.new_empty([B, HV, K, V], dtype=_state_dtype(x))
                dist.recv(state, group=context.group, group_src=owner)
        o, final_states, _ = problem.forward(part.start(state))
        outputs.append(o)
        states.append(final_states)
        if part.range.leaves and (owner := context.order[at + 1] // n) != rank:
            dist.send(final_states[part.run(-1)[1]].contiguous(), group=context.group, group_dst=owner)
    return _joined(outputs, 1), _by_sequence(parts, states), last


def run(
    cp_context: object, refused: str | None, problem: Problem, x: Inputs
) -> tuple[Any, ...]:
    """o, the states behind this rank's tokens where the problem asks for them, or None, and where it asks for them the
    rows that the convolution goes on from; with their gradients.

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
    fields, layer = apart(fields)
    one, with_states = _Problem(fields, layer, exact, gradients), "output_final_state" in problem
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
        o, state, last = _compute(context, one, with_states, x)
    else:
        with exchanging():
            _agree(context, one, x, _call_of(context, x, fields | layer, gradients), error)
            o, state, last = _compute(context, one, with_states, x)
    if not with_states:
        state = None
    elif v_first:
        state = state.mT.contiguous()
    return (o, state, last) if "output_conv_state" in problem else (o, state)


def _compute(
    context: CPContext, problem: _Problem, with_states: bool, x: Inputs
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if context.exchange == "ring" or problem.exact:
        return _compute_untraced(context, problem, with_states, x)
    return _ContextParallel.apply(context, problem, with_states, *x)


@torch.compiler.disable
def _compute_untraced(
    context: CPContext, problem: _Problem, with_states: bool, x: Inputs
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What torch.compile has no graph of: send and receive, and float64, whose gradient is autograd's."""
    if context.exchange == "ring":
        return _ring(context, problem, x)
    return _ContextParallel.apply(context, problem, with_states, *x)


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
    check_rows(x)
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
    if x.conv_weight is not None and context.is_packed and context.begins is None:
        return ValueError(
            "conv_weight is given; it must be left out with a cp_context that was built before wyvern.fla.enable(), "
            "which does not tell how many tokens other ranks have"
        )
    if x.q.dim() != 4:
        return None  # the operator says so
    B, T = x.q.shape[:2]
    if context.is_packed and B != 1:
        return ValueError(f"B is {B}; it must be 1 with a cp_context of cu_seqlens")
    wanted = context.ranges[-1].stop
    if wanted is not None and T != wanted:
        return ValueError(f"q has {T} tokens; cp_context has {wanted} for this rank")
    if x.conv_weight is not None and wanted is None and T < x.conv_weight.shape[1] - 1:
        return ValueError(
            f"q has {T} tokens; with conv_weight and without tokens= of build_cp_context() it must have "
            f"{x.conv_weight.shape[1] - 1} or more"
        )
    return None


def _first_error(context: CPContext, problem: _Problem, x: Inputs) -> Exception | None:
    """What the ordinary pass and the summaries of this rank's tokens raise, which others are to hear of: a wrong
    shape, a missing compiler."""
    try:
        with torch.no_grad():
            y = x._replace(cu_seqlens=context.cu_seqlens, cu_seqlens_cpu=context.cu_seqlens_cpu)
            if problem.exact:
                _recurrence.run(problem.fields | problem.layer, y)
                return None
            if x.conv_weight is not None:
                check_rows(y)
                y, _ = convolve(y, problem.layer, problem.steps, exact=False)
            problem.forward(y)
            if context.exchange != "ring":
                y = y._replace(cu_seqlens=None, cu_seqlens_cpu=None)
                _summaries(context, problem, y, _parts(context, y))
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
        if y is None or name in _STATES:
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
