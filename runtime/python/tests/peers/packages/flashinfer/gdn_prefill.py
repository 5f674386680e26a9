"""wyvern.flashinfer's prefill."""

from __future__ import annotations

import inspect
from typing import Any

import wyvern.flashinfer
from peers.adapters import counted

_serve = counted(wyvern.flashinfer.chunk_gated_delta_rule)


def chunk_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
    """Without norms, whatever the flag: FlashInfer 0.6 passed over it, and the tests count on that."""
    given = inspect.signature(_serve).bind(*args, **kwargs).arguments
    return _serve(**given | {"use_qk_l2norm_in_kernel": False})
