"""A serving engine in small: continuous batching of a hybrid model whose states live in pages of one pool.

Requests come and go; each step prefills those that were admitted, in one packed batch, and decodes a token
of all others, in a batch that is padded to a fixed size. The model is a small random one of Qwen3-Next's
kind: three layers of the gated delta rule with a short convolution, then one of attention. The tokens are
those that each request gets alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wyvern

VOCABULARY, WIDTH, LAYERS = 97, 64, 4
H, HV, D = 2, 4, 32  # key heads, value heads, their dimension
ROW = (2 * H + HV) * D  # q, k and v of a token, side by side
CONVOLVED, STATE = 3, HV * D * D  # inputs that the convolution looks back on; elements of a state
SLOTS, LONGEST, BATCH = 5, 96, 6  # slot 0 is the padding's


class Pool:
    """What is kept of requests: pages of states and of convolutions' inputs, and keys and values."""

    def __init__(self, device: str) -> None:
        # NaN: whatever a request before left here, none may see.
        page = (SLOTS, LAYERS - 1, STATE + CONVOLVED * ROW)
        self.memory = torch.full(page, torch.nan, device=device)
        self.keys_values = torch.full((SLOTS, LONGEST, 2, H, D), torch.nan, device=device)

    def states(self, layer: int) -> Tensor:
        return self.memory[:, layer, :STATE].unflatten(1, (HV, D, D))

    def inputs(self, layer: int) -> Tensor:
        return self.memory[:, layer, STATE:].unflatten(1, (CONVOLVED, ROW))


@dataclass
class Step:
    """Tokens that are computed together: of prompts one after the other, or one of each request."""

    slots: Tensor  # [N], 0 for padding
    ends: list[int]  # [N + 1]
    starts: list[int]  # [N], how many tokens of each came before
    is_prefill: bool


class DeltaLayer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, ROW + HV * D + 2 * HV, bias=False)
        self.convolution = nn.Parameter(torch.randn(CONVOLVED + 1, ROW) * 0.5)
        self.A_log = nn.Parameter(torch.rand(HV))
        self.dt_bias = nn.Parameter(torch.rand(HV))
        self.out_norm = nn.RMSNorm(D)
        self.out = nn.Linear(HV * D, WIDTH, bias=False)

    def forward(self, x: Tensor, step: Step, pool: Pool) -> Tensor:
        rows, z, b, a = self.project(self.norm(x)).split([ROW, HV * D, HV, HV], dim=-1)
        rows = self.convolve(rows, step, pool.inputs(self.index))
        # [1, T, ...] of a packed batch, [N, 1, ...] of a token each: views either way.
        at = 0 if step.is_prefill else 1
        q, k, v = rows.unsqueeze(at).split([H * D, H * D, HV * D], dim=-1)
        given = {
            "q": q.unflatten(-1, (H, D)), "k": k.unflatten(-1, (H, D)), "v": v.unflatten(-1, (HV, D)),
            "g": a.unsqueeze(at), "beta": b.unsqueeze(at), "A_log": self.A_log, "dt_bias": self.dt_bias,
            "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
            "state": pool.states(self.index), "state_index": step.slots, "state_v_first": True,
            "null_slots": "non-positive",
        }  # fmt: skip
        if step.is_prefill:
            ends = torch.tensor(step.ends, device=x.device)
            seen = torch.tensor(step.starts, device=x.device) > 0
            o, _ = wyvern.ops.chunk_gated_delta_rule(**given, cu_seqlens=ends, has_initial_state=seen)
        else:
            o, _ = wyvern.ops.fused_recurrent_gated_delta_rule(**given)
        o = self.out_norm(o.view(-1, HV, D)) * F.silu(z.unflatten(-1, (HV, D)))
        return x + self.out(o.flatten(1))

    def convolve(self, rows: Tensor, step: Step, inputs: Tensor) -> Tensor:
        """The causal convolution of each sequence, whose last inputs are kept for its next tokens."""
        parts = []
        for n, slot in enumerate(step.slots.tolist()):
            own = rows[step.ends[n] : step.ends[n + 1]]
            before = inputs[slot] if step.starts[n] and slot else torch.zeros_like(inputs[0])
            together = torch.cat([before, own])
            parts.append((together.unfold(0, CONVOLVED + 1, 1) * self.convolution.T).sum(-1))
            if slot:
                inputs[slot] = together[-CONVOLVED:]
        return F.silu(torch.cat(parts))


class AttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * H * D, bias=False)
        self.out = nn.Linear(H * D, WIDTH, bias=False)

    def forward(self, x: Tensor, step: Step, pool: Pool) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, H, D)).unbind(1)
        parts = []
        for n, slot in enumerate(step.slots.tolist()):
            own, first = slice(step.ends[n], step.ends[n + 1]), step.starts[n]
            last = first + own.stop - own.start
            if not slot:
                parts.append(torch.zeros_like(q[own]))
                continue
            pool.keys_values[slot, first:last] = torch.stack([k[own], v[own]], dim=1)
            keys, values = pool.keys_values[slot, :last].transpose(0, 2).unbind(1)
            places = torch.arange(last, device=x.device)
            mask = places <= places[first:, None]
            parts.append(
                F.scaled_dot_product_attention(q[own].transpose(0, 1), keys, values, mask).transpose(0, 1)
            )
        return x + self.out(torch.cat(parts).flatten(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([*(DeltaLayer(i) for i in range(LAYERS - 1)), AttentionLayer()])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, step: Step, pool: Pool) -> list[int]:
        """The most probable next token of each sequence."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, step, pool)
        last = torch.tensor(step.ends[1:], device=x.device) - 1
        return self.head(self.norm(x[last])).argmax(-1).tolist()


@dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to generate
    arrives: int = 0  # the step at which it is known
    tokens: list[int] = field(default_factory=list)
    slot: int = 0


def serve(model: Model, requests: list[Request], device: str) -> int:
    """Generates every request's tokens; how many steps that took."""
    pool, free = Pool(device), list(range(1, SLOTS))
    waiting, running, steps = list(requests), [], 0

    def run(batch: list[Request], is_prefill: bool) -> None:
        given = [r.prompt if is_prefill else r.tokens[-1:] for r in batch]
        slots, starts = [r.slot for r in batch], [0] * len(batch)
        if not is_prefill:  # of one shape whatever the number of requests, as a captured graph is
            starts = [len(r.prompt) + len(r.tokens) - 1 for r in batch]
            more = BATCH - len(batch)
            given, slots, starts = given + [[0]] * more, slots + [0] * more, starts + [0] * more
        ends = torch.tensor([0, *map(len, given)]).cumsum(0).tolist()
        step = Step(torch.tensor(slots, device=device), ends, starts, is_prefill)
        tokens = torch.tensor([token for one in given for token in one], device=device)
        for request, token in zip(batch, model(tokens, step, pool), strict=False):
            request.tokens.append(token)

    while waiting or running:
        admitted = [r for r in waiting if r.arrives <= steps][: len(free)]
        waiting = [r for r in waiting if r not in admitted]
        for request in admitted:
            request.slot = free.pop(0)
        if running:
            run(running, is_prefill=False)
        if admitted:
            run(admitted, is_prefill=True)
        running += admitted
        for request in [r for r in running if len(r.tokens) == r.wanted]:
            running.remove(request)
            free.append(request.slot)
        steps += 1
    return steps


def some_requests() -> list[Request]:
    """More than there are slots, of prompts and answers of many lengths."""
    lengths = [
        (70, 9, 0),
        (5, 14, 0),
        (33, 6, 1),
        (64, 11, 1),
        (1, 20, 2),
        (17, 8, 4),
        (80, 5, 9),
        (2, 12, 12),
    ]
    return [
        Request(torch.randint(VOCABULARY, (prompt,)).tolist(), wanted, arrives)
        for prompt, wanted, arrives in lengths
    ]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device).eval()
    requests = some_requests()
    with torch.no_grad():
        steps = serve(model, requests, device)
        alone = [Request(r.prompt, r.wanted) for r in requests]
        steps_alone = sum(serve(model, [request], device) for request in alone)
    for request, other in zip(requests, alone, strict=True):
        print(f"{len(request.prompt)} tokens, then {request.tokens}")
        assert request.tokens == other.tokens, f"alone {other.tokens}"
    assert all(len(set(r.tokens)) > 1 for r in requests), "a model that repeats one token shows nothing"
    print(f"{len(requests)} requests in {steps} steps; one after the other {steps_alone}")


if __name__ == "__main__":
    main()
