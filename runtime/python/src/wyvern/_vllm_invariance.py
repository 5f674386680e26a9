"""VLLM_BATCH_INVARIANT with delta rules: what vLLM refuses without Wyvern, and how prompts are cut.

The bits of a sequence follow from its own tokens where each call is Wyvern's with ``batch_invariant`` and
a prompt is cut at multiples of 64 tokens, with states that are kept in fp32 (SPECIFICATION.md section 10).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._hooks import after_import

_CHUNK = 64  # a sequence that goes on after a multiple of it has the bits of one that runs through


def is_on() -> bool:
    """Whether vLLM is asked for batch invariance."""
    return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def may_decline() -> str | None:
    """Why a call must not go to vLLM's own function; None where it may."""
    return "vLLM's own function does not keep VLLM_BATCH_INVARIANT's promise" if is_on() else None


def enable(is_enabled: Callable[[], bool]) -> None:
    """Has vLLM accept these models, and cut prompts, while is_enabled() says so."""
    after_import("vllm.v1.attention.backends.gdn_attn", functools.partial(_accept, is_enabled))
    after_import("vllm.v1.core.sched.scheduler", functools.partial(_align, is_enabled))


def _accept(is_enabled: Callable[[], bool], module: ModuleType) -> None:
    backend = module.GDNAttentionBackend  # Kimi's are derived from it
    own = backend.supports_batch_invariance
    if hasattr(own, "__wyvern__"):
        return

    def supports_batch_invariance(kind: Any) -> bool:
        return is_enabled() or own()

    supports_batch_invariance.__wyvern__ = True  # type: ignore[attr-defined]
    backend.supports_batch_invariance = classmethod(supports_batch_invariance)


def _align(is_enabled: Callable[[], bool], module: ModuleType) -> None:
    scheduler = module.Scheduler
    make, split = scheduler.__init__, scheduler._mamba_block_aligned_split
    if hasattr(make, "__wyvern__"):
        return

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._wyvern_aligns = is_on() and is_enabled() and self.has_mamba_layers
        self._wyvern_own_split = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split |= self._wyvern_aligns

    @functools.wraps(split)
    def aligned_split(self: Any, request: Any, tokens: int, *computed: int, **more: int) -> int:
        """How many of the next tokens of a prompt to compute now."""
        if self._wyvern_own_split:
            tokens = split(self, request, tokens, *computed, **more)
        if not self._wyvern_aligns:
            return tokens
        start = request.num_computed_tokens + sum(computed) + sum(more.values())
        last = max(request.num_prompt_tokens, request.num_tokens - 1)
        return tokens_until_cut(start, tokens, last)

    init.__wyvern__ = True  # type: ignore[attr-defined]
    scheduler.__init__, scheduler._mamba_block_aligned_split = init, aligned_split


def tokens_until_cut(start: int, tokens: int, last: int) -> int:
    """tokens, or fewer where a prompt of last tokens would be cut elsewhere than at a multiple of 64, or right
    before its last token, which is then computed as decoding computes it."""
    end = start + tokens
    if not start < end < last:
        return tokens
    end = end // _CHUNK * _CHUNK
    if end == last - 1:
        end -= _CHUNK
    return max(end - start, 0)
