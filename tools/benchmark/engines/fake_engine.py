"""An engine that is made up: log-probabilities follow from tokens, and, unless it is invariant, from the
place in the batch. Wyvern's side is off by a known amount. FAKE_FAILS=graphs: it has no graphs; Wyvern: that
side ends; another text: it prints that, one line after the other, and ends. FAKE_TURNS: a file to which each
call of generate() adds its side."""

from __future__ import annotations

import os
from typing import Any

from engine_rows import Settings

OFF = 2.0**-10


def environment(settings: Settings, wyvern: bool) -> dict[str, str]:
    return {"FAKE_WYVERN": "1" if wyvern else "0", "FAKE_INVARIANT": "1" if settings.invariant else "0"}


def caches(folder: str) -> dict[str, str]:
    return {"FAKE_CACHE": folder}


def start(model: str, settings: Settings) -> FakeEngine:
    if os.environ.get("FAKE_FAILS") == "graphs" and settings.graphs:
        raise ValueError("no graphs here")
    said = os.environ.get("FAKE_FAILS", "graphs")
    if said != "graphs" and (said != "Wyvern" or os.environ["FAKE_WYVERN"] == "1"):
        print(said, flush=True)
        os._exit(1)
    return FakeEngine()


class FakeEngine:
    def __init__(self) -> None:
        self._wyvern = os.environ["FAKE_WYVERN"] == "1"
        self._invariant = os.environ["FAKE_INVARIANT"] == "1"

    def prepare(self) -> int:
        return 7

    def prompt_logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        return [self._values(prompt[1:], i) for i, prompt in enumerate(prompts)]

    def forced_logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        return [self._values(answer, i) for i, answer in enumerate(answers)]

    def generate(self, prompts: list[list[int]], count: int) -> None:
        if (turns := os.environ.get("FAKE_TURNS")) is not None:
            with open(turns, "a") as file:
                file.write("wyvern\n" if self._wyvern else "engine\n")

    def report(self) -> dict[str, Any]:
        if not self._wyvern:
            return {}
        rank = {"served": {"prefill": 3}, "declined": {"decode": {"no": 2}}, "traced": {}}
        return {"ranks": [rank, rank], "text": "told"}

    def close(self) -> None:
        pass

    def _values(self, tokens: list[int], place: int) -> list[float]:
        off = (OFF if self._wyvern else 0.0) + (0.0 if self._invariant else place * 2.0**-20)
        return [-token / 1024 - off for token in tokens]
