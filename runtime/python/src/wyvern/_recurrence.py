"""What float64 tensors are computed by: the recurrence token by token, in PyTorch.

PyTorch differentiates it as often as is asked, in reverse and forwards, and vmaps it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import floating, tensor
from ._call import Inputs, Problem, by_parameter, refuse_meta

_LEAST_BOUND = -5.0
_CHUNK_SIZES = (16, 32, 64, 128)


def run(problem: Problem, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """o and the final state, where the problem asks for it, in float64; behind them the rows that the
    convolution goes on from, where it asks for these.

    inputs: all on the CPU; q, k and v are float64, the others of any floating-point dtype.

    Raises TypeError or ValueError naming the argument, as the operators do in other dtypes.
    """
    cu_seqlens = inputs.cu_seqlens
    given = {
        name: x
        for name, x in by_parameter(problem, inputs).items()
        if not name.startswith("cu_seqlens") and (x is not None or name in ("q", "k", "v"))
    }
    steps = _check(problem, given, cu_seqlens, inputs.cu_seqlens_cpu)
    exact = {name: x.double() for name, x in given.items()}
    windows: tuple[Tensor, ...] = ()
    if "conv_weight" in exact:
        *rows, last = convolve(
            *(exact[name] for name in ("q", "k", "v", "conv_weight")),
            bias=exact.get("conv_bias"),
            initial=exact.get("initial_conv_state"),
            cu_seqlens=cu_seqlens,
            steps=steps,
            silu=problem["conv_activation"] == "silu",
        )
        exact |= zip(("q", "k", "v"), rows, strict=True)
        windows = (last,) if "output_conv_state" in problem else ()
    o, state = recurrence(
        *(exact.get(name) for name in ("q", "k", "v", "g", "beta", "b", "w")),
        scale=problem.get("scale"),
        initial_state=exact.get("initial_state"),
        cu_seqlens=cu_seqlens,
        steps=steps,
        l2norm="use_qk_l2norm" in problem,
        beta_sigmoid="use_beta_sigmoid" in problem,
        neg_eigval="allow_neg_eigval" in problem,
        gate="use_gate_in_kernel" in problem,
        lower_bound=problem.get("lower_bound"),
        A_log=exact.get("A_log"),
        dt_bias=exact.get("dt_bias"),
        v_first="state_v_first" in problem,
    )
    if "output_norm" in problem:
        gate = exact["norm_gate"]
        gate = F.silu(gate) if problem["output_norm"] == "silu" else gate.sigmoid()
        rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + problem["norm_eps"])
        o = o * rstd * exact["norm_weight"] * gate
    return o, state if "output_final_state" in problem else None, *windows


def _check(
    problem: Problem,
    given: dict[str, Tensor],
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> int:
    """The steps of a token, of arguments that are right."""
    for name, x in given.items():
        floating(name, tensor(name, x))
    refuse_meta(**given)
    for name, x in given.items():
        if not x.is_cpu:
            raise TypeError(
                f"{name} is on {x.device} and q is torch.float64, which is computed on the CPU "
                "alone; q, k and v must be torch.float32, torch.float16 or torch.bfloat16 there"
            )
        if name in ("k", "v") and x.dtype is not torch.float64:
            raise TypeError(
                "q is torch.float64; it must be torch.float32, torch.float16 or torch.bfloat16 "
                f"where {name} is {x.dtype}: float64 is for q, k and v together"
            )
        if name in ("q", "v") and x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; it must have 4")
    op, steps = problem["op"], problem.get("num_householder", 1)
    if steps < 1:
        raise ValueError(f"num_householder is {steps}; it must be at least 1")
    if problem.get("chunk_size", 64) not in _CHUNK_SIZES:
        legal = ", ".join(map(str, _CHUNK_SIZES))
        raise ValueError(f"chunk_size is {problem['chunk_size']}; it must be one of {legal}")
    if not _LEAST_BOUND <= problem.get("lower_bound", -1) < 0:
        bound = problem["lower_bound"]
        raise ValueError(f"lower_bound is {bound}; it must be in [{_LEAST_BOUND:g}, 0)")
    if not 0 < problem.get("norm_eps", 1) < math.inf:
        raise ValueError(f"norm_eps is {problem['norm_eps']:g}; it must be finite and above 0")
    (B, T, H, K), (HV, V) = given["q"].shape, given["v"].shape[2:]
    if H == 0 or HV % H != 0:
        raise ValueError(f"HV is {HV}; it must be a multiple of H, {H}")
    N = B
    if cu_seqlens is not None:
        N = _check_boundaries("cu_seqlens", cu_seqlens, B, T)
        if cu_seqlens_cpu is not None:
            _check_boundaries("cu_seqlens_cpu", cu_seqlens_cpu, B, T)
            if not torch.equal(cu_seqlens_cpu, cu_seqlens.to(cu_seqlens_cpu.dtype)):
                raise ValueError("cu_seqlens_cpu differs from cu_seqlens; it must be its copy")
    state = (HV, V, K) if "state_v_first" in problem else (HV, K, V)
    channels = (K,) if op in ("kda", "gdn2") else ()
    shapes = {
        "q": (B, T, H, K),
        "k": (B, steps * T, H, K),
        "v": (B, steps * T, HV, V),
        "g": (B, T, HV, *channels),
        "beta": (B, steps * T, HV),
        "b": (B, T, HV, K),
        "w": (B, T, HV, V),
        "initial_state": (N, *state),
        "A_log": (HV,),
        "dt_bias": (HV, *channels),
        "norm_weight": (V,),
        "norm_gate": (B, T, HV, V),
    }
    if "conv_weight" in given:
        C, W = H * K + steps * (H * K + HV * V), given["conv_weight"].shape[1]
        shapes |= {"conv_weight": (C, W), "conv_bias": (C,), "initial_conv_state": (N, C, W - 1)}
    for name, x in given.items():
        if x.shape != shapes[name]:
            raise ValueError(f"{name} has shape {list(x.shape)}; it must be {list(shapes[name])}")
    needed = ["b", "w"] if op == "gdn2" else ["beta"]
    if op != "delta_rule" and "has_g" not in problem:
        needed.append("g")
    for name in needed:
        if name not in given:
            raise ValueError(f"{name} is missing; it must be {list(shapes[name])}")
    return steps


def _check_boundaries(name: str, boundaries: Tensor, B: int, T: int) -> int:
    """How many sequences they are of."""
    refuse_meta(**{name: tensor(name, boundaries)})
    if boundaries.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {boundaries.dtype}; it must be torch.int32 or torch.int64")
    if boundaries.dim() != 1:
        raise ValueError(f"{name} has {boundaries.dim()} dimensions; it must have 1")
    if B != 1:
        raise ValueError(f"B is {B} and {name} is given; it must be 1 in a packed batch")
    values = boundaries.tolist()
    if not values or values[0] != 0 or values[-1] != T or values != sorted(values):
        raise ValueError(f"{name} is {values}; it must go from 0 to T, {T}, and never decrease")
    return len(values) - 1


def convolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    initial: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    steps: int = 1,
    silu: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v convolved, and the last rows, which convolving goes on from; shapes as wyvern.ops has them."""
    (B, T, H, K), (HV, V), (C, W) = q.shape, v.shape[2:], weight.shape
    widths = [H * K, steps * H * K, steps * HV * V]
    x = torch.cat([x.reshape(B, T, width) for x, width in zip((q, k, v), widths, strict=True)], -1)
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    convolved, windows = [x[:, :0]], [x.new_zeros(0, C, W - 1)]
    for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        one = slice(n, n + 1) if cu_seqlens is not None else slice(None)
        before = x.new_zeros(B, W - 1, C) if initial is None else initial[one].mT
        rows = torch.cat([before, x[:, first:last]], 1)
        y = sum(weight[:, i] * rows[:, i : i + last - first] for i in range(W))
        y = y if bias is None else y + bias
        convolved.append(F.silu(y) if silu else y)
        windows.append(rows[:, last - first :].mT)
    parts = torch.cat(convolved, 1).split(widths, -1)
    return *(part.reshape(of.shape) for part, of in zip(parts, (q, k, v), strict=True)), torch.cat(windows)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    steps: int = 1,
    l2norm: bool = False,
    beta_sigmoid: bool = False,
    neg_eigval: bool = False,
    gate: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    v_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """o and the final state of inputs in float64, shapes as wyvern.ops has them."""
    if l2norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if beta_sigmoid:
        beta = beta.sigmoid() * (2 if neg_eigval else 1)
    if gate:
        g = _gate(g, A_log, dt_bias, lower_bound)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    scale = K**-0.5 if scale is None else scale
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        rows = slice(n, n + 1) if cu_seqlens is not None else slice(None)
        S = q.new_zeros(B, HV, K, V)
        if initial_state is not None:
            S = initial_state[rows].transpose(-1, -2) if v_first else initial_state[rows]
        for t in range(first, last):
            if g is not None:
                decay = g[:, t].exp()
                S = S * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
            for row in range(t * steps, (t + 1) * steps):
                key, value = k[:, row], v[:, row]
                if erase is None:
                    read = torch.einsum("bhkv,bhk->bhv", S, key)
                    u = beta[:, row, :, None] * (value - read)
                else:
                    read = torch.einsum("bhkv,bhk->bhv", S, erase[:, row] * key)
                    u = write[:, row] * value - read
                S = S + key[..., None] * u[..., None, :]
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
        states.append(S)
    o = torch.stack(outputs, 1) if outputs else q.new_zeros(B, 0, HV, V)
    state = torch.cat(states) if states else q.new_zeros(0, HV, K, V)
    return o, state.transpose(-1, -2) if v_first else state


def _gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    if dt_bias is not None:
        g = g + dt_bias
    rate = 1.0 if A_log is None else A_log.exp()
    if A_log is not None and g.dim() == 4:
        rate = rate[:, None]
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
