"""Wrong calls: the exception's type, and that its message names the argument."""

from __future__ import annotations

import pytest
import torch
from conftest import make

from wyvern import ops

gated = ops.chunk_gated_delta_rule
kda = ops.chunk_kda
gdn2 = ops.chunk_gdn2


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# function, what is changed, the exception, what its message must have.
WRONG = {
    "not a tensor": (gated, {"k": [1.0]}, TypeError, "k is list"),
    "none": (gated, {"q": None}, TypeError, "q is None"),
    "none of a gate": (gated, {"beta": None}, ValueError, "beta is missing"),
    "rank": (gated, {"q": zeros(1, 3, 32)}, ValueError, "q has 3 dimensions; it must have 4"),
    "rank of v": (gated, {"v": zeros(3, 2, 16)}, ValueError, "v has 3 dimensions"),
    "shape of k": (gated, {"k": zeros(1, 4, 1, 32)}, ValueError, r"k has shape \[1, 4, 1, 32\]"),
    "shape of g": (gated, {"g": zeros(1, 3, 1)}, ValueError, r"g has shape \[1, 3, 1\]"),
    "heads": (gated, {"q": zeros(1, 3, 3, 32), "k": zeros(1, 3, 3, 32)}, ValueError, "HV is 2"),
    "K": (gated, {"q": zeros(1, 3, 1, 300), "k": zeros(1, 3, 1, 300)}, ValueError, "K is 300"),
    "float64": (gated, {"q": zeros(1, 3, 1, 32, dtype=torch.float64)}, TypeError, "^q is torch.float64; it must"),
    "integers": (gated, {"q": zeros(1, 3, 1, 32, dtype=torch.int64)}, TypeError, "^q is torch.int64; it must"),
    "mixed": (gated, {"v": zeros(1, 3, 2, 16).bfloat16()}, TypeError, "v is torch.bfloat16; it must be torch.float32"),
    "state": (gated, {"initial_state": zeros(2, 2, 32, 16)}, ValueError, "initial_state has shape"),
    "boundaries": (gated, {"cu_seqlens": torch.tensor([0, 2, 1, 3])}, ValueError, "cu_seqlens"),
    "boundaries' rank": (gated, {"cu_seqlens": torch.tensor([[0, 3]])}, ValueError, "cu_seqlens has 2 dim"),
    "boundaries' dtype": (gated, {"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "^cu_seqlens is torch.float32; it"),
    "boundaries' host copy": (
        gated,
        {"cu_seqlens": torch.tensor([0, 3]), "cu_seqlens_cpu": torch.tensor([0, 4])},
        ValueError,
        "cu_seqlens",
    ),
    "batch of a packed batch": (
        gated,
        {name: zeros(2, 3, *shape) for name, shape in
         {"q": (1, 32), "k": (1, 32), "v": (2, 16), "g": (2,), "beta": (2,)}.items()}
        | {"cu_seqlens": torch.tensor([0, 3])},
        ValueError,
        "B is 2",
    ),
    "A_log missing": (gated, {"use_gate_in_kernel": True}, ValueError, "A_log is None"),
    "A_log's shape": (gated, {"use_gate_in_kernel": True, "A_log": zeros(3)}, ValueError, "A_log has shape"),
    "sigmoid missing": (gated, {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel"),
    "chunk size": (gated, {"chunk_size": 48}, ValueError, "chunk_size is 48"),
    "context": (gated, {"cp_context": object()}, ValueError, "cp_context"),
    "head first": (gated, {"head_first": True}, ValueError, "head_first"),
    "unknown": (gated, {"colour": 1}, TypeError, "colour"),
    "lower bound": (kda, {"safe_gate": True, "lower_bound": -7.0}, ValueError, "lower_bound is -7"),
    "bound missing": (
        kda,
        {"use_gate_in_kernel": True, "safe_gate": True, "A_log": zeros(2)},
        ValueError,
        "lower_bound is None",
    ),
    "gdn2's names": (gdn2, {"b": zeros(1, 3, 2, 31)}, ValueError, r"b has shape \[1, 3, 2, 31\]"),
    "gdn2's gate missing": (gdn2, {"w": None}, ValueError, "^w is missing"),
    "unknown dtype": (gated, {"cu_seqlens": torch.tensor([0, 3]).short()}, TypeError, "^cu_seqlens is torch.int16; it"),
    "gdn2's write gate": (gdn2, {"w": "no"}, TypeError, "w is str"),
    "decay of values": (
        ops.fused_recurrent_gated_delta_rule,
        {"gv": zeros(1, 3, 2, 16)},
        ValueError,
        "gv is given",
    ),
    "steps": (
        ops.chunk_gated_delta_product,
        {"num_householder": 0},
        ValueError,
        "num_householder is 0",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
def test_wrong_argument(what: str, gradients: bool) -> None:
    function, changes, exception, message = WRONG[what]
    call = make(function, T=3, states=False)
    with torch.set_grad_enabled(gradients), pytest.raises(exception, match=message):
        function(**call.tensors | changes)


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize(
    ("function", "name"),
    [(gated, name) for name in ("q", "k", "v", "g", "beta", "initial_state")] + [(gdn2, "b"), (gdn2, "w")],
)
def test_tensor_without_values(function, name: str, gradients: bool) -> None:
    """One of the meta device makes PyTorch ask for the shapes of a result alone, which nobody computes."""
    call = make(function, T=3)
    with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=f"^{name} is on meta"):
        function(**call.tensors | {name: call.tensors[name].to("meta")})
    with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match="^q is on meta"):
        function(**{key: x.to("meta") for key, x in call.tensors.items()})


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seqlens_cpu"])
def test_boundaries_without_values(name: str) -> None:
    call = make(gated, T=3, states=False)
    boundaries = {"cu_seqlens": torch.tensor([0, 3]), name: torch.tensor([0, 3], device="meta")}
    with pytest.raises(ValueError, match=f"^{name} is on meta"):
        gated(**call.tensors | boundaries)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that PyTorch can use")
@pytest.mark.parametrize("name", ["q", "k", "beta"])
def test_tensor_on_another_device(name: str) -> None:
    call = make(gated, T=3, states=False, device="cuda")
    with pytest.raises(ValueError, match=f"{'k' if name == 'q' else name} is on"):
        gated(**call.tensors | {name: call.tensors[name].cpu()})


@pytest.mark.parametrize("function", [gated, kda, gdn2, ops.fused_recurrent_kda])
def test_the_old_name_of_the_layout(function) -> None:
    call = make(function, T=3, states=False)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = function(**call.tensors, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (1, 2, 16, 32)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        function(**call.tensors, state_v_first=True, transpose_state_layout=True)


def test_what_is_computed_after_an_error_is_right() -> None:
    call = make(gated, T=3)
    wanted, _ = call()
    with pytest.raises(ValueError):
        gated(**call.tensors | {"g": zeros(1, 3, 1)})
    assert torch.equal(call()[0], wanted)
