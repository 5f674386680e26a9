"""Ranks for tests of context parallelism: processes of one group, and calls whose sequences lie on them."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
_LIKE_VALUES = ("q", "k", "v", "initial_state")
_OF_ALL_TOKENS = ("A_log", "dt_bias")
_REFERENCE_NAMES = {"b": "erase", "w": "write"}


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
def _shared() -> Ranks:
    found = Ranks(4)
    atexit.register(found.close)
    return found


@pytest.fixture
def ranks() -> Ranks:
    """Four processes over gloo, the same for all files; a test uses the first P."""
    return _shared()


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
    seeds = [torch.randn(case.B, T, case.HV, case.V, generator=random)]
    for one in stretches(case):
        rows = case.B if case.lengths is None else len(one.runs)
        seeds.append(torch.randn(rows, case.HV, case.K, case.V, generator=random))
    return tensors, {**call.options, **case.options}, seeds


def oracle(case: Case) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """In float64 o, the states behind all ranges' runs, and the gradients of the whole call's tensors."""
    tensors, options, seeds = inputs_of(case)
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
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
            for name, x in exact.items():
                if name not in (*_OF_ALL_TOKENS, "initial_state"):
                    steps = case.steps if name in ("k", "v", "beta") else 1
                    given[_REFERENCE_NAMES.get(name, name)] = x[:, one.start * steps : one.stop * steps]
            o, current[one.sequence] = recurrence(**given, **reference, initial_state=current[one.sequence])
            outputs.append(o)
            behind.append(current[one.sequence])
        states.append(torch.cat(behind) if behind else starts[:0])
    o = torch.cat(outputs, 1)
    loss = (o * seeds[0]).sum()
    for stretch, state, seed in zip(stretches(case), states, seeds[1:], strict=True):
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
        if name == "initial_state":
            nowhere = torch.full_like(x, float("nan"))
            if case.lengths is None:
                local[name] = x if any(run.begins for one in mine for run in one.runs) else nowhere
            else:
                rows = [(x if run.begins else nowhere)[run.sequence] for one in mine for run in one.runs]
                local[name] = torch.stack(rows) if rows else x[:0]
        else:
            local[name] = x if name in _OF_ALL_TOKENS else x[:, _rows(case, name, index)]
    returned = [seed for one, seed in zip(stretches(case), seeds[1:], strict=True) if one.rank == rank and one.returned]
    return {
        "case": case,
        "tensors": local,
        "options": options,
        "seeds": [seeds[0][:, index], torch.cat(returned)],
    }


def _rows(case: Case, name: str, tokens: list[int]) -> list[int]:
    steps = case.steps if name in ("k", "v", "beta") else 1
    return [token * steps + step for token in tokens for step in range(steps)]


def check(case: Case, answers: list[dict[str, Any]]) -> None:
    """That what the ranks computed is what the float64 recurrence makes of the whole."""
    o, states, gradients = oracle(case)
    tensors, _, _ = inputs_of(case)
    of_o, of_values, of_gates = BOUNDS[case.dtype]
    index: list[list[int]] = []
    for rank in range(case.P):
        mine = [one for one in stretches(case) if one.rank == rank]
        index.append([token for one in mine for token in range(one.start, one.stop)])
        wanted = torch.cat([state for one, state in zip(stretches(case), states, strict=True)
                            if one.rank == rank and one.returned])
        got = answers[rank]["state"]
        assert got.shape == wanted.shape
        if wanted.numel():
            assert error(got, wanted) < of_o, f"states of rank {rank}"
        if case.states:
            got, wanted = answers[rank]["gradients"]["initial_state"], gradients["initial_state"]
            if case.lengths is None:
                wanted = wanted if any(run.begins for one in mine for run in one.runs) else torch.zeros_like(wanted)
            else:
                rows = [wanted[run.sequence] * run.begins for one in mine for run in one.runs]
                wanted = torch.stack(rows) if rows else wanted[:0]
            assert got.shape == wanted.shape
            if wanted.any():
                assert error(got, wanted) < of_values, f"initial_state's gradient of rank {rank}"
            else:
                assert not got.any()
    whole = torch.full(o.shape, float("nan"), dtype=torch.float64)
    for rank, answer in enumerate(answers):
        whole[:, index[rank]] = answer["o"].double()
    assert error(whole, o) < of_o
    for name in tensors:
        if name == "initial_state":
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
    o, state = getattr(ops, case.op)(**leaves, **given["options"], cp_context=context)
    v_first = given["options"].get("state_v_first", False)
    k_first = state.mT if v_first else state
    seeds = [x.to(device, y.dtype) for x, y in zip(given["seeds"], (o, state), strict=True)]
    gradients = torch.autograd.grad((o, k_first), list(leaves.values()), seeds)
    return {
        "o": o.detach().cpu(),
        "state": k_first.detach().cpu(),
        "gradients": {name: x.cpu() for name, x in zip(leaves, gradients, strict=True)},
    }


def run(ranks: Ranks, case: Case, function: Callable[..., Any] = compute) -> list[Any]:
    """What a function of shards (``compute``) makes of the case in its ranks."""
    return ranks(case.P, function, [shard(case, rank) for rank in range(case.P)])


def same(one: Any, other: Any) -> bool:
    """Whether two answers have the same bits."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other)
