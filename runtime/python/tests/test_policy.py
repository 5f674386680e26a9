"""The policies that tune, each in a process with a cache of its own, by the real command."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import DEVICES

PRELUDE = """
import contextlib, os, signal, sqlite3, sys, threading, time
from pathlib import Path
import torch
from conftest import make
import wyvern
from wyvern import ops

device = sys.argv[1]
call = make(ops.fused_recurrent_delta_rule, T=3, device=device)
no_grad = torch.no_grad()

def origins():
    return sorted(one["origin"] for one in wyvern.prepared())

def tuners():
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"--parent\\0{os.getpid()}\\0".encode() in read(path)]

def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""

def wait_for_a_tuner():
    while not (found := tuners()):
        time.sleep(0.01)
    return found[0]

def stop(process):
    # Not while it reads or writes the cache: others would wait for what it holds then.
    cache = Path(os.environ["WYVERN_CACHE_DIR"]) / "wyvern.db"
    while True:
        os.kill(process, signal.SIGSTOP)
        while read(Path(f"/proc/{process}/stat")).split()[2] != b"T":
            time.sleep(0.001)
        try:
            with contextlib.closing(sqlite3.connect(f"file:{cache}?mode=rw", uri=True, timeout=0,
                                                    isolation_level=None)) as database:
                database.execute("begin exclusive")
                database.execute("rollback")
            return
        except sqlite3.OperationalError:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.02)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts a program after PRELUDE."""
    started = []

    def run(code: str, device: str = "cpu", **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"WYVERN_CACHE_DIR": str(tmp_path), "PYTHONPATH": path} | variables
        program = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), device]
        started.append(
            subprocess.Popen(
                program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.communicate()


def end(process: subprocess.Popen[str]) -> str:
    """What it said on stderr; it must have ended well."""
    said = process.communicate(timeout=600)[1]
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("device", DEVICES)
def test_background_takes_the_tuned_plan_when_it_is_ready(start, device: str) -> None:
    said = end(start(
        """
        turn, results = threading.Barrier(2), []
        def other():
            with no_grad:
                turn.wait()
                results.append(call()[0])
                turn.wait()
                turn.wait()  # tuned by now
                results.append(call()[0])

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        wyvern.policy("background", budget=1)
        o, state = call()
        tuner = wait_for_a_tuner()
        stop(tuner)
        (o.sum() + state.sum()).backward()
        turn.wait()
        turn.wait()
        assert origins() == ["default", "default"], origins()
        assert not wyvern.wait_for_tuning(0)
        os.kill(tuner, signal.SIGCONT)
        assert wyvern.wait_for_tuning()
        assert wyvern.wait_for_tuning(0)
        # A thread that has the old one finds the new one, and so do the others.
        turn.wait()
        thread.join()
        assert origins() == ["default", "exact"], origins()
        gradients = [x.grad for x in call.leaves()]
        o, state = call()
        results.append(o)
        wanted = torch.autograd.grad(o.sum() + state.sum(), call.leaves())
        assert origins() == ["exact", "exact"], origins()
        for got in results:
            torch.testing.assert_close(got, results[0])
        for got, one in zip(gradients, wanted):
            torch.testing.assert_close(got, one)
        assert not tuners()
        """,
        device,
    ))
    assert said == ""


@pytest.mark.parametrize("device", DEVICES)
def test_on_a_miss_the_first_call_is_by_the_tuned_plan(start, device: str) -> None:
    end(start(
        """
        with no_grad:
            wanted = call()[0]
            assert origins() == ["default"], origins()
            with wyvern.policy("on-miss", budget=1):
                torch.testing.assert_close(call()[0], wanted)
            assert origins() == ["default", "exact"], origins()
            assert wyvern.wait_for_tuning(0)
        assert wyvern.cache.stats()["winners"] == 1
        """,
        device,
    ))


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_tuner_ends_with_its_process(start, how: str) -> None:
    """Whether that ends by itself, which takes no budget, or is killed."""
    process = start(
        """
        with no_grad:
            call()
        wait_for_a_tuner()
        print(os.getpid(), flush=True)
        time.sleep(float(os.environ["LINGER"]))
        """,
        WYVERN_POLICY="background",
        LINGER="300" if how == "kill" else "0",
    )
    number = process.stdout.readline().strip()
    assert number, process.communicate()[1]
    mark = f"--parent\0{number}\0"
    if how == "kill":
        process.kill()
    else:
        assert end(process) == ""
    deadline = time.monotonic() + 120
    while is_running(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:
            pass
    return False


def test_fork_while_a_problem_is_tuned(start) -> None:
    said = end(start(
        """
        with no_grad:
            wyvern.policy("background", budget=2)
            wanted = call()[0]
            wait_for_a_tuner()
            children = []
            for _ in range(3):
                if (child := os.fork()) == 0:
                    assert wyvern.wait_for_tuning(0) and not tuners()
                    assert torch.equal(call()[0], wanted)
                    sys.exit(7)
                children.append(child)
            for child in children:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert wyvern.wait_for_tuning()
            torch.testing.assert_close(call()[0], wanted)
            assert origins() == ["exact"], origins()
        """
    ))
    assert said == ""


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no GPU that PyTorch can use")
def test_nothing_changes_while_a_graph_is_captured(start) -> None:
    end(start(
        """
        with no_grad:
            wyvern.policy("background", budget=2)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                wanted = call()[0].clone()
            assert wyvern.wait_for_tuning()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call()[0]
            assert origins() == ["default"], origins()
            graph.replay()
            torch.testing.assert_close(captured, wanted)
            torch.testing.assert_close(call()[0], wanted)
            assert origins() == ["exact"], origins()
            captured.zero_()
            graph.replay()
            torch.testing.assert_close(captured, wanted)
        """,
        "cuda",
    ))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_kda"])
def test_the_backward_pass_is_compiled_beside_the_forward_pass(start, tmp_path, op: str, norm: bool) -> None:
    code = f"""
    import ctypes
    from wyvern._extension import extension, library

    library().wyvern_runtime_compiled.restype = ctypes.c_int64
    library().wyvern_runtime_compiled.argtypes = [ctypes.c_void_p]
    extension().wyvern_extension_runtime.restype = ctypes.c_void_p
    compiled = lambda: library().wyvern_runtime_compiled(extension().wyvern_extension_runtime())
    q, k, v = (torch.randn(1, 100, 2, 32, requires_grad=True) for _ in range(3))
    g = -torch.rand(1, 100, 2, *([32] if {op == "chunk_kda"} else []))
    norm = dict(norm_gate=torch.randn(1, 100, 2, 32), norm_weight=torch.rand(32)) if {norm} else dict()
    forward = lambda: ops.{op}(q, k, v, g, torch.rand(1, 100, 2), **norm)[0]
    """

    def run(cache: str, then: str) -> str:
        process = start(code + then, WYVERN_CACHE_DIR=str(tmp_path / cache))
        out, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
        return out

    alone = int(run("alone", "with no_grad: forward()\n    print(compiled())"))
    both = int(run("both", "forward().sum().backward(); print(compiled())"))
    assert 0 < alone < both
    run(
        "beside",
        f"""
    o = forward()
    while compiled() < {both}:  # though nobody has asked for gradients
        time.sleep(0.01)
    o.sum().backward()
    assert compiled() == {both}
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    """,
    )
    run("ends", "forward()")  # the process waits for what is being compiled


def test_what_is_no_policy() -> None:
    import wyvern

    names = "background, cached, fixed, off, on-miss"
    with pytest.raises(ValueError, match=f"'sometimes'; it must be one of {names}"):
        wyvern.policy("sometimes")
    for budget in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="budget is"):
            wyvern.policy("background", budget=budget)
    assert wyvern.wait_for_tuning()
