"""A layer between its projections: convolution, operator and gated norm, beside flash-linear-attention's.

    python tools/benchmark/layer.py [--rows REGEX] [--part forward,both] [--peers apart,fla] [--runs 50] [-o layer.json]

Sides, of the same tensors (q, k and v side by side in one, as FLA's layers join them; z, b and the gate):

* `wyvern`: one call of ``wyvern.layers``
* `apart`: Wyvern's operator between FLA's Triton kernels of the convolution and the norm
* `fla`: FLA's operator by its own Triton kernels between them. Its check of Triton's version is lifted (issue
  640): its gradients are timed, and their errors show what it computes.

First the errors: o and the gradients of q, k, v before the convolution, z and the weights of the convolution, of the
first and the last key head with their value heads, against float64 (the convolved rows are rounded, section 12 of the
specification). Then CUDA graphs, timed in turn as `peers` does; `call` is without a graph.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import oracle
from inputs import Inputs
from rows import Row
from timing import Clock, in_turn, paired, summary

import wyvern

TAPS = 4
EPS = 1e-5
BOUND = -5.0  # of kda
ROWS = [
    Row("gdn", 16, 32, 1, 2048),
    Row("gdn", 16, 32, 1, 8192),
    Row("gdn", 16, 32, 4, 4096),
    Row("gdn", 16, 64, 1, 2048),
    Row("gdn", 16, 64, 1, 8192),
    Row("gdn", 16, 64, 4, 4096),
    Row("kda", 64, 64, 1, 8192),
    Row("kda", 64, 64, 4, 4096),
    Row("kda", 96, 96, 1, 8192),
    Row("kda", 96, 96, 4, 4096),
]
SMALL = [Row("gdn", 1, 2, 1, 70, D=16), Row("kda", 2, 2, 3, 40, D=16)]
Region = Callable[..., Tensor]


@dataclass
class Layer:
    """qkv [B,T,C], z [B,T,HV,D], b [B,T,HV], gate [B,T,HV] (kda [B,T,HV,D]), conv_weight [C,W], norm_weight [D],
    A_log [HV], dt_bias as the gate of a token; C = (2 H + HV) D. Rates and the norm's weight are fp32."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    gate: Tensor
    conv_weight: Tensor
    norm_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def widths(self, row: Row) -> list[int]:
        return [row.H * row.D, row.H * row.D, row.HV * row.D]


def make(row: Row, device: str) -> Layer:
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    B, T, HV, D = row.B, row.T, row.HV, row.D
    C = (2 * row.H + HV) * D
    channels = (D,) if row.op == "kda" else ()
    return Layer(
        qkv=normal(B, T, C),
        z=normal(B, T, HV, D),
        b=normal(B, T, HV),
        gate=normal(B, T, HV, *channels),
        conv_weight=0.5 * normal(C, TAPS),
        norm_weight=1 + 0.1 * normal(D, dtype=torch.float32),
        A_log=0.05 * normal(HV, dtype=torch.float32),
        dt_bias=normal(HV, *channels, dtype=torch.float32) - 1,
    )


def wyvern_layer(row: Row, x: Layer) -> Tensor:
    common = dict(
        order="qkv", heads=(row.H, row.HV), dims=(row.D, row.D), z=x.z, b=x.b, conv_weight=x.conv_weight,
        A_log=x.A_log, dt_bias=x.dt_bias, norm_weight=x.norm_weight, norm_eps=EPS,
    )  # fmt: skip
    if row.op == "kda":
        return wyvern.layers.kimi_delta(x.qkv, g=x.gate, lower_bound=BOUND, **common).o
    return wyvern.layers.gated_delta_net(x.qkv, a=x.gate, **common).o


def between_kernels_of_fla(operators: object, options: dict[str, object], row: Row, x: Layer) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    rows, _ = causal_conv1d(x.qkv, x.conv_weight, activation="silu", backend="triton")
    q, k, v = (y.unflatten(-1, (-1, row.D)) for y in rows.split(x.widths(row), -1))
    given = dict(
        beta=x.b, A_log=x.A_log, dt_bias=x.dt_bias.flatten(), use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
    )  # fmt: skip
    if row.op == "kda":
        o, _ = operators.chunk_kda(q, k, v, x.gate, lower_bound=BOUND, safe_gate=True, **given, **options)
    else:
        o, _ = operators.chunk_gated_delta_rule(q, k, v, x.gate, **given, **options)
    activation = "sigmoid" if row.op == "kda" else "swish"
    return rms_norm_gated(o, x.z, x.norm_weight, None, activation, eps=EPS)


class _Fla:
    """FLA's operators by its own Triton kernels."""

    def __init__(self) -> None:
        os.environ |= dict.fromkeys(("FLA_FLASH_QLA", "FLA_FLASH_KDA", "FLA_TILELANG"), "0")
        import fla.ops.common.chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
        self.chunk_gated_delta_rule, self.chunk_kda = chunk_gated_delta_rule, chunk_kda


def sides(peers: list[str]) -> dict[str, Region]:
    found: dict[str, Region] = {"wyvern": wyvern_layer}
    if "apart" in peers:
        found["apart"] = partial(between_kernels_of_fla, wyvern.ops, {})
    if "fla" in peers:
        found["fla"] = partial(between_kernels_of_fla, _Fla(), {"state_v_first": True})
    return found


class _Rounded(torch.autograd.Function):
    """To bfloat16 and back, whose gradient is that of what it was."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class Reference:
    """The region in float64, of some heads. Its inputs by name: q, k, v [B,T,heads,D] before the convolution, z, b, and
    w_q, w_k, w_v [heads,D,W]."""

    def __init__(self, row: Row, x: Layer) -> None:
        self.row, self.x, self.sample = row, x, oracle.Sample(row)
        self.parts = {name: y.detach().double().requires_grad_() for name, y in self.of(x.qkv, x.conv_weight).items()}
        self.parts |= {name: self._heads(getattr(x, name)).detach().double().requires_grad_() for name in ("z", "b")}

    def _heads(self, x: Tensor) -> Tensor:
        return self.sample.of("v", x)

    def of(self, qkv: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """The sampled heads of what is like qkv and the weights: gradients too."""
        row, widths = self.row, self.x.widths(self.row)
        found = {}
        for name, y, w in zip("qkv", qkv.split(widths, -1), weight.split(widths), strict=True):
            heads = self.sample.heads if name != "v" else self.sample.value_heads
            found[name] = self.sample.of(name, y.unflatten(-1, (-1, row.D)))
            found["w_" + name] = w.unflatten(0, (-1, row.D))[heads]
        return found

    def o(self) -> Tensor:
        row, x, part = self.row, self.x, self.parts
        rows = {}
        for name in "qkv":
            y = F.pad(part[name], (0, 0, 0, 0, TAPS - 1, 0))
            y = sum(y[:, i : i + row.T] * part["w_" + name][..., i] for i in range(TAPS))
            rows[name] = _Rounded.apply(F.silu(y))
        for name in "qk":
            rows[name] = rows[name] * torch.rsqrt(rows[name].square().sum(-1, keepdim=True) + 1e-6)
        heads = self.sample.value_heads
        gate = self._heads(x.gate).double() + x.dt_bias[heads].double()
        rate = x.A_log[heads].double().exp()
        if row.op == "kda":
            rows["g"] = BOUND * torch.sigmoid(rate[:, None] * gate)
        else:
            rows["g"] = -rate * F.softplus(gate)
        rows["beta"] = part["b"].sigmoid()
        state = torch.zeros(rows["v"].shape[0], len(heads), row.D, row.D, dtype=torch.float64, device=x.qkv.device)
        o, _ = oracle.outputs(row, Inputs(*[x.qkv] * 6), self.sample, rows | {"initial_state": state})
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + EPS) * x.norm_weight.double()
        return o * (part["z"].sigmoid() if row.op == "kda" else F.silu(part["z"]))


class Measurement:
    def __init__(self, row: Row, part: str, device: str, regions: dict[str, Region]) -> None:
        self.row, self.part, self.regions = row, part, regions
        self.x = make(row, device)
        generator = torch.Generator(device).manual_seed(2)
        self.do = torch.randn(self.x.z.shape, generator=generator, device=device).to(self.x.z.dtype)
        if part == "both":
            for y in vars(self.x).values():
                y.requires_grad_()

    def go(self, region: Region) -> list[Tensor]:
        """o, and the gradients of qkv, z, the convolution's weight and all others."""
        x = self.x
        with torch.set_grad_enabled(self.part == "both"):
            o = region(self.row, x)
        if self.part == "forward":
            return [o]
        leaves = [x.qkv, x.z, x.conv_weight, x.b, x.gate, x.norm_weight, x.A_log, x.dt_bias]
        return [o.detach(), *torch.autograd.grad(o, leaves, self.do)]

    def errors(self) -> dict[str, dict[str, float | None]]:
        reference = Reference(self.row, self.x)
        wanted = {"o": reference.o()}
        if self.part == "both":
            # The weights' gradients are sums over all sequences.
            whole = len(reference.sample.sequences) == self.row.B
            names = [name for name in reference.parts if name != "b" and (whole or not name.startswith("w_"))]
            given = reference.sample.of("o", self.do).double()
            leaves = [reference.parts[name] for name in names]
            found = torch.autograd.grad(wanted["o"], leaves, given)
            wanted |= {f"d{name}": y for name, y in zip(names, found, strict=True)}
        errors = {}
        for side, region in self.regions.items():
            o, *gradients = self.go(region)
            found = {"o": reference.sample.of("o", o)}
            if gradients:
                dqkv, dz, dweight = gradients[:3]
                found |= {f"d{name}": y for name, y in reference.of(dqkv, dweight).items() if f"d{name}" in wanted}
                found["dz"] = reference.sample.of("o", dz)
            errors[side] = {name: oracle.relative(y, wanted[name]) for name, y in found.items()}
        return errors

    def times(self, clock: Clock, runs: int) -> dict[str, dict[str, float]]:
        calls = {name: partial(self.go, region) for name, region in self.regions.items()}
        if clock.gpu:
            calls |= {f"{name} graph": clock.capture(call) for name, call in list(calls.items())}
        samples = in_turn(clock, {name: ((lambda: None), call) for name, call in calls.items()}, runs, 0)
        suffix = " graph" if clock.gpu else ""
        ours = samples["wyvern" + suffix]
        found = {}
        for name in self.regions:
            taken = samples[name + suffix]
            found[name] = summary(taken) | {"call_ms": summary(samples[name])["ms"], "ratio": paired(ours, taken)}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="", help="a regular expression of their names")
    parser.add_argument("--part", default="forward,both", help="forward, or both passes")
    parser.add_argument("--peers", default="", help="of apart, fla")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="rows that a CPU computes in moments")
    parser.add_argument("-o", "--out", type=Path, help="a JSON document")
    options = parser.parse_args()
    clock = Clock(options.device, own_stream=True)
    regions = sides(options.peers.split(","))
    done = []
    for part in options.part.split(","):
        for row in SMALL if options.small else ROWS:
            name = f"layer-{row.op}-{row.H}of{row.HV}-{row.B}x{row.T}{'-both' if part == 'both' else ''}"
            if not re.search(options.rows, name):
                continue
            measurement = Measurement(row, part, options.device, regions)
            errors = measurement.errors()
            found = measurement.times(clock, options.runs)
            for side, times in found.items():
                worst = max(errors[side].values(), key=lambda error: float("inf") if error is None else error)
                done.append(dict(row=name, side=side, errors=errors[side], **times))
                print(
                    f"{name:36} {side:7} {times['ms']:8.4f} ms  call {times['call_ms']:8.4f}  x {times['ratio']:5.2f}"
                    f"  o {errors[side]['o']:.1e}  worst {worst:.1e}",
                    flush=True,
                )
            if options.out:
                device = torch.cuda.get_device_name() if clock.gpu else "cpu"
                options.out.write_text(json.dumps({"device": device, "rows": done}, indent=1))


if __name__ == "__main__":
    main()
