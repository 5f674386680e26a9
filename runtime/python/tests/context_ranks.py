"""Ranks for tests of context parallelism: processes of one group, and calls whose sequences lie on them."""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import make
from reference import error, recurrence

from wyvern import ops
from wyvern.distributed import build_cp_context

# Of runtime/SPECIFICATION.md, section 5: of o and states; gradients of q, k, v and states; other gradients.
BOUNDS = {
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (1e-5, 2e-5, 5e-5),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (5e-3, 8e-3, 2e-2),
}
OPERATORS = ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda", "chunk_gdn2", "chunk_gated_delta_product")
LAYOUTS = {
    "even": {"P": 3, "tokens": [16, 16, 16]},
    "uneven, B = 2": {"P": 3, "tokens": [37, 3, 20], "B": 2},
    "empty ranks": {"P": 4, "tokens": [0, 20, 0, 21]},
    "two ranks": {"P": 2, "tokens": [20, 23], "B": 2},
    "pack across borders": {"P": 3, "tokens": [16, 16, 16], "lengths": [7, 2, 29, 10]},
    "pack, border on a boundary": {"P": 4, "tokens": [10, 10, 10, 13], "lengths": [10, 10, 13, 10]},
    "pack, empty sequences": {"P": 3, "tokens": [20, 7, 16], "lengths": [0, 15, 0, 28, 0]},
    "pack, empty ranks": {"P": 4, "tokens": [12, 0, 0, 23], "lengths": [12, 23]},
    "pack, empty rank inside": {"P": 3, "tokens": [12, 0, 23], "lengths": [5, 30]},
    "pack, short sequences": {"P": 3, "tokens": [16, 16, 16], "lengths": [8, 16, 16, 8]},
    "zigzag": {"P": 2, "tokens": [21, 20], "B": 2, "layout": "zigzag"},
    "zigzag, four ranks": {"P": 4, "tokens": [9, 2, 8, 7], "layout": "zigzag"},
    "zigzag pack": {"P": 3, "tokens": [14, 13, 15], "lengths": [13, 25, 0, 4], "layout": "zigzag"},
    "zigzag pack, short sequences": {"P": 2, "tokens": [20, 20], "lengths": [5, 10, 10, 10, 5], "layout": "zigzag"},
}
_STATES = ("initial_state", "initial_conv_state")
_LIKE_VALUES = ("q", "k", "v", *_STATES)
_OF_ALL_TOKENS = ("A_log", "dt_bias", "conv_weight", "conv_bias", "norm_weight")
_REFERENCE_NAMES = {"b": "erase", "w": "write"}
_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, None: lambda x: x}


# What each process would else import by itself, in seconds.
_SLOW_TO_IMPORT = ["torch._dynamo", "torch.distributed.fsdp", "pytest", "wyvern.fla", "fla.ops.cp"]


@functools.cache
def processes() -> Any:
    """The multiprocessing context of new processes: forks of one that has imported what they need. A fork of one
    that has opened a GPU cannot use it, so where there are any each process imports by itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([] if torch.cuda.is_available() else _SLOW_TO_IMPORT)
    return context


class Ranks:
    """Processes that compute what they are told: ``ranks(P, function, arguments)`` is a list of what
    ``function(group, rank, device, arguments[rank])`` returns in each of the first P."""

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = processes()
        self._ends, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            place = f"file://{self._folder.name}/store"
            process = context.Process(target=_serve, args=(rank, count, backend, place, theirs), daemon=True)
            process.start()
            self._ends.append(ours)
            self._processes.append(process)

    def __call__(self, P: int, function: Callable[..., Any], arguments: list[Any]) -> list[Any]:
        for end, given in zip(self._ends[:P], arguments, strict=True):
            end.send_bytes(pickle.dumps((P, function, given)))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while len(answers) < P:
            waiting = {self._ends[rank]: rank for rank in range(P) if rank not in answers}
            # Ranks that wait for one that failed are not waited for.
            ready = wait(list(waiting), 5 if failures else 120)
            assert ready, "\n".join([*failures, f"no answer of ranks {list(waiting.values())}"])
            for end in ready:
                answer = pickle.loads(end.recv_bytes())
                answers[waiting[end]] = answer
                failures += [answer.traceback] if isinstance(answer, _Failure) else []
        assert not failures, "\n".join(failures)
        return [answers[rank] for rank in range(P)]

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(20)
            process.kill()
        self._folder.cleanup()


@functools.cache
def _shared(count: int) -> Ranks:
    found = Ranks(count)
    atexit.register(found.close)
    return found


@pytest.fixture
def ranks() -> Ranks:
    """Four processes over gloo, the same for all files; a test uses the first P."""
    return _shared(4)


@pytest.fixture
def eight_ranks() -> Ranks:
    """Eight, as a host of GPUs has them."""
    return _shared(8)


@dataclass
class _Failure:
    traceback: str


def _serve(rank: int, count: int, backend: str, place: str, end: Any) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=place, rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    groups = {P: dist.new_group(list(range(P))) for P in range(1, count)} | {count: dist.group.WORLD}
    while True:
        try:
            P, function, given = pickle.loads(end.recv_bytes())
        except EOFError:
            break
        try:
            answer = function(groups[P], rank, device, given)
        except Exception:
            answer = _Failure(f"rank {rank}:\n{traceback.format_exc()}")
        end.send_bytes(pickle.dumps(answer))
    dist.destroy_process_group()


@dataclass
class Case:
    """A call of an operator, and how its tokens lie on P ranks."""

    op: str
    P: int
    dtype: torch.dtype = torch.float32
    B: int = 1
    lengths: list[int] | None = None  # of a pack's sequences; None: dense
    tokens: list[int] = field(default_factory=list)  # of each rank
    layout: str = "contiguous"
    exchange: str = "auto"
    group_alone: bool = False  # cp_context is the group
    H: int = 1
    HV: int = 2
    K: int = 32  # as make() has them: with the kernels that other tests compile
    V: int = 16
    steps: int = 1
    states: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    gate: tuple[str, ...] = ()  # which of A_log and dt_bias there are
    taps: int = 0  # of a convolution
    norm: str | None = None  # what the gate of o's norm goes through
    seed: int = 0


@dataclass
class Run:
    """What a range has of a sequence (of a dense batch: of all rows)."""

    sequence: int
    start: int
    stop: int
    begins: bool
    ends: bool


@dataclass
class Stretch:
    """A range: consecutive tokens of one rank."""

    rank: int
    start: int
    stop: int
    runs: list[Run]
    returned: bool  # whether the states behind its runs are: of a dense batch those of a rank's last range


def stretches(case: Case) -> list[Stretch]:
    """All ranges in the order of tokens: written without the code that is tested."""
    P, tokens = case.P, case.tokens
    shares, owners = tokens, list(range(P))
    if case.layout == "zigzag":
        shares = [(one + 1) // 2 for one in tokens] + [one // 2 for one in reversed(tokens)]
        owners = [*range(P), *reversed(range(P))]
    ends = [0]
    for length in case.lengths or []:
        ends.append(ends[-1] + length)
    found: list[Stretch] = []
    for i, (share, owner) in enumerate(zip(shares, owners, strict=True)):
        start = found[-1].stop if found else 0
        stop = start + share
        if case.lengths is None:
            runs = [Run(0, start, stop, i == 0, i == len(shares) - 1)]
            returned = owner not in owners[i + 1 :]
        else:
            runs = []
            for n, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
                low, high = max(begin, start), min(end, stop)
                if low < high or begin < start == stop < end:
                    runs.append(Run(n, low, high, low == begin, high == end))
            returned = True
        found.append(Stretch(owner, start, stop, runs, returned))
    return found


def inputs_of(case: Case) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[torch.Tensor]]:
    """The tensors of the whole call, its options, and seeds of gradients: of o, and of all runs' states."""
    T = sum(case.tokens)
    N = case.B if case.lengths is None else len(case.lengths)
    call = make(
        getattr(ops, case.op), case.dtype, B=case.B, T=T, H=case.H, HV=case.HV, K=case.K, V=case.V, N=N,
        steps=case.steps, states=case.states, seed=case.seed,
    )  # fmt: skip
    exact = case.dtype is torch.float64
    tensors = {name: x.detach().double() if exact else x.detach() for name, x in call.tensors.items()}
    random = torch.Generator().manual_seed(case.seed + 1)
    vector = "kda" in case.op or "gdn2" in case.op
    if case.gate:
        tensors["g"] = torch.randn(tensors["g"].shape, generator=random)
    for name in case.gate:
        shape = (case.HV, case.K) if name == "dt_bias" and vector else (case.HV,)
        tensors[name] = 0.5 * torch.randn(shape, generator=random)
    options = {**call.options, **case.options}
    C = case.H * case.K + case.steps * (case.H * case.K + case.HV * case.V)
    wide = torch.float64 if exact else torch.float32
    if case.taps:
        tensors["conv_weight"] = (0.5 * torch.randn(C, case.taps, generator=random)).to(wide)
        tensors["conv_bias"] = (0.5 * torch.randn(C, generator=random)).to(wide)
        options |= {"output_conv_state": True, "use_qk_l2norm_in_kernel": True}
        if case.states:
            tensors["initial_conv_state"] = torch.randn(N, C, case.taps - 1, generator=random).to(case.dtype)
    if case.norm:
        tensors["norm_weight"] = (1 + 0.5 * torch.randn(case.V, generator=random)).to(wide)
        tensors["norm_gate"] = torch.randn(case.B, T, case.HV, case.V, generator=random).to(case.dtype)
        options["norm_activation"] = case.norm
    seeds = [torch.randn(case.B, T, case.HV, case.V, generator=random)]
    for shape in ([case.HV, case.K, case.V], [C, case.taps - 1])[: 2 if case.taps else 1]:
        for one in stretches(case):
            rows = case.B if case.lengths is None else len(one.runs)
            seeds.append(torch.randn(rows, *shape, generator=random))
    return tensors, options, seeds


def _convolve(case: Case, exact: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """q, k and v of the whole call convolved, rounded to its dtype; and the rows behind the runs of each range."""
    T, W, ends = sum(case.tokens), case.taps, []
    steps = {"q": 1, "k": case.steps, "v": case.steps}
    x = torch.cat([exact[name].reshape(case.B, T, -1) for name in steps], 2).mT
    N = case.B if case.lengths is None else len(case.lengths)
    windows = exact.get("initial_conv_state", x.new_zeros(N, x.shape[1], W - 1))
    bounds = [0, T] if case.lengths is None else [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
    lines, pieces = [], []
    for n, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        window = windows if case.lengths is None else windows[n : n + 1]
        lines.append(torch.cat([window, x[:, :, begin:end]], 2))
        if end > begin:
            weight = exact["conv_weight"].unsqueeze(1)
            pieces.append(F.conv1d(lines[-1], weight, exact["conv_bias"], groups=x.shape[1]))
    y = _ACTIVATIONS[case.options.get("conv_activation", "silu")](torch.cat(pieces, 2))
    y = (y + (y.to(case.dtype).double() - y).detach()).mT
    for one in stretches(case):
        behind = []
        for run in one.runs:
            at = run.stop - bounds[run.sequence]
            behind.append(lines[run.sequence][:, :, at : at + W - 1])
        ends.append(torch.cat(behind) if behind else windows[:0])
    widths = [exact[name][0, 0].numel() * n for name, n in steps.items()]
    rows = zip(steps, y.split(widths, 2), strict=True)
    return {name: part.reshape(exact[name].shape) for name, part in rows}, ends


def oracle(case: Case) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """In float64 o, the states behind all ranges' runs, with a convolution the rows there too, and the gradients of
    the whole call's tensors."""
    tensors, options, seeds = inputs_of(case)
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    rows, ends = _convolve(case, exact) if case.taps else ({}, [])
    reference = {
        "scale": options.get("scale"),
        "steps": case.steps,
        "l2norm": options.get("use_qk_l2norm_in_kernel", False),
        "beta_sigmoid": options.get("use_beta_sigmoid_in_kernel", False),
        "neg_eigval": options.get("allow_neg_eigval", False),
        "gate": options.get("use_gate_in_kernel", False),
        "lower_bound": options.get("lower_bound"),
        **{name: exact[name] for name in case.gate},
    }
    dense = case.lengths is None
    starts = exact.get("initial_state")
    if starts is None:
        N = case.B if dense else len(case.lengths)
        starts = torch.zeros(N, case.HV, case.K, case.V, dtype=torch.float64)
    current = [starts] if dense else list(starts.split(1))
    outputs, states = [], []
    for stretch in stretches(case):
        behind = []
        for one in stretch.runs:
            given = {}
            for name, x in (exact | rows).items():
                if name not in (*_OF_ALL_TOKENS, *_STATES, "norm_gate"):
                    steps = case.steps if name in ("k", "v", "beta") else 1
                    given[_REFERENCE_NAMES.get(name, name)] = x[:, one.start * steps : one.stop * steps]
            o, current[one.sequence] = recurrence(**given, **reference, initial_state=current[one.sequence])
            outputs.append(o)
            behind.append(current[one.sequence])
        states.append(torch.cat(behind) if behind else starts[:0])
    o = torch.cat(outputs, 1)
    if case.norm:
        gate = _ACTIVATIONS[case.norm](exact["norm_gate"])
        o = F.rms_norm(o, (case.V,), exact["norm_weight"], 1e-6) * gate
    states += ends
    loss = (o * seeds[0]).sum()
    for stretch, state, seed in zip(stretches(case) * 2, states, seeds[1:], strict=False):
        loss = loss + (state * seed).sum() * stretch.returned
    gradients = torch.autograd.grad(loss, list(exact.values()))
    return o, states, dict(zip(exact, gradients, strict=True))


def shard(case: Case, rank: int) -> dict[str, Any]:
    """What one rank gets of the call. States that come from elsewhere are NaN: nobody is to read them."""
    tensors, options, seeds = inputs_of(case)
    mine = [one for one in stretches(case) if one.rank == rank]
    index = [token for one in mine for token in range(one.start, one.stop)]
    local = {}
    for name, x in tensors.items():
        if name in _STATES:
            nowhere = torch.full_like(x, float("nan"))
            if case.lengths is None:
                local[name] = x if any(run.begins for one in mine for run in one.runs) else nowhere
            else:
                rows = [(x if run.begins else nowhere)[run.sequence] for one in mine for run in one.runs]
                local[name] = torch.stack(rows) if rows else x[:0]
        else:
            local[name] = x if name in _OF_ALL_TOKENS else x[:, _rows(case, name, index)]
    ranges = stretches(case)
    behind = [seeds[1 : 1 + len(ranges)], seeds[1 + len(ranges) :]]
    returned = [
        torch.cat([seed for one, seed in zip(ranges, given, strict=True) if one.rank == rank and one.returned])
        for given in behind
        if given
    ]
    return {"case": case, "tensors": local, "options": options, "seeds": [seeds[0][:, index], *returned]}


def _rows(case: Case, name: str, tokens: list[int]) -> list[int]:
    steps = case.steps if name in ("k", "v", "beta") else 1
    return [token * steps + step for token in tokens for step in range(steps)]


def check(case: Case, answers: list[dict[str, Any]]) -> None:
    """That what the ranks computed is what the float64 recurrence makes of the whole."""
    o, states, gradients = oracle(case)
    tensors, _, _ = inputs_of(case)
    of_o, of_values, of_gates = BOUNDS[case.dtype]
    index: list[list[int]] = []
    ranges = stretches(case)
    for rank in range(case.P):
        mine = [one for one in ranges if one.rank == rank]
        index.append([token for one in mine for token in range(one.start, one.stop)])
        returned = [one.rank == rank and one.returned for one in ranges]
        wanted = torch.cat(list(itertools.compress(states, returned)))
        got = answers[rank]["state"]
        assert got.shape == wanted.shape
        if wanted.numel():
            assert error(got, wanted) < of_o, f"states of rank {rank}"
        if case.taps:
            rows = torch.cat(list(itertools.compress(states[len(ranges) :], returned)))
            assert torch.equal(answers[rank]["rows"].double(), rows), f"rows of rank {rank}"
        for name in (name for name in _STATES if name in tensors):
            got, wanted = answers[rank]["gradients"][name], gradients[name]
            if case.lengths is None:
                wanted = wanted if any(run.begins for one in mine for run in one.runs) else torch.zeros_like(wanted)
            else:
                rows = [wanted[run.sequence] * run.begins for one in mine for run in one.runs]
                wanted = torch.stack(rows) if rows else wanted[:0]
            assert got.shape == wanted.shape
            if wanted.any():
                assert error(got, wanted) < of_values, f"{name}'s gradient of rank {rank}"
            else:
                assert not got.any()
    whole = torch.full(o.shape, float("nan"), dtype=torch.float64)
    for rank, answer in enumerate(answers):
        whole[:, index[rank]] = answer["o"].double()
    assert error(whole, o) < of_o
    for name in tensors:
        if name in _STATES:
            continue
        bound = of_values if name in _LIKE_VALUES else of_gates
        if name in _OF_ALL_TOKENS:
            whole = sum(answer["gradients"][name].double() for answer in answers)
        else:
            whole = torch.full(gradients[name].shape, float("nan"), dtype=torch.float64)
            for rank, answer in enumerate(answers):
                whole[:, _rows(case, name, index[rank])] = answer["gradients"][name].double()
        assert error(whole, gradients[name]) < bound, f"{name}'s gradient"


def context_of(case: Case, group: Any, device: torch.device) -> Any:
    """The cp_context of a case's calls."""
    if case.group_alone:
        return group
    cu_seqlens = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0).to(device)
    return build_cp_context(cu_seqlens, group, tokens=case.tokens, layout=case.layout, exchange=case.exchange)


def compute(group: Any, rank: int, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """One rank's call and its gradients."""
    case: Case = given["case"]
    leaves = {name: x.to(device).requires_grad_() for name, x in given["tensors"].items()}
    context = context_of(case, group, device)
    o, state, *rows = getattr(ops, case.op)(**leaves, **given["options"], cp_context=context)
    outputs = [o, state.mT if given["options"].get("state_v_first", False) else state, *rows]
    seeds = [x.to(device, y.dtype) for x, y in zip(given["seeds"], outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    return answer(outputs, dict(zip(leaves, gradients, strict=True)))


def answer(outputs: Sequence[torch.Tensor], gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What :func:`check` takes of a rank."""
    named = dict(zip(("o", "state", "rows"), outputs, strict=False))
    return {name: x.detach().cpu() for name, x in named.items()} | {
        "gradients": {name: x.cpu() for name, x in gradients.items()}
    }


def run(ranks: Ranks, case: Case, function: Callable[..., Any] = compute) -> list[Any]:
    """What a function of shards (``compute``) makes of the case in its ranks."""
    return ranks(case.P, function, [shard(case, rank) for rank in range(case.P)])


def same(one: Any, other: Any) -> bool:
    """Whether two answers have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other)
