"""A small hybrid language model of flash-linear-attention's layers learns to write, byte by byte.

    language_model.py --backend wyvern --json wyvern.json
    language_model.py --backend fla --json fla.json
    tools/benchmark/losses --plot losses.png wyvern.json fla.json   (of Wyvern's repository)

GatedDeltaNet and KimiDeltaAttention by turns, each before a gated MLP. Both runs start from the same weights
and see the same batches, so that their losses differ by rounding only. The text is what --text names, else
the language reference that Python has with it.

wyvern: FLA's layers as they are after wyvern.fla.enable(). A call that Wyvern declined, or that did not get
to it, ends the run with exit status 1.

fla: FLA's own kernels, where they run on this device and their gradients agree with its reference in PyTorch;
else that reference. For the gated delta rule on Hopper with Triton 3.4 to 3.7.0 FLA has no
backward pass that is right without TileLang, and says so (its issue 640).

On a CPU, FLA's convolutions and norms, which are Triton's, are replaced by PyTorch's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from fla.layers import GatedDeltaNet, KimiDeltaAttention
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
    from fla.ops.kda.gate import naive_kda_gate
    from fla.ops.kda.naive import naive_recurrent_kda
except ImportError as missing:
    sys.exit(f"this needs flash-linear-attention: pip install flash-linear-attention ({missing})")

import wyvern.fla

WARM_UP = 20  # steps until the learning rate is there
MOST_APART = 0.05  # FLA's kernels in bfloat16 from its reference: relative error of a layer's gradient


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    model = LanguageModel(options.width, options.head_dim, options.layers)
    model.to(device)
    if device.type == "cpu":
        for block in model.blocks:
            without_triton(block.mixer)
    text = torch.tensor(list(read(options.text)), dtype=torch.uint8)
    computed_by: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if options.backend == "wyvern":
            wyvern.fla.report(reset=True)
            stack.enter_context(wyvern.fla.enable())
        else:
            computed_by = references_where_needed(model, stack)
        run = train(model, text, options)
    counted = wyvern.fla.report()
    report = {
        "backend": options.backend,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": options.batch,
        "length": options.length,
        "tokens_per_second": run.tokens_per_second,
        "computed_by": computed_by,
        "served": counted.served if options.backend == "wyvern" else {},
        "declined": counted.declined if options.backend == "wyvern" else {},
        "losses": run.losses,
    }
    print(f"{options.backend}: loss {run.losses[-1]:.4f}, {run.tokens_per_second:.0f} tokens/s")
    for name, what in computed_by.items():
        print(f"{name} by {what}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.backend == "wyvern":
        print(counted)
        wanted = {name: options.steps * model.count(layer) for name, layer in LAYERS.items()}
        wanted = {name: calls for name, calls in wanted.items() if calls}
        if counted.declined or counted.served != wanted:
            print(f"a silent fallback: the layers called {wanted}", file=sys.stderr)
            return 1
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small language model of FLA's layers.")
    parser.add_argument("--backend", choices=("wyvern", "fla"), default="wyvern")
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's language reference")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, metavar="SEQUENCES")
    parser.add_argument("--length", type=int, default=1024, metavar="BYTES")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every step's loss, speed, counts of calls")
    return parser.parse_args()


def read(file: Path | None) -> bytes:
    if file is not None:
        return file.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


class LanguageModel(nn.Module):
    """Bytes to the logits of the next ones: [B, T] to [B, T, 256]."""

    def __init__(self, width: int, head_dim: int, layers: int) -> None:
        super().__init__()
        kinds = list(LAYERS.values())
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(kinds[i % len(kinds)], width, head_dim, i) for i in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def count(self, layer: type[nn.Module]) -> int:
        return sum(isinstance(block.mixer, layer) for block in self.blocks)


class Block(nn.Module):
    """One of FLA's layers, then a gated MLP, each beside a residual connection."""

    def __init__(self, layer: Callable[..., nn.Module], width: int, head_dim: int, index: int) -> None:
        super().__init__()
        heads = width // head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mixer = layer(hidden_size=width, head_dim=head_dim, num_heads=heads, expand_v=1, layer_idx=index)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))[0]
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@dataclass
class Run:
    losses: list[float]  # nats a byte, of every step
    tokens_per_second: float  # without the first steps, in which kernels are compiled


def train(model: LanguageModel, text: Tensor, options: argparse.Namespace) -> Run:
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARM_UP))
    window = torch.arange(options.length + 1)
    untimed = min(WARM_UP, options.steps // 2)
    losses, start = [], 0.0
    for step in range(options.steps):
        if step == untimed:
            start = now(device)
        at = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
        tokens = text[at + window].to(device).long()
        with mixed_precision(device):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    seconds = now(device) - start
    tokens_timed = (options.steps - untimed) * options.batch * options.length
    return Run(torch.stack(losses).tolist(), tokens_timed / seconds)


def mixed_precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# FLA's operators, by the layers that call them.
LAYERS = {"chunk_gated_delta_rule": GatedDeltaNet, "chunk_kda": KimiDeltaAttention}


def unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def in_float32(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """With the results of FLA's operator: o in v's dtype, and no state."""

    def call(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, None]:
        with torch.autocast(q.device.type, enabled=False):
            return function(unit(q), unit(k), v.float(), **others).to(v.dtype), None

    return call


@in_float32
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **_: Any
) -> Tensor:
    g = naive_gdn_gate(g, A_log, dt_bias)
    return naive_chunk_gated_delta_rule(q, k, v, g=g, beta=beta.float().sigmoid())[0]


@in_float32
def kda(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, **_: Any
) -> Tensor:
    # Token by token: exp of the differences within a chunk of strong gates leaves float32.
    g = naive_kda_gate(g, A_log, dt_bias)
    return naive_recurrent_kda(q, k, v, g=g, beta=beta.float().sigmoid())[0]


REFERENCES = {"chunk_gated_delta_rule": gated_delta_rule, "chunk_kda": kda}


def references_where_needed(model: LanguageModel, stack: contextlib.ExitStack) -> dict[str, str]:
    """Puts FLA's references in the places of those of its operators that are not right here.

    Returns what computes each operator.
    """
    computed_by = {}
    for name, kind in LAYERS.items():
        layer = next((block.mixer for block in model.blocks if isinstance(block.mixer, kind)), None)
        if layer is None:
            continue
        module = importlib.import_module(kind.__module__)
        reference = mock.patch.object(module, name, REFERENCES[name])
        with reference:
            right = gradient(layer)
        try:
            apart = ((gradient(layer) - right).norm() / right.norm()).item()
            why = f"FLA's kernels are {apart:.1e} apart from it"
        except Exception as error:  # Triton's without a GPU are of many classes
            apart, why = float("inf"), f"FLA's kernels: {str(error).splitlines()[0]}"
        if apart < MOST_APART:
            computed_by[name] = f"FLA's kernels ({apart:.1e} apart from its reference)"
        else:
            stack.enter_context(reference)
            computed_by[name] = f"FLA's reference in PyTorch ({why})"
    return computed_by


def gradient(layer: nn.Module) -> Tensor:
    """All of a layer's gradients at a random input, one after the other."""
    parameter = next(layer.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 128, layer.hidden_size, generator=generator).to(parameter.device)
    with mixed_precision(parameter.device):
        o = layer(x)[0]
    gradients = torch.autograd.grad(o.float().square().sum(), list(layer.parameters()))
    return torch.cat([one.float().flatten() for one in gradients])


def without_triton(layer: nn.Module) -> None:
    """Puts the same in PyTorch in the places of FLA's convolutions and norm."""
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        setattr(layer, name, Convolution(getattr(layer, name)))
    layer.o_norm = GatedNorm(layer.o_norm)


class Convolution(nn.Module):
    def __init__(self, own: nn.Conv1d) -> None:
        super().__init__()
        self.own = own
        self.backend = id(self)  # FLA computes three of one backend by one call of its kernel

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        y = nn.Conv1d.forward(self.own, x.mT)[..., : x.shape[1]]
        return F.silu(y.mT), None


class GatedNorm(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        act = torch.sigmoid if self.own.activation == "sigmoid" else F.silu
        return F.rms_norm(x, x.shape[-1:], self.own.weight, self.own.eps) * act(gate)


if __name__ == "__main__":
    sys.exit(main())
