"""Trains a hybrid model whose sequences lie on several ranks: context parallelism beside FSDP2.

    torchrun --standalone --nproc-per-node 4 runtime/python/examples/context_parallel.py
    torchrun --standalone --nproc-per-node 4 runtime/python/examples/context_parallel.py --steps 50 --compare

64k tokens on GPUs, few on CPUs (over gloo), and on one process without torchrun. Of four layers three are Kimi
Delta Attention, whose states pass from rank to rank (``cp_context=``); the last is attention without positions,
whose tokens go to the ranks of their heads and back (``by_heads``). The short convolutions read the tokens before a
rank's own (``halo``). FSDP2 shards parameters over the same ranks and averages their gradients, which makes of every
rank's mean loss the mean over the sequence.

Rank 0 first computes the whole alone: how far the first step's loss and gradients are apart is printed, then the
loss, tokens per second and memory. With ``--compare`` rank 0 then trains alone, by chunks of 32 and of 64 tokens, from
the same parameters on the same text, and prints how far each step's losses are apart.

**Megatron-LM.** In ``GatedDeltaNet.forward`` (``megatron/core/ssm``) leave out the two all-to-alls, cp to hp and hp
to cp, and the slices of A_log and dt_bias; heads then need not divide by the group. Of a batch in zigzag, T tokens
on each of P ranks (``x`` is what the convolution reads, [B, T, D])::

    context = build_cp_context(group=pg_collection.cp, tokens=[T] * P, layout="zigzag")
    before = halo(x, context, conv.kernel_size[0] - 1)         # [2 * B, W - 1, D]: of both pieces of a rank
    pieces = torch.cat([before, torch.cat(x.chunk(2, dim=1))], dim=1)
    x = torch.cat(F.conv1d(pieces.mT, conv.weight, conv.bias, groups=D).mT.chunk(2), dim=1)
    o, _ = wyvern.ops.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import resource
import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import wyvern
from wyvern.distributed import CPContext, build_cp_context, by_heads, halo

TAPS = 4  # of the short convolutions


@dataclass
class Sizes:
    tokens: int = 64 * 1024  # of the sequence; the number of ranks divides it, and the heads
    width: int = 1024
    head_dim: int = 128
    layers: int = 4
    steps: int = 20
    chunk_size: int | None = None  # of the operators; None: the plans'
    dtype: torch.dtype = torch.float32  # of the parameters; products on GPUs are in bfloat16


SMALL = Sizes(tokens=256, width=64, head_dim=16, steps=3)  # for CPUs


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)  # nats a byte, of every step
    loss_apart: float = 0.0  # of the first step, from one process's: by its size
    gradients_apart: float = 0.0  # the largest of all parameters, norms of differences by norms
    tokens_per_second: float = 0.0  # without the first step
    bytes_of_rank: int = 0


class DeltaAttention(nn.Module):
    """Kimi Delta Attention behind a short convolution."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, head_dim = sizes.width, sizes.head_dim
        self.head_dim, self.chunk_size, heads = head_dim, sizes.chunk_size, width // head_dim
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.convolution = nn.Parameter(torch.randn(3 * width, 1, TAPS) / TAPS**0.5)
        self.decay = nn.Linear(width, width, bias=False)
        self.rate = nn.Linear(width, heads, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.A_log = nn.Parameter(torch.rand(heads))
        self.dt_bias = nn.Parameter(torch.full([width], -3.0))
        self.norm = nn.RMSNorm(head_dim)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: CPContext | None) -> Tensor:
        rows = self.project(x)
        if context is None:
            before = rows.new_zeros(x.shape[0], TAPS - 1, rows.shape[2])
        else:
            before = halo(rows, context, TAPS - 1)
        taps = self.convolution.to(rows.dtype)
        rows = F.conv1d(torch.cat([before, rows], 1).mT, taps, groups=rows.shape[2])
        q, k, v = F.silu(rows).mT.contiguous().unflatten(2, (3, -1, self.head_dim)).unbind(2)
        o, _ = wyvern.ops.chunk_kda(
            q, k, v, self.decay(x).unflatten(2, (-1, self.head_dim)), self.rate(x),
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias, cp_context=context,
            chunk_size=self.chunk_size,
        )  # fmt: skip
        return self.out(self.norm(o).flatten(2) * torch.sigmoid(self.gate(x)))


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """Causal, of whole sequences [B, T, heads, head_dim]."""
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return (o.transpose(1, 2),)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.head_dim = sizes.width, sizes.head_dim
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, context: CPContext | None) -> Tensor:
        whole = attention if context is None else partial(by_heads, attention, group=context.group)
        (o,) = whole(*self.project(x).unflatten(2, (3, -1, self.head_dim)).unbind(2))
        return self.out(o.flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mixer = mixer
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: CPContext | None) -> Tensor:
        x = x + self.mixer(self.norms[0](x), context)
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Bytes [B, T] of one rank to the logits of the next ones, [B, T, 256]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            Block((Attention if i % 4 == 3 else DeltaAttention)(sizes), width)
            for i in range(sizes.layers)
        )
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256, bias=False))

    def forward(self, tokens: Tensor, context: CPContext | None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, context, use_reentrant=False)
        return self.head(x)


def loss_of(model: nn.Module, bytes_: Tensor, context: CPContext | None) -> Tensor:
    """The mean over this rank's tokens of bytes [B, T + 1]."""
    device = bytes_.device.type
    with torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
        logits = model(bytes_[:, :-1], context)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact.flatten(0, 1), bytes_[:, 1:].flatten())


@cache
def text() -> Tensor:
    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def batch(sizes: Sizes, device: torch.device, step: int, start: int = 0, tokens: int | None = None) -> Tensor:
    """Bytes of a step's sequence from start on, and the one behind them."""
    start += (step * sizes.tokens) % (len(text()) - sizes.tokens - 1)
    return text()[None, start : start + (tokens or sizes.tokens) + 1].to(device).long()


def model_of(sizes: Sizes, device: torch.device) -> Model:
    """The same parameters at every call."""
    torch.manual_seed(0)
    return Model(sizes).to(device, sizes.dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))


def train_alone(sizes: Sizes, device: torch.device) -> list[float]:
    """The losses of one process that has all tokens."""
    model, losses = model_of(sizes, device), []
    optimizer = optimizer_of(model)
    for step in range(sizes.steps):
        loss = loss_of(model, batch(sizes, device, step), None)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(sizes: Sizes, device: torch.device, losses: list[float]) -> list[tuple[float, float, float]]:
    """Of each step the losses of the ranks and of one process by chunks of 32 and of 64 tokens."""
    alone = [train_alone(replace(sizes, chunk_size=chunk), device) for chunk in (32, 64)]
    return list(zip(losses, *alone, strict=True))


def print_comparison(found: list[tuple[float, float, float]]) -> None:
    print("| step | ranks | chunks of 32 | chunks of 64 | ranks - 64 | 32 - 64 |")
    print("| --- | --- | --- | --- | --- | --- |")
    for step, (ours, first, second) in enumerate(found):
        print(f"| {step} | {ours:.5f} | {first:.5f} | {second:.5f} | {ours - second:+.1e} | {first - second:+.1e} |")
    apart = max(abs(ours - second) for ours, _, second in found)
    chunks = max(abs(first - second) for _, first, second in found)
    print(f"ranks and one process at most {apart:.1e} apart, chunks of 32 and of 64 at most {chunks:.1e}")


def train(sizes: Sizes, device: torch.device, group: dist.ProcessGroup | None = None) -> Run:
    """Every rank of the group calls it; by default of the whole job."""
    group = dist.group.WORLD if group is None else group
    rank, P = dist.get_rank(group), dist.get_world_size(group)
    mesh = dist.DeviceMesh.from_group(group, device.type)
    context = build_cp_context(group=mesh)
    share, run = sizes.tokens // P, Run()
    model = model_of(sizes, device)
    alone: list[Tensor] = []
    if rank == 0:
        whole = copy.deepcopy(model)
        loss = loss_of(whole, batch(sizes, device, 0), None)
        loss.backward()
        alone = [loss.detach(), *(x.grad for x in whole.parameters())]
        del whole
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = optimizer_of(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = 0.0
    for step in range(sizes.steps):
        loss = loss_of(model, batch(sizes, device, step, rank * share, share), context)
        loss.backward()
        mean = loss.detach() / P
        dist.all_reduce(mean, group=group)
        run.losses.append(mean.item())
        if step == 0:
            gradients = [x.grad.full_tensor() for x in model.parameters()]
            if rank == 0:
                run.loss_apart = abs(mean.item() / alone[0].item() - 1)
                run.gradients_apart = max(
                    ((x - y).norm() / y.norm()).item() for x, y in zip(gradients, alone[1:], strict=True)
                )
            del gradients, alone
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            began = now(device)
    run.tokens_per_second = (sizes.steps - 1) * sizes.tokens / max(now(device) - began, 1e-9)
    if device.type == "cuda":
        run.bytes_of_rank = torch.cuda.max_memory_allocated()
    else:
        run.bytes_of_rank = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return run


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a model whose sequences lie on several ranks.")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--compare", action="store_true", help="then train in one process, by chunks of 32 and of 64")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:  # of torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        sizes = SMALL if device.type == "cpu" else Sizes()
        sizes = replace(sizes, steps=arguments.steps or sizes.steps)
        run = train(sizes, device)
        if dist.get_rank() == 0:
            print(f"{sizes.tokens} tokens on {dist.get_world_size()} ranks, {sizes.steps} steps")
            print(f"beside one process: loss {run.loss_apart:.1e}, gradients {run.gradients_apart:.1e} apart")
            print(f"loss {run.losses[0]:.4f} to {run.losses[-1]:.4f}")
            print(f"{run.tokens_per_second:,.0f} tokens/s, {run.bytes_of_rank / 2**30:.2f} GiB on rank 0")
            if arguments.compare:
                print_comparison(compare(sizes, device, run.losses))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
