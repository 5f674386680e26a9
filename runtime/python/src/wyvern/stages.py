"""The stages of the chunked form on their own, by flash-linear-attention's names, arguments and shapes, and the
short convolution and the gated norm of a layer, forwards and backwards.

B sequences of T tokens, H heads of q and k, HV heads of v, BT tokens a chunk. With ``cu_seqlens`` B is 1
and T all tokens. Where a function takes ``g``, that is the log decay summed inside chunks *in base 2*, as
``chunk_local_cumsum(g, chunk_size, scale=RCP_LN2)`` gives it from natural logarithms. A chain of them is a
forward pass::

    g = chunk_local_cumsum(g, 64, scale=RCP_LN2)
    A = solve_tril(chunk_scaled_dot_kkt_fwd(k, g, beta), output_dtype=k.dtype)
    w, u = recompute_w_u_fwd(k, v, beta, A, g)
    h, v_new, final_state = chunk_gated_delta_rule_fwd_h(k, w, u, g, output_final_state=True)
    o = chunk_fwd_o(q, k, v_new, h, g)

Each is one kernel by its default config, with one more for the tables of a packed batch; no gradient is
recorded, and ``torch.compile`` does not trace them. Rows of tokens of q, k, v, g and beta may be strided, as in
:mod:`wyvern.ops`, without a copy. Wyvern makes the tables itself: ``chunk_indices`` and
``chunk_offsets`` are taken and not looked at.

Wrong arguments raise TypeError or ValueError naming the argument. Boundaries on the CPU, in ``cu_seqlens`` or
``cu_seqlens_cpu``, are checked in full; those on a GPU are the caller's promise: from 0 to T, none below the
one before it.
"""

from __future__ import annotations

import functools
import math

from ._torch import torch  # before what imports it by its own name
from torch import Tensor

from ._arguments import integer, real, tensor
from ._stage import FLOATS, INTEGERS, PUBLIC, dtype_name, run

__all__ = [
    "RCP_LN2",
    "chunk_fwd_o",
    "chunk_gated_delta_rule_fwd_h",
    "chunk_local_cumsum",
    "chunk_scaled_dot_kkt_fwd",
    "l2norm_fwd",
    "output_norm",
    "output_norm_bwd",
    "recompute_w_u_fwd",
    "short_conv",
    "short_conv_bwd",
    "solve_tril",
]

RCP_LN2 = 1 / math.log(2)  # natural logarithms to those of base 2
_ANY = 16  # a dimension of a problem that the stage does not have


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """The running sum of ``g`` [B, T, HV] or [B, T, HV, K] inside each chunk, times ``scale``."""
    _refuse(reverse=reverse, head_first=head_first)
    _output("output_dtype", output_dtype)
    kind = dtype_name("g", g)
    if g.dim() not in (3, 4):
        raise ValueError(f"g has {g.dim()} dimensions; it must have 3 or 4")
    heads = g.shape[2:].numel()
    size = integer("chunk_size", chunk_size)
    fields, tables = _problem(g.shape[0], g.shape[1], heads, heads, size, cu_seqlens)
    fields |= {"op": "gated_delta_rule", "g_dtype": kind}
    summed = run("chunk_local_cumsum", fields, {"g": g.flatten(2)} | tables)["G"]
    if scale is not None:
        summed *= real("scale", scale)
    return summed.view(g.shape).to(output_dtype or g.dtype)


def chunk_scaled_dot_kkt_fwd(
    k: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    output_dtype: torch.dtype = torch.float32,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """A [B, T, HV, BT], strictly lower: beta_r 2^(g_r - g_s) k_r . k_s of ``k`` [B, T, H, K]; ``g`` and
    ``beta`` are [B, T, HV]."""
    if beta is None:
        raise TypeError("beta is None; it must be a torch.Tensor")
    _output("output_dtype", output_dtype)
    _rank("k", k, 4)
    _rank("beta", beta, 3)
    size = integer("chunk_size", chunk_size)
    fields, tables = _problem(*k.shape[:3], beta.shape[2], size, cu_seqlens, g, K=k.shape[3])
    fields |= _dtype("k", k) | {"beta_dtype": dtype_name("beta", beta)}
    given = {"k": k, "beta": beta, "G": _natural(g)} | tables
    return run("scaled_dot_kkt", fields, given)["A"].to(output_dtype)


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """(I + A)^-1 per chunk, of a strictly lower ``A`` [B, T, HV, BT]."""
    _rank("A", A, 4)
    output_dtype = _output("output_dtype", output_dtype) or A.dtype
    B, T, heads, chunk = A.shape
    fields, tables = _problem(B, T, heads, heads, chunk, cu_seqlens)
    fields |= _dtype("output_dtype", A.new_empty(0, dtype=output_dtype))
    return run("solve_tril", fields, {"A": A} | tables)["Tinv"]


def recompute_w_u_fwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    A: Tensor,
    g: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """w = A (beta 2^g k) [B, T, HV, K] and u = A (beta v) [B, T, HV, V], where ``A`` [B, T, HV, BT] is what
    ``solve_tril`` gives."""
    _rank("k", k, 4)
    _rank("v", v, 4)
    _rank("A", A, 4)
    fields, tables = _problem(
        *k.shape[:3], v.shape[2], A.shape[-1], cu_seqlens, g, K=k.shape[3], V=v.shape[3]
    )
    fields |= _dtype("k", k) | {"beta_dtype": dtype_name("beta", beta)}
    given = {"k": k, "v": v, "beta": beta, "Tinv": A, "G": _natural(g)} | tables
    made = run("recompute_w_u", fields, given)
    return made["w"], made["u"].to(v.dtype)


def chunk_gated_delta_rule_fwd_h(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state scan: h [B, NT, HV, K, V], the state that enters each chunk, v_new = u - w h like ``u``
    [B, T, HV, V], and the final state [N, HV, K, V] in float32. With ``state_v_first`` states are V by K.

    ``gk`` [B, T, HV, K] in ``g``'s place is a decay per key channel; ``k`` is then decayed to the chunk's
    end and has HV heads. Of a packed batch on a GPU the number of chunks NT is read from ``cu_seqlens_cpu``,
    else the GPU is waited for.
    """
    _rank("k", k, 4)
    _rank("u", u, 4)
    if g is not None and gk is not None:
        raise ValueError("gk is given beside g; one of them must be None")
    B, T, H, K = k.shape
    HV, V = u.shape[2:]
    chunk_size = integer("chunk_size", chunk_size)
    fields, tables = _problem(B, T, H, HV, chunk_size, cu_seqlens, g, K=K, V=V)
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        _boundaries("cu_seqlens_cpu", cu_seqlens_cpu, T, len(cu_seqlens))
    fields |= _dtype("k", k) | {
        "initial_state": initial_state is not None,
        "output_final_state": bool(output_final_state),
        "state_v_first": bool(state_v_first),
    }
    if initial_state is not None:
        fields["state_dtype"] = dtype_name("initial_state", initial_state)
    if gk is not None:
        fields |= {"op": "kda", "g_dtype": "fp32"}
    given = {"k": k, "kg": k, "w": w, "u": u, "G": _natural(g), "Gk": _natural(gk)}
    made = run("fwd_h", fields, given | {"initial_state": initial_state} | tables)
    h = made["h"].view(B, -1, HV, K, V)[:, : _chunks(T, chunk_size, cu_seqlens, cu_seqlens_cpu)]
    if state_v_first:
        h = h.transpose(-1, -2).contiguous()
    v_new = made["v_new"].to(u.dtype) if save_new_value else None
    return h, v_new, made.get("final_state")


def chunk_fwd_o(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """The output [B, T, HV, V]: scale (2^g q h + tril(2^(g_r - g_s) q k^T) v), where ``v`` is the v_new and
    ``h`` the states of ``chunk_gated_delta_rule_fwd_h``. ``scale`` is 1 / sqrt(K) where it is None."""
    _refuse(g_gamma=g_gamma is not None)
    _rank("q", q, 4)
    _rank("v", v, 4)
    _rank("h", h, 5)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    chunk_size = integer("chunk_size", chunk_size)
    fields, tables = _problem(B, T, H, HV, chunk_size, cu_seqlens, g, K=K, V=V)
    fields |= _dtype("q", q)
    if scale is not None:
        fields["scale"] = real("scale", scale)
    if state_v_first:
        h = h.transpose(-1, -2)
    slots = T // chunk_size + int(fields["N"]) if cu_seqlens is not None else h.shape[1]
    if h.shape[1] < slots:  # those that no chunk uses are not read
        h = torch.cat([h, h.new_empty(B, slots - h.shape[1], *h.shape[2:])], 1)
    given = {"q": q, "k": k, "v_new": v, "h": h.flatten(0, 1), "G": _natural(g)} | tables
    return run("fwd_o", fields, given)["o"].to(v.dtype)


def l2norm_fwd(
    x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """y = x / sqrt(sum(x^2) + 1e-6) over the last dimension, and the reciprocal root in float32."""
    if eps != 1e-6:
        raise ValueError(f"eps is {eps}; it must be 1e-6")
    _output("output_dtype", output_dtype)
    dtype_name("x", x)
    if x.dim() == 0:
        raise ValueError("x has 0 dimensions; it must have 1 or more")
    rows = x.reshape(1, -1, 1, x.shape[-1])
    fields, _ = _problem(1, rows.shape[1], 1, 1, None, None, K=x.shape[-1])
    fields |= _dtype("x", x)
    y = run("l2norm", fields, {"x": rows})["y"]
    rstd = run("l2norm_rstd", fields, {"x": rows})["rstd"]
    return y.view(x.shape).to(output_dtype or x.dtype), rstd.view(x.shape[:-1])


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, D], the convolution of each channel of ``x`` [B, T, D] with its W taps, 2 to 4 of them.

        y[t] = act(bias + weight[:, 0] x[t - W + 1] + ... + weight[:, W - 1] x[t])

    weight: [D, W], of x's dtype or float32; bias: [D], as it. activation: "silu" (or "swish"), or None.
    initial_state: the rows before each sequence [N, D, W - 1], zeros where it is None. Also the final state
    of that shape, where it is asked for. D must be a product of two numbers, one of them 3 or more, the
    other at most 256.
    """
    fields, given = _convolution(x, weight, bias, activation, initial_state, cu_seqlens)
    fields["output_conv_state"] = bool(output_final_state)
    y, made = _run_of_heads("short_conv", fields, given, x, "{}_conv")
    return y, made.get("final_conv_state")


def short_conv_bwd(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = "silu",
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias (in float32) and initial_state from ``dy``, that of y in ``short_conv``."""
    fields, given = _convolution(x, weight, bias, activation, initial_state, cu_seqlens)
    fields["pass"] = "backward"
    if tensor("dy", dy).shape != x.shape:
        raise ValueError(f"dy has shape {list(dy.shape)}; it must be {list(x.shape)}, as x")
    given |= {f"d{name}_conv": part for name, part in _heads(dy).items()}
    dx, parts = _run_of_heads("short_conv_bwd", fields, given, x, "d{}")
    sums = run("layer_sum", fields, dict(parts))
    return dx, sums["dconv_weight"], sums.get("dconv_bias"), parts.get("dinitial_conv_state")


def output_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 1e-6, activation: str = "silu"
) -> Tensor:
    """y = act(gate) weight x / sqrt(mean(x^2) + eps) over the last dimension, of x's shape and dtype.

    gate: as x. weight: of that dimension, in float32; None: ones. activation: "silu" (or "swish") or
    "sigmoid". eps: above 0.
    """
    fields, given = _norm(x, gate, weight, eps, activation)
    return run("output_norm", fields, given, public=_LAYER)["o"].view(x.shape)


def output_norm_bwd(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "silu",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate and weight (in float32) from ``dy``, that of y in ``output_norm``."""
    fields, given = _norm(x, gate, weight, eps, activation)
    fields["pass"] = "backward"
    if tensor("dy", dy).shape != x.shape:
        raise ValueError(f"dy has shape {list(dy.shape)}; it must be {list(x.shape)}, as x")
    given |= {"do": dy.reshape(given["o_raw"].shape)}
    parts = run("output_norm_bwd", fields, given, public=_LAYER)
    weight_sum = run("layer_sum", fields, dict(parts))["dnorm_weight"]
    return parts["do_raw"].view(x.shape), parts["dnorm_gate"].view(x.shape), weight_sum


_MOST_CHANNELS = 256  # of a head of keys
_LAYER = PUBLIC | {
    "conv_weight": "weight", "conv_bias": "bias", "initial_conv_state": "initial_state", "norm_gate": "gate",
    "norm_weight": "weight", "o_raw": "x", "do": "dy", "dq_conv": "dy", "dk_conv": "dy", "dv_conv": "dy",
}  # fmt: skip


@functools.lru_cache
def _width(D: int) -> int:
    """The channels of a head, of D in three or more heads."""
    sizes = [w for w in range(1, min(D // 3, _MOST_CHANNELS) + 1) if D % w == 0]
    if not sizes:
        raise ValueError(f"x has {D} channels; it must have 3 or more")
    return max(sizes, key=lambda size: (math.gcd(size, 8), size))  # what a thread loads at once divides a head


def _heads(x: Tensor) -> dict[str, Tensor]:
    """Rows [B, T, D] as the stage has them: a head of q, one of k, and those of v, side by side."""
    w = _width(x.shape[2])
    heads = x.unflatten(2, (-1, w))
    return {"q": heads[:, :, :1], "k": heads[:, :, 1:2], "v": heads[:, :, 2:]}


def _run_of_heads(
    stage: str, fields: dict[str, object], given: dict[str, Tensor | None], x: Tensor, name: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Its outputs of that name for each of q, k and v, side by side as x, and all of its outputs."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = {name.format(part): rows for part, rows in _heads(y).items()}
    if _width(x.shape[2]) * y.itemsize % 16 == 0:
        return y, run(stage, fields, given, heads, _LAYER)
    made = run(stage, fields, given, public=_LAYER)  # rows of a tensor lie 16 bytes or a multiple of it apart
    return torch.cat([made[part].flatten(2) for part in heads], 2), made


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[dict[str, object], dict[str, Tensor | None]]:
    """The fields of a problem with such a convolution, and what its stages take."""
    _rank("x", x, 3)
    _rank("weight", weight, 2)
    parts = _heads(x)
    heads, width = parts["v"].shape[2:]
    fields, _ = _problem(*x.shape[:2], 1, heads, None, None, K=width, V=width)
    if cu_seqlens is not None:
        _boundaries("cu_seqlens", cu_seqlens, x.shape[1])
        kind = dtype_name("cu_seqlens", cu_seqlens, INTEGERS)
        fields |= {"packed": True, "N": len(cu_seqlens) - 1, "seqlens_dtype": kind}
    fields |= _dtype("x", x) | {
        "short_conv": weight.shape[1],
        "conv_activation": "none" if activation is None else "silu" if activation == "swish" else activation,
        "conv_dtype": dtype_name("weight", weight),
        "has_conv_bias": bias is not None,
        "initial_conv_state": initial_state is not None,
    }
    given = {"x": x, **parts, "conv_weight": weight, "conv_bias": bias, "initial_conv_state": initial_state}
    return fields, given | {"cu_seqlens": cu_seqlens}


def _norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The fields of a problem with such a norm, and what its stages take."""
    dtype_name("x", x)
    if x.dim() == 0:
        raise ValueError("x has 0 dimensions; it must have 1 or more")
    if tensor("gate", gate).shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(
            f"gate has shape {list(gate.shape)} and dtype {gate.dtype}; it must be as x, {list(x.shape)} and {x.dtype}"
        )
    width = x.shape[-1]
    rows = x.reshape(1, -1, 1, width)
    fields, _ = _problem(1, rows.shape[1], 1, 1, None, None, V=width)
    fields |= _dtype("x", x) | {
        "output_norm": "silu" if activation == "swish" else activation, "norm_eps": real("eps", eps),
    }  # fmt: skip
    weight = torch.ones(width, device=x.device) if weight is None else weight
    return fields, {"o_raw": rows, "norm_gate": gate.reshape(rows.shape), "norm_weight": weight}


def _problem(
    B: int,
    T: int,
    H: int,
    HV: int,
    chunk_size: int | None,
    cu_seqlens: Tensor | None,
    g: Tensor | None = None,
    *,
    K: int = _ANY,
    V: int = _ANY,
) -> tuple[dict[str, object], dict[str, Tensor | None]]:
    """The fields of a problem with such a stage, and the tables of its packed batch."""
    fields: dict[str, object] = {
        "op": "delta_rule" if g is None else "gated_delta_rule",
        "B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V, "N": B, "packed": cu_seqlens is not None,
    }  # fmt: skip
    if chunk_size is not None:
        fields["chunk_size"] = chunk_size
    if cu_seqlens is None:
        return fields, {}
    _boundaries("cu_seqlens", cu_seqlens, T)
    fields |= {"N": len(cu_seqlens) - 1, "seqlens_dtype": dtype_name("cu_seqlens", cu_seqlens, INTEGERS)}
    return fields, dict(run("chunk_index", fields, {"cu_seqlens": cu_seqlens}))


def _dtype(name: str, x: Tensor) -> dict[str, str]:
    """That of the problem's inputs."""
    return dict.fromkeys(("dtype", "beta_dtype"), dtype_name(name, x))


def _boundaries(name: str, bounds: Tensor, T: int, entries: int | None = None) -> None:
    """Refuses boundaries that a stage would read or write beyond its tensors by. Those on a GPU are not read,
    which would wait for it."""
    _rank(name, bounds, 1, INTEGERS)
    if len(bounds) == 0 or (entries is not None and len(bounds) != entries):
        wanted = entries or "N + 1, of N sequences"
        raise ValueError(f"{name} has {len(bounds)} entries; it must have {wanted}")
    if bounds.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {bounds.device}; it must be on the CPU or a CUDA device")
    if bounds.device.type == "cuda":
        return
    if bounds[0] != 0:
        raise ValueError(f"{name}[0] is {bounds[0]}; it must be 0")
    if bounds[-1] != T:
        raise ValueError(f"{name}[{len(bounds) - 1}] is {bounds[-1]}; it must be T = {T}, the packed tokens")
    falls = (bounds[1:] < bounds[:-1]).nonzero()
    if len(falls):
        at = int(falls[0]) + 1
        raise ValueError(f"{name}[{at}] is {bounds[at]}; it must be at least the {bounds[at - 1]} before it")


def _natural(g: Tensor | None) -> Tensor | None:
    """Log decays in base 2 as natural ones; what is no such tensor is left for run() to refuse."""
    return g.float() * math.log(2) if isinstance(g, Tensor) and g.dtype.is_floating_point else g


def _chunks(T: int, chunk_size: int, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> int:
    """The chunks of each row of a batch."""
    if cu_seqlens is None:
        return -(-T // chunk_size)
    bounds = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return int(((bounds[1:] - bounds[:-1] + chunk_size - 1) // chunk_size).sum())


def _output(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """dtype, which must be one of real numbers, or None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{name} is {dtype}; it must be a floating-point torch.dtype")
    return dtype


def _rank(name: str, x: Tensor, rank: int, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    dtype_name(name, x, dtypes)
    if x.dim() != rank:
        raise ValueError(f"{name} has {x.dim()} dimensions; it must have {rank}")


def _refuse(**given: bool) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} is given; this stage has no use for it")
