"""Four processes over gloo, some with plans of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import wyvern
from conftest import make
from wyvern import ops

RANKS = 4
PRELUDE = """
import json, re, sys
import torch
import torch.distributed as dist
import wyvern
from conftest import make
from wyvern import ops
from wyvern._extension import extension

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=4)
torch.manual_seed(0)
call = make(ops.chunk_delta_rule, T=70, dtype=torch.float32)

def everybodys(x):
    gathered = [None] * 4
    dist.all_gather_object(gathered, x)
    return gathered

def use_another_plan():
    (one,) = wyvern.prepared()
    plan = json.dumps(one["plan"])
    own = re.search(r"BT=\\d+", plan)[0]
    other = plan.replace(own, "BT=64" if own == "BT=32" else "BT=32")
    extension().wyvern_extension_use_plan(one["problem"].encode(), other.encode())
    extension().wyvern_extension_forget()
"""

# Gloo's threads hold tensors: one that lets go of its last while the interpreter ends is terminated.
EPILOGUE = """
dist.barrier()
dist.destroy_process_group()
"""


def run(tmp_path: Path, code: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    program = [sys.executable, "-c", PRELUDE + textwrap.dedent(code) + EPILOGUE]
    place = f"file://{tmp_path}/store"
    processes = [
        subprocess.Popen(
            [*program, str(rank), place], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in processes:
            said = process.communicate(timeout=300)[0]
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


def test_ranks_take_the_plan_of_rank_0(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        with torch.no_grad():
            call()
            if rank in (1, 3):
                use_another_plan()
                call()
            digests = everybodys(wyvern.plan_digest())
            assert digests[0] == digests[2] != digests[1] == digests[3], digests
            outputs = everybodys(call()[0].tolist())
            assert outputs[0] != outputs[1]  # another order of sums

            found = wyvern.distributed.agree()
            (one,) = found
            assert one["ranks"] == [1, 3] and one["plan_of"] == 0, one
            assert "1, 3" in str(found).splitlines()[1]
            assert wyvern.prepared() == []
            with wyvern.policy("off"):  # whatever the policy
                outputs = everybodys(call()[0].tolist())
            assert outputs[1:] == outputs[:-1]
            assert [one["origin"] for one in wyvern.prepared()] == ["given"]
            (plan,) = (one["plan"] for one in wyvern.prepared())
            assert plan == one["plan"]
            assert len(set(everybodys(wyvern.plan_digest()))) == 1
            assert wyvern.distributed.agree() == []
        """,
    )


def test_a_problem_has_the_plan_of_the_first_rank_that_met_it(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        group = dist.new_group([1, 2])
        with torch.no_grad():
            if rank == 2:
                call()
                use_another_plan()
                call()
            if rank in (1, 2):
                assert wyvern.distributed.agree(group) == []  # nobody had another
            call()
            digests = everybodys(wyvern.plan_digest())
            assert digests[0] == digests[3] != digests[1] == digests[2], digests
        """,
    )


def test_a_digest_is_of_problems_and_plans(device: str) -> None:
    from wyvern._extension import extension

    extension().wyvern_extension_forget()
    empty = wyvern.plan_digest()
    with torch.no_grad():
        make(ops.chunk_delta_rule, T=70, device=device)()
        one = wyvern.plan_digest()
        assert one != empty
        make(ops.chunk_delta_rule, T=71, device=device)()  # the same key
        assert wyvern.plan_digest() == one
        make(ops.chunk_kda, T=70, device=device)()
    assert wyvern.plan_digest() != one
    assert len(one) == 64


def test_fixed_plans_ignore_what_was_tuned_here(tmp_path: Path) -> None:
    """A tuned plan that "cached" takes."""
    code = """
        import os
        with torch.no_grad():
            wyvern.tune(call, budget=1)
            call()
            assert [one["origin"] for one in wyvern.prepared()] == ["exact"]
            extension().wyvern_extension_forget()
            with wyvern.policy("fixed"):
                call()
            assert [one["origin"] for one in wyvern.prepared()] == ["default"]
        """
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "WYVERN_CACHE_DIR": str(tmp_path)}
    program = PRELUDE.replace("dist.init_process_group", "# ") + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program, "0"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_agree_wants_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        wyvern.distributed.agree()
