"""Ranks that differ, arguments that are wrong, and a rank that dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import make
from context_ranks import Case, Ranks, check, processes, ranks, run, shard  # noqa: F401 (ranks is a fixture)

from wyvern import ops
from wyvern.distributed import _parallel, agree, build_cp_context

CASE = Case("chunk_kda", 3, tokens=[16, 9, 20], lengths=[30, 15])
CHANNELS = 2 * CASE.H * CASE.K + CASE.HV * CASE.V


def message_of(group: Any, rank: int, device: torch.device, given: Any) -> str:
    """What a call raises whose arguments are those of a shard, changed in the ranks that ``where`` names."""
    part, what, where = given
    tensors, options = dict(part["tensors"]), dict(part["options"])
    case: Case = part["case"]
    layout: dict[str, Any] = {"tokens": case.tokens}
    cu_seqlens: torch.Tensor | None = torch.tensor([0, *case.lengths]).cumsum(0)
    version, gradients = _parallel.version, True
    if rank in where:
        if what == "dtype":
            tensors = {name: x.bfloat16() for name, x in tensors.items() if name != "initial_state"}
        elif what == "heads":
            tensors = {name: torch.cat([x, x], 2) for name, x in tensors.items() if name != "initial_state"}
        elif what == "K":
            tensors = {name: x[..., :8] if name in ("q", "k", "g") else x for name, x in tensors.items()}
            del tensors["initial_state"]
        elif what == "K too large":
            for name in ("q", "k", "g"):
                tensors[name] = tensors[name].repeat_interleave(10, 3)
            del tensors["initial_state"]
        elif what == "rank of q":
            tensors["q"] = tensors["q"][0]
        elif what == "shape of g":
            tensors["g"] = tensors["g"][:, :, :1]
        elif what == "shape of states":
            tensors["initial_state"] = tensors["initial_state"][:0]
        elif what == "option":
            options["use_qk_l2norm_in_kernel"] = True
        elif what == "scale":
            options["scale"] = 0.25
        elif what == "gradients":
            gradients = False
        elif what == "version":
            _parallel.version = lambda: "0.0.1"
        elif what == "tokens of q":
            tensors["q"] = tensors["q"][:, 1:]
        elif what == "tokens":
            tensors = {name: x if name == "initial_state" else x[:, 1:] for name, x in tensors.items()}
        elif what == "layout":
            layout = {"tokens": [16, 10, 19]}
        elif what == "boundaries":
            cu_seqlens = torch.tensor([0, 31, 45])
        elif what == "exchange":
            layout["exchange"] = "gather"
        elif what == "heads that do not divide":
            layout["exchange"] = "heads"
        elif what == "dense":
            cu_seqlens = None
            del tensors["initial_state"]
        elif what == "ring":
            layout["exchange"] = "ring"
        elif what == "ring's gradient":
            layout["exchange"], options["batch_invariant"] = "ring", True
        elif what == "batch_invariant":
            options["batch_invariant"] = True
        elif what == "cu_seqlens":
            options["cu_seqlens"] = torch.tensor([0, tensors["q"].shape[1]])
        elif what == "return_intermediate_states":
            options["return_intermediate_states"] = True
        elif what == "output_dtype":
            options |= {"output_dtype": torch.float8_e4m3fn, "norm_gate": tensors["v"]}
            options["norm_weight"] = torch.ones(tensors["v"].shape[-1])
        elif what == "out":
            options["out"] = torch.empty_like(tensors["v"])
        elif what == "norm":
            options |= {"norm_weight": torch.ones(tensors["v"].shape[3]), "norm_gate": tensors["v"]}
        elif what == "convolution":
            options["conv_weight"] = torch.ones(CHANNELS, 4)
        elif what == "shape of conv_weight":
            options["conv_weight"] = torch.ones(3, 4)
        elif what == "shape of rows":
            rows = torch.ones(len(tensors["initial_state"]), CHANNELS, 2)
            options |= {"conv_weight": torch.ones(CHANNELS, 4), "initial_conv_state": rows}
        elif what == "dtype of rows":
            rows = torch.ones(len(tensors["initial_state"]), CHANNELS, 3)
            options |= {"conv_weight": torch.ones(CHANNELS, 4), "initial_conv_state": rows.half()}
        elif what == "batch":
            tensors = {name: torch.cat([x, x]) for name, x in tensors.items() if name != "initial_state"}
    tensors = {name: x.clone().requires_grad_(gradients) for name, x in tensors.items()}
    try:
        context = build_cp_context(cu_seqlens, group, **layout)
        getattr(ops, case.op)(**tensors, **options, cp_context=context)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _parallel.version = version
    return ""


def messages(ranks: Ranks, what: str, where: tuple[int, ...]) -> list[str]:
    return ranks(3, message_of, [(shard(CASE, rank), what, where) for rank in range(3)])


DIFFERENT = {
    "dtype": r"q differs .*: torch.float32 \[1, T, 1, 32\] in ranks 0, 2; torch.bfloat16 .* in rank 1; it must be",
    "heads": r"q differs .* \[1, T, 1, 32\] in ranks 0, 2; .* \[1, T, 2, 32\] in rank 1",
    "K": r"q differs .* \[1, T, 1, 8\] in rank 1",
    "rank of q": r"q differs .* \[9, 1, 32\] in rank 1",
    "shape of g": r"g differs .* \[1, T, 1, 32\] in rank 1",
    "option": "use_qk_l2norm differs .*: not given in ranks 0, 2; 1 in rank 1",
    "scale": "scale differs .*: not given in ranks 0, 2; 0.25 in rank 1",
    "gradients": "whether a gradient is wanted differs .*: True in ranks 0, 2; False in rank 1",
    "version": "the version of wyvern differs .*; 0.0.1 in rank 1",
    "layout": r"tokens differs .*: \(16, 9, 20\) in ranks 0, 2; \(16, 10, 19\) in rank 1",
    "boundaries": r"cu_seqlens differs .*: \(0, 30, 45\) in ranks 0, 2; \(0, 31, 45\) in rank 1",
    "dense": r"cu_seqlens differs .*: \(0, 30, 45\) in ranks 0, 2; None in rank 1",
    "exchange": "exchange differs .*: 'auto' in ranks 0, 2; 'gather' in rank 1",
    "shape of states": r"initial_state has shape \[0, 2, 32, 16\].* \(in rank 1 of cp_context\)",
    "tokens": r"q has 8 tokens; cp_context has 9 for this rank \(in rank 1 of cp_context\)",
    "tokens of q": r"k differs .* \[1, T, 1, 32\] in ranks 0, 2; .* \[1, 9, 1, 32\] in rank 1",
    "cu_seqlens": r"cu_seqlens is given; it must be left out with cp_context \(in rank 1 of",
    "norm": "output_norm differs .*: not given in ranks 0, 2; silu in rank 1",
    "convolution": "conv_activation differs .*: not given in ranks 0, 2; silu in rank 1",
}
REFUSED = {
    "K too large": r"K is 320; .*\(in ranks 0, 1, 2 of",
    "cu_seqlens": "cu_seqlens is given; it must be left out with cp_context",
    "return_intermediate_states": "return_intermediate_states is given; it must be left out",
    "out": "out is given; it must be left out with cp_context",
    "output_dtype": "output_dtype is given; it must be left out with cp_context",
    "shape of conv_weight": r"conv_weight has shape \[3, 4\]; it must be \[96, 4\] \(in ranks 0, 1, 2 of",
    "shape of rows": r"initial_conv_state has shape \[1, 96, 2\]; it must be \[1, 96, 3\]",
    "batch": "B is 2; it must be 1 with a cp_context of cu_seqlens",
    "batch_invariant": "batch_invariant is true; with cp_context it needs exchange='ring'",
    "ring": "exchange is 'ring', which is for batch_invariant=True; use 'auto'",
    "ring's gradient": "batch_invariant is true; it has no gradient",
    "heads that do not divide": "exchange is 'heads' and v has 2 heads, which 3 ranks do not divide; use 'gather'",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_one_rank_differs(ranks: Ranks, what: str) -> None:
    """Every rank raises the same sentence, and the next call is right."""
    one, *others = messages(ranks, what, (1,))
    assert others == [one, one]
    assert re.search(DIFFERENT[what], one), one
    assert one.startswith("ValueError: ")


def test_rows_of_another_dtype(ranks: Ranks) -> None:
    for one in messages(ranks, "dtype of rows", (0, 1, 2)):
        assert one.startswith("TypeError: initial_conv_state is torch.float16; it must be torch.float32, as q is")


def few_tokens(group: Any, rank: int, device: torch.device, given: Any) -> str:
    tensors = {name: x[:, :2] for name, x in given["tensors"].items()}
    with pytest.raises(ValueError) as raised:
        ops.chunk_kda(**tensors, conv_weight=torch.ones(CHANNELS, 4), cp_context=group)
    return str(raised.value)


def test_a_convolution_of_few_tokens_in_a_group(ranks: Ranks) -> None:
    """Which does not tell how many tokens other ranks have."""
    for one in run(ranks, Case("chunk_kda", 2, tokens=[5, 5], states=False, group_alone=True), few_tokens):
        assert one.startswith("q has 2 tokens; with conv_weight and without tokens= of build_cp_context() it must")


@pytest.mark.parametrize("what", REFUSED)
def test_what_all_ranks_refuse(ranks: Ranks, what: str) -> None:
    for one in messages(ranks, what, (0, 1, 2)):
        assert one.startswith("ValueError: ")
        assert re.search(REFUSED[what], one), one


def test_calls_are_right_behind_errors(ranks: Ranks) -> None:
    check(CASE, run(ranks, CASE))


def out_of_order(group: Any, rank: int, device: torch.device, given: Any) -> list[str]:
    """Two kinds of calls that the ranks have compared, which one rank then makes in the other order; then new ones."""
    tensors, found = given["tensors"], []

    def call(scale: float) -> None:
        try:
            ops.chunk_kda(**tensors, scale=scale, cp_context=group)
        except ValueError as error:
            found.append(str(error))

    for scale in (0.5, 0.25):
        call(scale)
    agree(group)
    for scale in (0.25, 0.5) if rank == 1 else (0.5, 0.25):
        call(scale)
    try:
        agree(group)
    except ValueError as error:
        found.append(str(error))
    for scale in (0.75, 0.75, 0.125):
        call(scale)
    agree(group)
    return found


def test_a_rank_whose_order_differs_is_found_at_the_next_new_call(ranks: Ranks) -> None:
    """Or by wyvern.distributed.agree(). Calls of one size would else give wrong numbers and no error."""
    case = Case("chunk_kda", 3, tokens=[5, 6, 7], states=False, group_alone=True)
    one, *others = run(ranks, case, out_of_order)
    assert others == [one, one] and len(one) == 2
    assert re.search("^the ranks' calls with a cp_context of group differ .rank 0: .*; rank 1: .*; all must", one[0])
    assert re.search("^the sequence of earlier calls differs .* in ranks 0, 2; .* in rank 1; it must", one[1])


def one_of_whom_is_killed(rank: int, place: str, end: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=3, timeout=timedelta(seconds=20))
    call = make(ops.chunk_kda, T=9 + rank, states=False)
    call.options["cp_context"] = dist.group.WORLD
    call()
    end.send("first")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        call()
    except RuntimeError as error:
        end.send(f"RuntimeError: {error}")
        os._exit(3)  # what is left of the group would wait for the dead


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    context = processes()
    pipes = [context.Pipe(duplex=False) for _ in range(3)]
    started = [
        context.Process(target=one_of_whom_is_killed, args=(rank, f"file://{tmp_path}/store", end))
        for rank, (_, end) in enumerate(pipes)
    ]
    for process, (_, end) in zip(started, pipes, strict=True):
        process.start()
        end.close()
    said: list[list[str]] = [[], [], []]
    try:
        for process in started:
            process.join(90)
        for one, (end, _) in zip(said, pipes, strict=True):
            with contextlib.suppress(EOFError):
                while end.poll():
                    one.append(end.recv())
    finally:
        for process in started:
            process.kill()
    assert [process.exitcode for process in started] == [3, -signal.SIGKILL, 3], said
    assert [one[:1] for one in said] == [["first"]] * 3
    assert all(len(said[rank]) == 2 and said[rank][1].startswith("RuntimeError:") for rank in (0, 2)), said
