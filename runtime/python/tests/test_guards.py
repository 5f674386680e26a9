"""Guard rails: suspicious shapes, refused dtypes, what is declined on a CPU, what is traced."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import make
from wyvern import ops, transformers
from wyvern._serving import Counts, replacement


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ops, "_heads_first_told", False)
    monkeypatch.setattr(ops, "_keys_told", False)
    monkeypatch.setattr(ops, "_gates_told", False)
    monkeypatch.setattr(ops, "_seen", set())
    transformers.report(reset=True)
    yield
    transformers.report(reset=True)


def test_heads_before_tokens_are_warned_of_once() -> None:
    call = make(ops.chunk_delta_rule, T=3, H=4, HV=4, states=False)
    message = r"q is \[1, 3, 4, 32\].*fewer tokens \(3\) than heads \(4\).*transpose"
    with pytest.warns(UserWarning, match=message) as told:
        call()
        call()
    assert len(told) == 1


@pytest.mark.parametrize("function", [ops.chunk_delta_rule, ops.fused_recurrent_delta_rule])
def test_usual_shapes_are_not_warned_of(function: Any) -> None:
    """As many tokens as heads; one token; a few tokens of a recurrent function."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(function, T=4, H=4, HV=4, states=False)()
        make(function, T=1, H=4, HV=4, states=False)()
        make(ops.fused_recurrent_delta_rule, T=3, H=4, HV=4, states=False)()


def test_outputs_larger_than_any_memory_are_refused_with_their_size() -> None:
    """Final states of 2 MB and as much workspace, of a million sequences that are empty but one."""
    N = 1 << 20
    call = make(ops.chunk_delta_rule, T=1, H=8, HV=8, K=256, V=256, states=False)
    tensors = {name: x.detach() for name, x in call.tensors.items()}
    ends = torch.zeros(N + 1, dtype=torch.int64)
    ends[-1] = 1
    with pytest.raises(RuntimeError, match=r"need 439\d{4} MB of memory, and \d+ MB are free; give fewer"):
        ops.chunk_delta_rule(**tensors, cu_seqlens=ends, output_final_state=True)


@pytest.mark.parametrize(
    "function", [ops.chunk_kda, ops.fused_recurrent_gated_delta_rule, ops.chunk_delta_rule]
)
def test_long_keys_are_warned_of_once(function: Any, device: str) -> None:
    call = make(function, device=device, T=70, states=False)
    call.tensors["k"] = 11 * call.tensors["k"].detach()
    with pytest.warns(UserWarning, match=r"length of about 11,.*use_qk_l2norm_in_kernel=True") as told:
        call()
        call.options["scale"] = 0.5
        call()
    assert len(told) == 1 and told[0].filename.endswith("conftest.py")


def test_keys_that_are_normalized_are_not_warned_of() -> None:
    """By the operator, or before; nor few long ones, nor those of a mapped tensor. A problem is looked at
    once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call = make(ops.chunk_delta_rule, states=False)
        call()
        call.tensors["k"] = 11 * call.tensors["k"].detach()
        call()
        ops.chunk_delta_rule(**call.tensors, use_qk_l2norm_in_kernel=True)
        one_long = make(ops.chunk_kda, states=False)
        one_long.tensors["k"] = one_long.tensors["k"].detach().clone()
        one_long.tensors["k"][0, 3] *= 11
        one_long()
        mapped = make(ops.chunk_gated_delta_rule, B=2, states=False)
        tensors = [11 * x.detach() for x in mapped.tensors.values()]
        torch.func.vmap(lambda *x: ops.chunk_gated_delta_rule(*(y.unsqueeze(0) for y in x))[0])(*tensors)


@pytest.mark.parametrize(
    "function", [ops.chunk_gated_delta_rule, ops.fused_recurrent_kda, ops.chunk_gdn2]
)
def test_gates_above_0_are_warned_of_once(function: Any, device: str) -> None:
    """In whatever token; as raw inputs of a gate in the kernel they may be."""
    call = make(function, device=device, T=70, states=False)
    call.tensors["g"] = call.tensors["g"].detach().clone()
    call.tensors["g"][0, -1] = 0.25
    with pytest.warns(UserWarning, match=r"g is up to 0\.25, and gates must be at most 0") as told:
        call()
        call.options["scale"] = 0.5
        call()
    assert len(told) == 1 and told[0].filename.endswith("conftest.py")
    ops._gates_told = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**call.tensors, use_gate_in_kernel=True, A_log=torch.zeros(2, device=device))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("q", torch.float64),
        ("k", torch.float64),
        ("v", torch.int64),
        ("g", torch.int64),
        ("beta", torch.bool),
        ("initial_state", torch.float64),
    ],
)
def test_a_refused_dtype_is_named(name: str, dtype: torch.dtype) -> None:
    call = make(ops.chunk_gated_delta_rule, T=3)
    tensors = call.tensors | {name: call.tensors[name].detach().to(dtype)}
    with pytest.raises(TypeError, match=rf"^{name} is {dtype}; it must be ") as raised:
        ops.chunk_gated_delta_rule(**tensors)
    assert "float" in str(raised.value).split("it must be")[1]


def declining(*args: Any, **kwargs: Any) -> None:
    raise ValueError("gv is given; it must be None")


def test_declined_on_a_cpu() -> None:
    """The reason, not what another library's kernels say of CPU tensors; errors on a GPU stay theirs."""

    def kernel(x: torch.Tensor) -> None:
        raise RuntimeError("0 active drivers")

    served = replacement(kernel, declining, Counts(), lambda: True)
    with pytest.raises(ValueError, match="computes on GPUs only: gv is given") as raised:
        served(torch.ones(1))
    assert "active drivers" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="active drivers"):
        served(torch.ones(1, device="meta"))


def test_declined_on_a_cpu_and_computed_there() -> None:
    counts = Counts()
    served = replacement(lambda x: x + 1, declining, counts, lambda: True)
    assert served(torch.zeros(1)).item() == 1
    assert counts.report(False).declined == {"declining": {"gv is given; it must be None": 1}}


@pytest.mark.parametrize("whole", [True, False])
def test_traced_calls_are_counted(whole: bool) -> None:
    """A model's own function is compiled, in one graph too; report() says so."""

    def own(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return value * beta.unsqueeze(-1)

    served = transformers._serving(own, ops.chunk_delta_rule)
    call = make(ops.chunk_delta_rule, T=3, states=False)
    tensors = [call.tensors[name].detach() for name in ("q", "k", "v", "beta")]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: served(*x), backend="eager", fullgraph=whole)
    for _ in range(2):
        assert torch.equal(compiled(*tensors), own(*tensors))
    counted = transformers.report()
    assert counted.traced == {"chunk_delta_rule": 1} and not counted.served and not counted.declined
    assert str(counted) == "chunk_delta_rule: 1 traced, so not served"
    served(*tensors)
    assert transformers.report().served == {"chunk_delta_rule": 1}
