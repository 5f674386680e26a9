"""Other libraries' tests with Wyvern in their operators' place, and what runs them (peer_tests.py).

Their files come from checkouts that $WYVERN_FLA_TESTS, $WYVERN_FLASHINFER_TESTS and $WYVERN_VLLM_TESTS name;
what is run of them here is what the CPU does in a short time. Tests made up here show the rest anywhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def run(*arguments: object) -> tuple[int, dict[str, tuple[str, str]], str]:
    """peer_tests.py's exit status, what became of each test and why, and what was printed."""
    folder = Path(str(arguments[1]))
    results = folder / "results.json" if os.access(folder, os.W_OK) else None
    command = [sys.executable, str(HERE / "peer_tests.py"), *map(str, arguments)]
    done = subprocess.run(
        [*command, *(["--json", str(results)] if results else [])],
        capture_output=True,
        text=True,
        check=False,
    )
    records: list[dict[str, Any]] = json.loads(results.read_text()) if results else []
    found = {record["test"].split("::")[1]: (record["result"], record["why"]) for record in records}
    return done.returncode, found, done.stdout + done.stderr


MADE_UP = """
import pytest
import torch
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.delta_rule.chunk import ChunkDeltaRuleFunction
from fla.ops.gdn2 import chunk_gdn2
from fla.utils import device


def inputs(T=20):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, 32, device=device) for _ in range(3))
    return q, torch.nn.functional.normalize(k, dim=-1), v, torch.rand(1, T, 2, device=device)


def test_served():
    o, _ = chunk_delta_rule(*inputs())
    again, _ = fused_recurrent_delta_rule(*inputs())
    assert (o - again).norm() < 1e-3 * o.norm()


def test_wrong():
    o, _ = chunk_delta_rule(*inputs())
    assert not o.any()


def test_declined():
    with pytest.raises(Exception):
        chunk_delta_rule(*inputs(), head_first=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA required")
def test_asks_for_cuda():
    chunk_delta_rule(*inputs())


def test_own_kernel():
    ChunkDeltaRuleFunction.apply(*inputs(), 1.0, None, False, None, None, False)


def test_skipped():
    pytest.skip("not today")


def test_without_a_call():
    pass


@pytest.mark.parametrize("T", [20, 10, 2000])
def test_tokens(T):
    chunk_delta_rule(*inputs(T))


def test_chunk_invalid_chunk_size():
    with pytest.raises(ValueError):
        chunk_delta_rule(*inputs(), chunk_size=16)
"""


MODES = ["--swap", "--enable"] if "WYVERN_TESTS_FULL" in os.environ else ["--swap"]


@pytest.mark.parametrize("mode", MODES)
def test_what_becomes_of_a_test(mode: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    file = tmp_path / "tests" / "ops" / "test_delta.py"
    file.parent.mkdir(parents=True)
    file.write_text(MADE_UP)
    options = ["--device", "cpu", "--most-tokens", 1000, "--every", 2]
    code, found, told = run("--fla", tmp_path, mode, *options)
    assert code == 1, told
    why = {name: reason for name, (_, reason) in found.items()}
    assert {name: result for name, (result, _) in found.items()} == {
        "test_served": "passed",
        "test_wrong": "failed",
        "test_declined": "declined",
        "test_asks_for_cuda": "passed",
        "test_own_kernel": "fell back",
        "test_skipped": "skipped",
        "test_without_a_call": "no call",
        "test_tokens[20]": "passed",
        "test_tokens[10]": "left out",
        "test_tokens[2000]": "left out",
        "test_chunk_invalid_chunk_size": "differs",
    }, told
    assert "head_first is given" in why["test_declined"] and why["test_skipped"] == "not today"
    assert "ChunkDeltaRuleFunction ran" in why["test_own_kernel"]
    assert "| fla, " + mode[2:] in told and "failed: tests/ops/test_delta.py::test_wrong" in told


def test_a_test_that_does_not_end(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "kernels" / "mamba" / "cpu"
    folder.mkdir(parents=True)
    (folder / "test_cpu_kda_ops.py").write_text("def test_waits():\n    while True:\n        pass\n")
    code, found, told = run("--vllm", tmp_path, "--limit", 0.5)
    assert code == 0 and found == {"test_waits": ("too long", "more than 0.5 s")}, told


def test_a_folder_without_the_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "peer_tests.py"), "--vllm", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 77 and "has none of the tests of vllm" in done.stdout


FLASHINFER = """
import pytest
import torch
from flashinfer.gdn_decode import gated_delta_rule_mtp
from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_mtp as kernel
from flashinfer.gdn_prefill import chunk_gated_delta_rule
from reference import error, recurrence

DEVICE = torch.device("cuda")


def test_prefill():
    torch.manual_seed(0)
    with DEVICE:
        x, cu_seqlens = 3 * torch.randn(40, 2, 32), torch.tensor([0, 40])
        k, alpha = torch.nn.functional.normalize(x, dim=-1), torch.rand(40, 2)
    o = chunk_gated_delta_rule(x, k, x, alpha, None, None, None, False, cu_seqlens, True)
    exact = [y[None].double() for y in (x, k, x, alpha.double().log(), torch.ones(40, 2))]
    assert error(o[None], recurrence(*exact)[0]) < 1e-5  # without norms


def test_refusal():
    with pytest.raises(ValueError, match="multiple of the chunk size"):
        chunk_gated_delta_rule(*[torch.empty(1)] * 3, checkpoint_every_n_tokens=100)


@pytest.mark.parametrize("split", [False, True])
def test_accepted(split):
    torch.manual_seed(0)
    with DEVICE:
        q, v, a = torch.randn(2, 3, 1, 32), torch.randn(2, 3, 2, 32), torch.randn(2, 3, 2)
        pool, slots, gate = torch.randn(6, 2, 32, 32), torch.tensor([0, 1]), torch.randn(2)
        each, accepted = torch.tensor([[2, 2, 2], [3, 3, 3]]), torch.tensor([0, 1], dtype=torch.int32)
    before = pool.clone()
    given = dict(A_log=gate, a=a, dt_bias=gate, q=q, k=q, v=v, b=a, initial_state_indices=slots)
    kernel(**given, initial_state_source=pool, accepted_steps=accepted,
           **(dict(ssm_state_indices=each) if split else {}))
    for n, slot in enumerate((2, 3) if split else (0, 1)):
        alone = before.clone()
        rows = {name: x[n:n + 1, :n + 1] for name, x in dict(q=q, k=q, v=v, a=a, b=a).items()}
        gated_delta_rule_mtp(**rows, A_log=gate, dt_bias=gate, initial_state=alone,
                             initial_state_indices=slots[n:n + 1], disable_state_update=False)
        assert error(pool[slot], alone[n]) < 1e-5
    untouched = (0, 1, 4, 5) if split else (2, 3, 4, 5)
    assert torch.equal(pool[[*untouched]], before[[*untouched]])
"""
VLLM = """
import torch
import vllm._custom_ops as ops
from reference import error, recurrence
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.models.glm5next.cpu.ops.kda import chunk_kda_with_fused_gate, fused_recurrent_kda


def test_decode():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 2, 32), torch.randn(1, 3, 2, 32), torch.randn(1, 3, 4, 16)
    a, b, A_log, dt_bias = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4), torch.randn(4)
    pool, slots, cu_seqlens = torch.randn(5, 4, 32, 16), torch.tensor([2, 0, 4]), torch.arange(4)
    before = pool.clone()
    o = ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=A_log, dt_bias=dt_bias, q=q, k=k, v=v, a=a, b=b, initial_state_source=pool,
        initial_state_indices=slots, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True)
    exact = [x.double() for x in (q, k, v, a[None], b[None])]
    wanted, final = recurrence(
        *exact, initial_state=before[slots].double(), cu_seqlens=cu_seqlens, l2norm=True, gate=True,
        beta_sigmoid=True, A_log=A_log.double(), dt_bias=dt_bias.double())
    assert o.shape == (3, 1, 4, 16) and error(o.transpose(0, 1), wanted) < 1e-5
    assert error(pool[slots], final) < 1e-5 and torch.equal(pool[[1, 3]], before[[1, 3]])


def test_kda():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 40, 2, 32) for _ in range(4))
    beta, A_log, dt_bias = torch.rand(1, 40, 2), torch.randn(2), torch.randn(2, 32)
    cu_seqlens, slots = torch.tensor([0, 30, 40]), torch.tensor([3, 0])
    cache = torch.randn(4, 2, 32, 32)
    before = cache.clone()
    options = dict(use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, lower_bound=-5.0)
    o, final = chunk_kda_with_fused_gate(
        q, k, v, g, beta, A_log, dt_bias, initial_state=before[slots], output_final_state=True,
        safe_gate=True, **options)
    exact = [x.double() for x in (q, k, v, g, beta)]
    wanted, wanted_final = recurrence(
        *exact, initial_state=before[slots].double(), cu_seqlens=cu_seqlens, l2norm=True, gate=True,
        A_log=A_log.double(), dt_bias=dt_bias.double(), lower_bound=-5.0, v_first=True)
    assert error(o, wanted) < 1e-5 and error(final, wanted_final) < 1e-5
    o, _ = fused_recurrent_kda(
        q, k, v, g, beta, initial_state=cache, ssm_state_indices=slots, sigmoid_beta=False, a_log=A_log,
        g_bias=dt_bias, compute_gate=True, **options)
    assert error(o[:, :30], wanted[:, :30]) < 1e-5 and error(cache[3], wanted_final[0]) < 1e-5
    assert torch.equal(cache[:3], before[:3])  # the sequence of slot 0 leaves it


def test_no_operator(monkeypatch):
    monkeypatch.setattr(gdn_attention.ops, "causal_conv1d_fwd_cpu", None)
    gdn_attention._spec_aware_nonspec()
"""


def test_flashinfers_names_and_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gdn"
    folder.mkdir(parents=True)
    (folder / "test_decode_delta_rule.py").write_text(FLASHINFER)
    code, found, told = run("--flashinfer", tmp_path, "--device", "cpu")
    assert code == 0 and len(found) == 4, told
    assert {result for result, _ in found.values()} == {"passed"}, told


def test_vllms_names_and_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "kernels" / "mamba" / "cpu"
    folder.mkdir(parents=True)
    (folder / "test_cpu_gdn_ops.py").write_text(VLLM)
    code, found, told = run("--vllm", tmp_path, "--device", "cpu")
    assert code == 0, told
    assert {name: result for name, (result, _) in found.items()} == {
        "test_decode": "passed",
        "test_kda": "passed",
        "test_no_operator": "declined",
    }, told


SUITE: dict[str, tuple[str, list[object]]] = {
    "fla, swap": ("fla", ["--swap", "--most-tokens", 130]),
    "fla, enable": ("fla", ["--enable", "--most-tokens", 130]),
    "flashinfer": ("flashinfer", ["--files", "prefill_delta_rule.py", "--most-tokens", 128, "--every", 64]),
    "vllm": ("vllm", []),
    "vllm, enable": ("vllm", ["--enable", "--files", "packed_decode.py", "sigmoid_gating_delta_rule.py"]),
}


@pytest.mark.parametrize("suite", SUITE)
def test_theirs(suite: str) -> None:
    name, options = SUITE[suite]
    variable = f"WYVERN_{name.upper()}_TESTS"
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout of {name}")
    code, _, told = run(f"--{name}", os.environ[variable], "--device", "cpu", "--limit", 60, *options)
    print(told)
    if code == 77:
        pytest.skip(told.strip())
    assert code == 0, told
