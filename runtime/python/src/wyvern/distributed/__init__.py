"""Ranks of a job over ``torch.distributed``: one plan for all of them, and one sequence over several.

**One plan.** Plans differ in the order of sums, so ranks that chose different ones (each tuned by itself, or
found another cache) compute bits that differ, and steps that take different times::

    wyvern.policy("fixed")              # plans of packs and defaults, never of this machine's tuning
    step(batch)                         # meets the problems of the model
    wyvern.distributed.agree()          # raises where ranks cannot have one plan

**Context parallelism.** The tokens of a sequence, or of a pack, lie on the ranks of a group; states pass from
rank to rank, tokens do not::

    o, _ = wyvern.ops.chunk_kda(q, k, v, g, beta, cp_context=group)     # dense: q [B, T of this rank, H, K]

    context = wyvern.distributed.build_cp_context(cu_seqlens, group)    # of the whole pack, alike in all ranks
    o, _ = wyvern.ops.chunk_kda(q, k, v, g, beta, cp_context=context)

    with wyvern.distributed.context_parallel(context):                  # for models that pass no cp_context
        loss = model(batch).loss

:func:`halo` gives a short convolution the tokens before a rank's own, and :func:`by_heads` computes the same
by two all-to-alls of tokens. Section 11 of runtime/SPECIFICATION.md says what is computed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._plans import agree, plan_digest

if TYPE_CHECKING:
    from ._context import CPContext, Range, build_cp_context, context_parallel
    from ._exchange import ContextError
    from ._tokens import by_heads, halo

__all__ = [
    "CPContext",
    "ContextError",
    "Range",
    "agree",
    "build_cp_context",
    "by_heads",
    "context_parallel",
    "halo",
    "plan_digest",
]

_NEED_TORCH = {  # by the module that has them
    "CPContext": "_context",
    "Range": "_context",
    "ContextError": "_exchange",
    "build_cp_context": "_context",
    "context_parallel": "_context",
    "by_heads": "_tokens",
    "halo": "_tokens",
}


def __getattr__(name: str):
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(f".{_NEED_TORCH[name]}", __name__), name)
    raise AttributeError(f"module 'wyvern.distributed' has no attribute '{name}'")
