"""What is measured of an engine: log-probabilities of forced tokens, throughput, batch invariance."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from local_models import FIRST_WORD, VOCABULARY

Tokens = list[int]

LENGTHS = (1, 5, 63, 64, 65, 200, 700, 1025)  # of prompts
SHARED, TAILS = 1500, (1, 17, 300)  # a common beginning, and what differs after it
FORCED = 48  # tokens behind each prompt
THROUGHPUT = {  # sequences, tokens of each prompt, tokens of each answer
    "prefill": (32, 4096, 1),
    "long prefill": (4, 30000, 1),
    "decode 64": (64, 64, 256),
    "decode 1": (1, 64, 256),
}
TARGET = 2500  # tokens of the prompt whose bits are compared
BATCHES = (1, 2, 7, 16, 33, 64)
POSITIONS = 9  # of the target in a batch, at most


class Engine(Protocol):
    """What a file engine_NAME.py starts."""

    def prompt_logprobs(self, prompts: list[Tokens]) -> list[list[float]]:
        """Of each token of each prompt but the first, given those before it."""

    def forced_logprobs(self, prompts: list[Tokens], answers: list[Tokens]) -> list[list[float]]:
        """Of each token of each answer, which is generated token by token; all answers of one length.

        With drafts an answer may repeat its first token.
        """

    def generate(self, prompts: list[Tokens], count: int) -> None:
        """So many tokens behind each prompt, whichever they are."""

    def report(self) -> dict[str, object]:
        """Calls served, traced and declined."""


def _words(count: int, seed: int) -> Tokens:
    source = random.Random(seed)
    return [source.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]


def logprobs(engine: Engine) -> dict[str, list[list[float]]]:
    """Of prompts, and of answers twice: the second time prompts may be in the engine's cache."""
    prompts = [_words(count, seed) for seed, count in enumerate(LENGTHS)]
    prompts += [_words(SHARED, 100) + _words(count, 101 + count) for count in TAILS]
    prompts.append(_words(6, 200) * 30)  # n-grams that drafts can follow
    answers = [_words(FORCED, 300 + i) for i in range(len(prompts))]
    return {
        "prompts": engine.prompt_logprobs(prompts),
        "answers": [one for _ in range(2) for one in engine.forced_logprobs(prompts, answers)],
    }


class Turns:
    """Processes that measure in turn, of a folder that they share: the only one, if there is none."""

    def __init__(self, folder: str | None = None, own: int = 0, count: int = 1) -> None:
        self._folder, self._own, self._count = Path(folder) if folder else None, own, count

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Waits for its turn: the next of those that have not ended(), behind the one that had the last."""
        if self._folder is None:
            yield
            return
        while self._next() != self._own:
            time.sleep(0.002)
        yield
        (self._folder / f"turn-{len(self._taken()):06}-{self._own}").touch()

    def _taken(self) -> list[str]:
        assert self._folder is not None
        return sorted(file.name for file in self._folder.glob("turn-*"))

    def _next(self) -> int:
        assert self._folder is not None
        ended = {file.name for file in self._folder.glob("ended-*")}
        taken = self._taken()
        last = int(taken[-1].rsplit("-", 1)[1]) if taken else -1
        order = ((last + 1 + i) % self._count for i in range(self._count))
        return next((own for own in order if f"ended-{own}" not in ended), self._own)

    @staticmethod
    def ended(folder: str, own: int) -> None:
        """Says, for a process that may be lost, that nobody waits for it any more."""
        (Path(folder) / f"ended-{own}").touch()


RUNS = 5  # that are timed


def speed(engine: Engine, longest: int, turns: Turns) -> dict[str, float]:
    """Tokens a second, of prompts or of answers: the best of RUNS after one that warms up."""
    found = {}
    for name, (sequences, prompt, answer) in THROUGHPUT.items():
        if prompt + answer > longest:
            continue
        best = float("inf")
        for run in range(1 + RUNS):
            prompts = [_words(prompt, 1000 * run + i) for i in range(sequences)]
            with turns.turn():
                start = time.perf_counter()
                engine.generate(prompts, answer)
                taken = time.perf_counter() - start
            if run:
                best = min(best, taken)
        found[name] = sequences * (prompt if answer == 1 else answer) / best
    return found


PROFILED = (64, 64, 33)  # sequences, tokens of each prompt, tokens of each answer


def profile(engine: Engine, turns: Turns) -> str:
    """Where the time of decoding goes: PyTorch's tables of the GPU's kernels, and of the host's operations."""
    sequences, prompt, answer = PROFILED
    prompts = [_words(prompt, 5000 + i) for i in range(sequences)]
    with turns.turn():
        return _profiled(engine, prompts, answer)


def _profiled(engine: Engine, prompts: list[Tokens], answer: int) -> str:
    import torch

    engine.generate(prompts, answer)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiled:
        start = time.perf_counter()
        engine.generate(prompts, answer)
        taken = time.perf_counter() - start
    found = profiled.key_averages()
    order = ["self_cpu_time_total"]
    if torch.cuda.is_available():
        order.insert(0, "self_device_time_total")
    return "\n".join(
        [
            f"{len(prompts)} sequences, {answer} tokens: {taken:.3f} s",
            *(found.table(sort_by=by, row_limit=40, max_name_column_width=90) for by in order),
        ]
    )


def positions(batch: int) -> list[int]:
    """Places of the target: the first, the last, and others between, as evenly as they go."""
    count = min(batch, POSITIONS)
    return sorted({round(i * (batch - 1) / max(count - 1, 1)) for i in range(count)})


def invariance(engine: Engine) -> dict[str, object]:
    """One request alone and among others, wherever it stands among them.

    alone: its log-probabilities, of the prompt and of the answer. cases: of each batch and position how many
    of the prompt's and of the answer's have other bits than alone, and the largest difference. again: the
    same of a second run alone, which finds its prompt in the cache where there is one.
    """
    target, answer = _words(TARGET, 7), _words(FORCED, 8)
    alone = _target(engine, [], target, answer, 0)
    cases = {}
    for batch in BATCHES:
        for place in positions(batch):
            others = [_words(1 + (37 * i * i + 11 * batch) % 600, 9000 + 100 * batch + i)
                      for i in range(batch - 1)]  # fmt: skip
            cases[f"{place + 1} of {batch}"] = differences(
                alone, _target(engine, others, target, answer, place)
            )
    again = differences(alone, _target(engine, [], target, answer, 0))
    return {"alone": alone, "again": again, "cases": cases}


def _target(
    engine: Engine, others: list[Tokens], target: Tokens, answer: Tokens, place: int
) -> dict[str, list[float]]:
    prompts = [*others[:place], target, *others[place:]]
    answers = [answer if i == place else _words(len(answer), 500 + i) for i in range(len(prompts))]
    return {
        "answer": engine.forced_logprobs(prompts, answers)[place],
        "prompt": engine.prompt_logprobs(prompts)[place],
    }


def differences(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, float]:
    """Of how many log-probabilities of each part the bits differ, and the largest difference."""
    apart = {
        part: [abs(a - b) for a, b in zip(one[part], other[part], strict=True)]
        for part in ("prompt", "answer")
    }
    return {
        "prompt": sum(x != 0 for x in apart["prompt"]),
        "answer": sum(x != 0 for x in apart["answer"]),
        "largest": max(max(x) for x in apart.values()),
    }
