"""The convolution and the norm around an operator whose sequences lie on several ranks.

Both are made once for all tokens of a rank: q, k and v are convolved before the summaries and the pass, which take
convolved rows, and the gradient of o goes through the norm before the summaries of the backward pass and that pass
itself. Convolved rows are kept until then, so a step convolves once where one rank's call does so twice.

The stages are launched by operators of their own, which torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _recurrence
from .._call import Inputs, Problem
from .._stage import INTEGERS, dtype_name
from .._stage import run as run_stage

_FIELDS = ("conv_activation", "output_norm", "norm_eps")  # of a problem, that its summaries do not have
_CONV = ("conv_weight", "conv_bias", "initial_conv_state")
_NORM = ("norm_weight", "norm_gate")


def apart(fields: Problem) -> tuple[Problem, Problem]:
    """The fields of the operator alone, and those of the convolution and the norm."""
    bare = {name: value for name, value in fields.items() if name not in _FIELDS}
    return bare, {name: value for name, value in fields.items() if name in _FIELDS}


def bare(x: Inputs) -> Inputs:
    """x without the tensors of the convolution and the norm."""
    return x._replace(**dict.fromkeys((*_CONV, *_NORM)))


def check_rows(x: Inputs) -> None:
    """Raises where q, k and v are not of four dimensions and one dtype."""
    for name, y in (("q", x.q), ("k", x.k), ("v", x.v)):
        if y.dim() != 4:
            raise ValueError(f"{name} has {y.dim()} dimensions; it must have 4")
        if y.dtype is not x.q.dtype:
            raise TypeError(f"{name} is {y.dtype}; it must be {x.q.dtype}, as q is")


def convolve(x: Inputs, layer: Problem, steps: int, exact: bool) -> tuple[Inputs, Tensor]:
    """x with q, k and v convolved and without what the convolution takes, and the rows that it goes on from."""
    if exact:
        *rows, last = _convolve(x, layer, steps)
    else:
        window = x.initial_conv_state
        if window is not None and window.dtype is not x.q.dtype:
            raise TypeError(f"initial_conv_state is {window.dtype}; it must be {x.q.dtype}, as q is")
        *rows, last = torch.ops.wyvern.short_conv(*_taken(x), layer["conv_activation"], steps)
    return x._replace(**dict(zip("qkv", rows, strict=True)), **dict.fromkeys(_CONV)), last


def convolve_gradients(
    x: Inputs, gradients: tuple[Tensor, ...], dlast: Tensor | None, layer: Problem, steps: int, exact: bool
) -> dict[str, Tensor]:
    """The gradients of what :func:`convolve` takes, by name, from those of convolved rows."""
    names = [name for name in ("q", "k", "v", *_CONV) if getattr(x, name) is not None]
    if not exact:
        made = torch.ops.wyvern.short_conv_backward(
            *_taken(x), layer["conv_activation"], steps, *gradients, dlast
        )
        return dict(zip(names, made, strict=True))
    given = {name: getattr(x, name) for name in names}
    return by_autograd(lambda leaves: _convolve(x._replace(**leaves), layer, steps), given, (*gradients, dlast))


def _taken(x: Inputs) -> tuple[Tensor | None, ...]:
    return (*x[:3], x.conv_weight, x.conv_bias, x.initial_conv_state, x.cu_seqlens)


def _convolve(x: Inputs, layer: Problem, steps: int) -> tuple[Tensor, ...]:
    """In float64."""
    return _recurrence.convolve(
        *x[:3], x.conv_weight, bias=x.conv_bias, initial=x.initial_conv_state, cu_seqlens=x.cu_seqlens,
        steps=steps, silu=layer["conv_activation"] == "silu",
    )  # fmt: skip


def normalize(o: Tensor, x: Inputs, layer: Problem) -> Tensor:
    """o normalized and gated, in float64."""
    gate = x.norm_gate.sigmoid() * (x.norm_gate if layer["output_norm"] == "silu" else 1)
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer["norm_eps"]) * x.norm_weight * gate


def normalize_gradients(
    do: Tensor, o: Tensor, x: Inputs, layer: Problem, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of o before the norm, of norm_weight and norm_gate, from that of o behind it."""
    if not exact:
        activation, eps = layer["output_norm"], layer["norm_eps"]
        return tuple(torch.ops.wyvern.output_norm_backward(do, o, x.norm_weight, x.norm_gate, activation, eps))
    given = {"o": o, "norm_weight": x.norm_weight, "norm_gate": x.norm_gate}
    made = by_autograd(lambda leaves: (normalize(leaves.pop("o"), x._replace(**leaves), layer),), given, (do,))
    return tuple(made.values())


def by_autograd(
    function: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    given: dict[str, Tensor],
    gradients: Sequence[Tensor | None],
) -> dict[str, Tensor]:
    """The gradients of tensors by name, from those of what function makes of them."""
    leaves = {name: y.detach().requires_grad_() for name, y in given.items()}
    with torch.enable_grad():
        outputs = function(dict(leaves))
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad and dy is not None]
    made = torch.autograd.grad(
        [y for y, _ in pairs], list(leaves.values()), [dy for _, dy in pairs],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return dict(zip(given, made, strict=True))


_ROWS = "Tensor q, Tensor k, Tensor v, Tensor weight, Tensor? bias, Tensor? initial, Tensor? cu_seqlens"
_OPTIONS = "str activation, int steps"
torch.library.define("wyvern::short_conv", f"({_ROWS}, {_OPTIONS}) -> Tensor[]")
torch.library.define(
    "wyvern::short_conv_backward", f"({_ROWS}, {_OPTIONS}, Tensor dq, Tensor dk, Tensor dv, Tensor? dlast) -> Tensor[]"
)
torch.library.define(
    "wyvern::output_norm_backward",
    "(Tensor do, Tensor o_raw, Tensor weight, Tensor gate, str activation, float eps) -> Tensor[]",
)


def _problem(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, **more: Any) -> dict[str, Any]:
    """The fields of a stage's problem."""
    (B, T, H, K), (HV, V), dtype = q.shape, v.shape[2:], dtype_name("q", q)
    fields = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V, "dtype": dtype, "beta_dtype": dtype, "N": B, **more}
    if cu_seqlens is not None:
        dtype = dtype_name("cu_seqlens", cu_seqlens, INTEGERS)
        fields |= {"packed": 1, "seqlens_dtype": dtype, "N": len(cu_seqlens) - 1}
    return fields


def _conv_stage(
    name: str, taken: tuple[Any, ...], given: dict[str, Tensor | None], **more: Any
) -> dict[str, Tensor]:
    q, k, v, weight, bias, initial, cu_seqlens, activation, steps = taken
    fields = _problem(
        q, v, cu_seqlens, op="gated_delta_product", num_householder=steps, has_g=0, short_conv=weight.shape[1],
        conv_activation=activation, conv_dtype=dtype_name("conv_weight", weight), has_conv_bias=bias is not None,
        initial_conv_state=initial is not None, **more,
    )  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "conv_weight": weight, "conv_bias": bias, "initial_conv_state": initial}
    return run_stage(name, fields, tensors | {"cu_seqlens": cu_seqlens} | given)


@torch.library.impl("wyvern::short_conv", ("cpu", "cuda"))
def _short_conv(*taken: Any) -> list[Tensor]:
    made = _conv_stage("short_conv", taken, {}, output_conv_state=1)
    return [made[name] for name in ("q_conv", "k_conv", "v_conv", "final_conv_state")]


@torch.library.register_fake("wyvern::short_conv")
def _short_conv_shapes(*taken: Any) -> list[Tensor]:
    q, k, v, weight, _, _, cu_seqlens, *_ = taken
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return [*(x.new_empty(x.shape) for x in (q, k, v)), q.new_empty([N, weight.shape[0], weight.shape[1] - 1])]


@torch.library.impl("wyvern::short_conv_backward", ("cpu", "cuda"))
def _short_conv_backward(*taken: Any) -> list[Tensor]:
    *taken, dq, dk, dv, dlast = taken
    given = {"dq_conv": dq, "dk_conv": dk, "dv_conv": dv, "dfinal_conv_state": dlast}
    fields = {"pass": "backward", "output_conv_state": dlast is not None}
    made = _conv_stage("short_conv_bwd", tuple(taken), given, **fields)
    weight, bias, initial = taken[3:6]
    gradients = [made["dq"], made["dk"], made["dv"], made["dconv_weight_part"].sum(0).to(weight.dtype)]
    if bias is not None:
        gradients.append(made["dconv_bias_part"].sum(0).to(bias.dtype))
    return gradients if initial is None else [*gradients, made["dinitial_conv_state"]]


@torch.library.register_fake("wyvern::short_conv_backward")
def _short_conv_backward_shapes(*taken: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in taken[:6] if x is not None]


@torch.library.impl("wyvern::output_norm_backward", ("cpu", "cuda"))
def _output_norm_backward(
    do: Tensor, o_raw: Tensor, weight: Tensor, gate: Tensor, activation: str, eps: float
) -> list[Tensor]:
    fields = _problem(
        o_raw, o_raw, None, op="delta_rule", output_norm=activation, norm_eps=eps, **{"pass": "backward"}
    )
    given = {"do": do, "o_raw": o_raw, "norm_weight": weight, "norm_gate": gate}
    made = run_stage("output_norm_bwd", fields, given)
    return [made["do_raw"], made["dnorm_weight_part"].sum(0), made["dnorm_gate"]]


@torch.library.register_fake("wyvern::output_norm_backward")
def _output_norm_backward_shapes(
    do: Tensor, o_raw: Tensor, weight: Tensor, gate: Tensor, activation: str, eps: float
) -> list[Tensor]:
    return [o_raw.new_empty(o_raw.shape), weight.new_empty(weight.shape), gate.new_empty(gate.shape)]
