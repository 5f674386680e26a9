"""A serving engine in small, over small random models of Qwen3-Next's and Kimi-Linear's kind.

* Continuous batching: requests come and go; each step decodes all that run, in a batch of a fixed shape, and
  prefills those that were admitted, in a packed one.
* Pages: states (with the inputs that the short convolution looks back on) and keys and values live in pages
  of two pools, with a count of the users of each page.
* Prefix reuse: a prefill leaves the states after every ``PAGE`` tokens of a prompt in pages of their own. A
  later prompt that begins alike starts from the longest of them, and attends to the same pages. When pages
  are short those go that were used least recently.
* Speculative decoding: a lookup in the context drafts tokens, which one step verifies. Each request has a
  page for the state after each of a step's tokens; the next step starts from that of the last accepted one.

With any of these the tokens are those that each request gets alone and without: ``batch_invariant`` gives the
operators' results the same bits, and what PyTorch's products round differently in another batch is far less
than what parts two tokens' logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wyvern import ops

VOCABULARY, WIDTH, DELTA_LAYERS = 97, 64, 3
HV, D, HEADS = 4, 32, 2  # value heads and their dimension; heads of attention
CONVOLVED, STATE = 3, HV * D * D  # inputs that the convolution looks back on; elements of a state
PAGE = 64  # tokens between two states that are kept, and of a page of keys and values
BATCH, LONGEST = 4, 320  # sequences decoded together; tokens of one
KEPT = BATCH + 1  # states of prefixes that there is room for: what a batch starts from is not evicted
DRAFTS = 3


@dataclass(frozen=True)
class Kind:
    """What is particular to a model."""

    name: str
    key_heads: int
    decays: int  # of a value head
    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    activation: Callable[[Tensor], Tensor]

    @property
    def row(self) -> int:
        """q, k and v of a token, side by side."""
        return (2 * self.key_heads + HV) * D


KINDS = [
    Kind("Qwen3-Next", 2, 1, ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, F.silu),
    Kind("Kimi-Linear", HV, D, ops.chunk_kda, ops.fused_recurrent_kda, torch.sigmoid),
]


class Memory:
    """The pages; the first of each pool is the padding's."""

    def __init__(self, kind: Kind, state_pages: int, pages: int, device: str) -> None:
        # NaN: whatever a request before left here, none may see.
        page = (DELTA_LAYERS, STATE + CONVOLVED * kind.row)
        self.pages = torch.full((state_pages, *page), torch.nan, device=device)
        self.keys_values = torch.full((pages * PAGE, 2, HEADS, D), torch.nan, device=device)

    def states(self, layer: int) -> Tensor:
        return self.pages[:, layer, :STATE].unflatten(1, (HV, D, D))

    def inputs(self, layer: int) -> Tensor:
        return self.pages[:, layer, STATE:].unflatten(1, (CONVOLVED, -1))


@dataclass
class Step:
    """Tokens that are computed together, one sequence after the other."""

    is_prefill: bool
    ends: list[int]  # [N + 1]
    starts: list[int]  # [N], how many tokens of each came before
    sources: list[int]  # [N], the page of the state that each goes on from
    leaves: list[list[tuple[int, int]]]  # of each: after so many tokens its state goes to this page
    accepted: list[int]  # [N], of a decoding step: the source is the page of so many tokens of the last
    places: list[Tensor]  # of each: where keys and values of all its tokens are


class DeltaLayer(nn.Module):
    def __init__(self, kind: Kind, index: int) -> None:
        super().__init__()
        self.kind, self.index = kind, index
        self.norm = nn.RMSNorm(WIDTH)
        self.widths = [kind.row, HV * D, HV, HV * kind.decays]
        self.project = nn.Linear(WIDTH, sum(self.widths), bias=False)
        self.convolution = nn.Parameter(torch.randn(CONVOLVED + 1, kind.row) * 0.5)
        self.A_log = nn.Parameter(torch.rand(HV))
        self.dt_bias = nn.Parameter(torch.rand(HV * kind.decays))
        self.out_norm = nn.RMSNorm(D)
        self.out = nn.Linear(HV * D, WIDTH, bias=False)

    def forward(self, x: Tensor, step: Step, memory: Memory) -> Tensor:
        kind, pool = self.kind, memory.states(self.index)
        rows, z, b, a = self.project(self.norm(x)).split(self.widths, dim=-1)
        rows = self.convolve(rows, step, memory.inputs(self.index))
        # [1, T, ...] of a packed batch, [N, M, ...] of as many tokens each: views either way.
        N = 1 if step.is_prefill else len(step.starts)
        q, k, v = (
            part.unflatten(-1, (-1, D)).unflatten(0, (N, -1))
            for part in rows.split([kind.key_heads * D, kind.key_heads * D, HV * D], dim=-1)
        )
        g = a.unflatten(-1, (HV, D)) if kind.decays > 1 else a
        given = {
            "q": q, "k": k, "v": v, "g": g.unflatten(0, (N, -1)), "beta": b.unflatten(0, (N, -1)),
            "A_log": self.A_log, "dt_bias": self.dt_bias, "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True,
            "state": pool, "null_slots": "non-positive", "batch_invariant": True,
        }  # fmt: skip

        def tensor(values: list[Any]) -> Tensor:
            return torch.tensor(values, device=x.device)

        if step.is_prefill:
            kept = [page for leaves in step.leaves for _, page in leaves[:-1]]
            states = pool.new_empty(len(kept), *pool.shape[1:])
            o, _ = kind.prefill(
                **given, cu_seqlens=tensor(step.ends), state_index=tensor(step.sources),
                output_state_index=tensor([leaves[-1][1] for leaves in step.leaves]),
                has_initial_state=tensor(step.starts) > 0,
                **{"checkpoint_every": PAGE, "checkpoints": states} if kept else {},
            )  # fmt: skip
            pool[kept] = states
        else:
            columns = [[page for _, page in leaves] for leaves in step.leaves]
            o, _ = kind.decode(**given, state_index=tensor(columns), num_accepted=tensor(step.accepted))
        o = self.out_norm(o.reshape(-1, HV, D)) * kind.activation(z.unflatten(-1, (HV, D)))
        return x + self.out(o.flatten(1))

    def convolve(self, rows: Tensor, step: Step, inputs: Tensor) -> Tensor:
        """The causal convolution of each sequence; its last inputs go where states do."""
        parts = []
        for n, source in enumerate(step.sources):
            before = inputs[source] if step.starts[n] else torch.zeros_like(inputs[0])
            together = torch.cat([before, rows[step.ends[n] : step.ends[n + 1]]])
            parts.append((together.unfold(0, CONVOLVED + 1, 1) * self.convolution.T).sum(-1))
            for tokens, page in step.leaves[n]:
                inputs[page] = together[tokens : tokens + CONVOLVED]
        return F.silu(torch.cat(parts))


class AttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * HEADS * D, bias=False)
        self.out = nn.Linear(HEADS * D, WIDTH, bias=False)

    def forward(self, x: Tensor, step: Step, memory: Memory) -> Tensor:
        q, k, v = self.project(self.norm(x)).unflatten(-1, (3, HEADS, D)).unbind(1)
        parts = []
        for n, places in enumerate(step.places):
            own = slice(step.ends[n], step.ends[n + 1])
            memory.keys_values[places[step.starts[n] :]] = torch.stack([k[own], v[own]], dim=1)
            keys, values = memory.keys_values[places].transpose(0, 2).unbind(1)
            order = torch.arange(len(places), device=x.device)
            mask = order <= order[step.starts[n] :, None]
            o = F.scaled_dot_product_attention(q[own].transpose(0, 1), keys, values, mask)
            parts.append(o.transpose(0, 1))
        return x + self.out(torch.cat(parts).flatten(1))


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([*(DeltaLayer(kind, i) for i in range(DELTA_LAYERS)), AttentionLayer()])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, step: Step, memory: Memory) -> list[int]:
        """The most probable token after each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, step, memory)
        return self.head(self.norm(x)).argmax(-1).tolist()


class Pages:
    """The numbers of a pool's pages that are free, and how many use each of the others."""

    def __init__(self, count: int) -> None:
        self.free = list(range(1, count))
        self.users = [0] * count

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        self.share(taken)
        return taken

    def share(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page]:
                self.free.append(page)


@dataclass
class Request:
    prompt: list[int]
    wanted: int  # tokens to generate
    arrives: int = 0  # the step at which it is known
    tokens: list[int] = field(default_factory=list)
    reused: int = 0  # tokens of the prompt that are not computed again
    source: int = 0  # the page of the state after them
    columns: list[int] = field(default_factory=list)  # the pages of states after each token of a step
    accepted: int = 1  # so many tokens of the last step
    pages: list[int] = field(default_factory=list)  # of keys and values


@dataclass
class Prefix:
    state: int  # the page of the state after its last token
    pages: list[int]  # of keys and values


@dataclass
class Counts:
    steps: int = 0
    reused: int = 0  # tokens of prompts
    evicted: int = 0  # prefixes
    accepted: int = 0  # drafts
    rejected: int = 0


def draft(tokens: list[int], count: int) -> list[int]:
    """What came after the last token where it came before, over and over; else the last token."""
    last = len(tokens) - 1
    before = next((i for i in range(last - 1, -1, -1) if tokens[i] == tokens[last]), last - 1)
    return (tokens[before + 1 :] * count)[:count]


class Engine:
    def __init__(self, model: Model, device: str, *, reuse: bool, drafts: int) -> None:
        self.model, self.device, self.reuse, self.drafts = model, device, reuse, drafts
        state_pages, pages = 1 + BATCH * (1 + drafts) + KEPT, 1 + (BATCH + 1) * LONGEST // PAGE
        self.memory = Memory(model.kind, state_pages, pages, device)
        self.states, self.pages = Pages(state_pages), Pages(pages)
        self.prefixes: dict[tuple[int, ...], Prefix] = {}  # the least recently used first
        self.counts = Counts()

    def serve(self, requests: list[Request]) -> Counts:
        """Generates every request's tokens."""
        waiting, running = list(requests), []
        while waiting or running:
            known = [r for r in waiting if r.arrives <= self.counts.steps]
            admitted = known[: BATCH - len(running)]
            waiting = [r for r in waiting if r not in admitted]
            for request in admitted:
                self.admit(request)
            if running:
                self.decode(running)
            if admitted:
                self.prefill(admitted)
            running += admitted
            for request in [r for r in running if len(r.tokens) == r.wanted]:
                running.remove(request)
                self.states.give_back(request.columns)
                self.pages.give_back(request.pages)
            self.counts.steps += 1
        return self.counts

    def admit(self, request: Request) -> None:
        """Finds the longest prefix that is kept, which then is not evicted, and takes pages."""
        prompt = request.prompt
        for length in range((len(prompt) - 1) // PAGE * PAGE, 0, -PAGE):
            if prefix := self.prefixes.pop(tuple(prompt[:length]), None):
                self.prefixes[tuple(prompt[:length])] = prefix
                request.reused, request.source = length, prefix.state
                self.states.share([prefix.state])
                self.pages.share(prefix.pages)
                request.pages = list(prefix.pages)
                break
        longest = len(prompt) + request.wanted + self.drafts
        request.pages += self.take(self.pages, -(-longest // PAGE) - len(request.pages))
        request.columns = self.take(self.states, 1 + self.drafts)
        self.counts.reused += request.reused

    def take(self, pages: Pages, count: int) -> list[int]:
        """So many pages, for which prefixes are evicted; fewer where those of running requests are left."""
        while len(pages.free) < count and self.prefixes:
            prefix = self.prefixes.pop(next(iter(self.prefixes)))
            self.states.give_back([prefix.state])
            self.pages.give_back(prefix.pages)
            self.counts.evicted += 1
        return pages.take(count)

    def prefill(self, batch: list[Request]) -> None:
        leaves = []
        for request, kept in zip(batch, self.keep(batch), strict=True):
            own = (len(request.prompt) - request.reused, request.columns[0])
            leaves.append([*((end - request.reused, page) for end, page in kept), own])
        given = [r.prompt[r.reused :] for r in batch]
        sources = [r.source or r.columns[0] for r in batch]
        predicted = self.run(batch, given, [r.reused for r in batch], sources, leaves, is_prefill=True)
        for request, tokens in zip(batch, predicted, strict=True):
            request.tokens.append(tokens[-1])
            if request.source:
                self.states.give_back([request.source])

    def keep(self, batch: list[Request]) -> list[list[tuple[int, int]]]:
        """Of each request the lengths of prefixes whose states this prefill makes, and their pages, 0: none."""
        lengths = [range(r.reused + PAGE, len(r.prompt) + 1, PAGE) if self.reuse else range(0) for r in batch]
        new = {
            tuple(request.prompt[:length]): (request, length)
            for request, own in zip(batch, lengths, strict=True)
            for length in own
            if tuple(request.prompt[:length]) not in self.prefixes
        }
        kept: dict[tuple[int, int], int] = {}
        pages = self.take(self.states, len(new))
        for page, (key, (request, length)) in zip(pages, new.items(), strict=False):
            self.prefixes[key] = Prefix(page, request.pages[: length // PAGE])
            self.pages.share(self.prefixes[key].pages)
            kept[id(request), length] = page
        return [
            [(length, kept.get((id(request), length), 0)) for length in own]
            for request, own in zip(batch, lengths, strict=True)
        ]

    def decode(self, batch: list[Request]) -> None:
        """A token of each, and the drafts that are right; of one shape, as a captured graph is."""
        given = [[r.tokens[-1], *draft(r.prompt + r.tokens, self.drafts)] for r in batch]
        starts = [len(r.prompt) + len(r.tokens) - 1 for r in batch]
        sources = [r.columns[r.accepted - 1] for r in batch]
        leaves = [list(enumerate(r.columns, start=1)) for r in batch]
        for request, tokens, predicted in zip(
            batch, given, self.run(batch, given, starts, sources, leaves, is_prefill=False), strict=True
        ):
            right = 0
            while right < self.drafts and tokens[right + 1] == predicted[right]:
                right += 1
            request.accepted = 1 + right
            request.tokens += predicted[: min(1 + right, request.wanted - len(request.tokens))]
            self.counts.accepted += right
            self.counts.rejected += self.drafts - right

    def run(
        self,
        batch: list[Request],
        given: list[list[int]],
        starts: list[int],
        sources: list[int],
        leaves: list[list[tuple[int, int]]],
        is_prefill: bool,
    ) -> list[list[int]]:
        """The most probable token after each of these."""
        tables = [r.pages for r in batch]
        accepted = [r.accepted for r in batch]
        more = 0 if is_prefill else BATCH - len(batch)  # padding
        columns = 1 + self.drafts
        given, tables = given + [[0] * columns] * more, tables + [[0]] * more
        starts, sources, accepted = starts + [0] * more, sources + [0] * more, accepted + [1] * more
        leaves = leaves + [[(t, 0) for t in range(1, columns + 1)]] * more
        ends = torch.tensor([0, *map(len, given)]).cumsum(0).tolist()
        places = []
        for table, tokens, start in zip(tables, given, starts, strict=True):
            order = torch.arange(start + len(tokens))
            places.append((torch.tensor(table)[order // PAGE] * PAGE + order % PAGE).to(self.device))
        step = Step(is_prefill, ends, starts, sources, leaves, accepted, places)
        tokens = torch.tensor([token for one in given for token in one], device=self.device)
        predicted = self.model(tokens, step, self.memory)
        return [predicted[ends[n] : ends[n + 1]] for n in range(len(batch))]


def some_requests() -> list[Request]:
    """More than there are places in the batch; many begin with one of two texts."""
    texts = [torch.randint(VOCABULARY, (length,)).tolist() for length in (150, 200)]
    mixed = [
        # text, how much of it, tokens behind it, tokens to generate, arrival
        (0, 150, 20, 24, 0),
        (1, 0, 5, 30, 0),
        (1, 200, 1, 20, 1),
        (0, 150, 33, 30, 2),
        (0, 128, 0, 12, 4),
        (1, 200, 64, 40, 6),
        (0, 140, 17, 20, 9),
        (1, 192, 2, 26, 12),
        (0, 64, 1, 40, 14),
        (1, 130, 70, 16, 20),
    ]
    return [
        Request(texts[text][:begin] + torch.randint(VOCABULARY, (own,)).tolist(), wanted, arrives)
        for text, begin, own, wanted, arrives in mixed
    ]


def served(
    model: Model, requests: list[Request], device: str, *, reuse: bool, drafts: int
) -> tuple[list[list[int]], Counts]:
    """The tokens of copies of the requests, and what it took."""
    copies = [Request(r.prompt, r.wanted, r.arrives) for r in requests]
    with torch.no_grad():
        counts = Engine(model, device, reuse=reuse, drafts=drafts).serve(copies)
    return [r.tokens for r in copies], counts


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for kind in KINDS:
        model, requests = Model(kind).to(device).eval(), some_requests()
        alone = [
            served(model, [Request(r.prompt, r.wanted)], device, reuse=False, drafts=0) for r in requests
        ]
        tokens, counts = served(model, requests, device, reuse=True, drafts=DRAFTS)
        assert tokens == [one for (one,), _ in alone], "tokens depend on how they were served"
        print(
            f"{kind.name}: {len(requests)} requests; {sum(c.steps for _, c in alone)} steps alone; {counts}"
        )


if __name__ == "__main__":
    main()
