"""FlashInfer's gated delta rule, computed by Wyvern.

    from wyvern.flashinfer import chunk_gated_delta_rule    # and the three functions of flashinfer.gdn_decode

or, in a program that calls FlashInfer::

    import wyvern.flashinfer
    wyvern.flashinfer.enable()
    ...
    print(wyvern.flashinfer.report())      # what was served, and what was not and why

Names, arguments, defaults and layouts are those of FlashInfer 0.7.2, with every option of its kernels but
ReplaySSM's caches. They take what :mod:`wyvern.ops` takes besides: tensors of the CPU, of any GPU, of other
dimensions than 128, and float32. Wrong arguments raise TypeError or ValueError. ``backend`` and
``max_seqlen`` say how FlashInfer computes and are passed over. Like FlashInfer's they have no gradients.

Symbols: B batch, T tokens, N sequences, H query and key heads, HV value heads, K and V their dimensions.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._torch import torch  # before what imports it by its own name
from torch import Tensor

from . import ops
from ._engine import decode
from ._serving import Enabled, Pairs, Report, Switch, replacement

__all__ = [
    "Report",
    "chunk_gated_delta_rule",
    "disable",
    "enable",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "is_enabled",
    "report",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_STATES = (*_FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
_SMALLEST = torch.finfo(torch.float32).tiny  # a decay of 0 has no logarithm
_MODULES = {
    "chunk_gated_delta_rule": "flashinfer.gdn_prefill",
    "gated_delta_rule_decode": "flashinfer.gdn_decode",
    "gated_delta_rule_decode_pretranspose": "flashinfer.gdn_decode",
    "gated_delta_rule_mtp": "flashinfer.gdn_decode",
}


def enable() -> Enabled:
    """Serves these functions of FlashInfer from now on, for all threads, in every module that has them.

    As a context manager it disables at the end what it enabled.

    Raises:
        ImportError: FlashInfer 0.7 is not installed.
    """
    return _switch.enable()


def disable() -> None:
    """Gives FlashInfer its own functions back; counts are kept."""
    _switch.disable()


def is_enabled() -> bool:
    """Whether calls of FlashInfer are served."""
    return _switch.is_enabled()


def report(reset: bool = False) -> Report:
    """Counts of served calls by function, and of declined ones by function and reason.

    reset: count from 0 again.
    """
    return _switch.counts.report(reset)


@torch.no_grad()
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: Tensor | None = None,
    output_state: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    checkpoint_cu_starts: Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: Any = "auto",
    state_indices: Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Prefill of a packed batch, ``flashinfer.chunk_gated_delta_rule``.

    A pool that is given as ``initial_state`` and ``output_state``, and an ``output_state`` without an
    ``initial_state``, are updated in place; other final states are computed in float32 and copied.

    Args:
        q, k: ``[T, H, K]``; q may have a multiple of the heads of k and v, each with a state then.
        v: ``[T, HV, V]``.
        g: ``[T, HV]``, the decay itself, not its logarithm; none by default.
        beta: ``[T, HV]``; ones by default.
        scale: ``K ** -0.5`` where it is None or 0.
        initial_state: ``[N, HV, V, K]`` in float32, float16, bfloat16 or a float8 type, or with
            ``state_indices`` a pool of slots; zeros by default.
        output_final_state: return the final states too.
        cu_seqlens: ``[N + 1]``, of any integer dtype.
        use_qk_l2norm_in_kernel: normalize the rows of q and k; before 0.7 FlashInfer passed over it.
        output: ``[T, HV, V]``, where o goes.
        output_state: where final states go, as ``initial_state``. A sequence without tokens leaves its row.
        state_checkpoints: ``[rows, HV, V, K]``: the states after each ``checkpoint_every_n_tokens`` tokens of
            each sequence, one sequence after the other.
        checkpoint_cu_starts: ``[N + 1]``, where each sequence's rows start: they follow from ``cu_seqlens``,
            and only the count of entries is checked.
        checkpoint_every_n_tokens: a multiple of 64, or 0: none.
        use_cp: True or False fix how FlashInfer splits sequences, and so the bits of a sequence, whatever the
            batch and what follows: ``batch_invariant`` of :mod:`wyvern.ops`. "auto" leaves that to the plan.
        state_indices: ``[N]``, of any integer dtype, no slot twice.

    Returns:
        o ``[T, HV, V]``, or o and the final states: ``output_state``, or ``[N, HV, V, K]`` in float32.
    """
    _check_checkpoints(cu_seqlens, state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is missing; it must be [N + 1], of a packed batch")
    if state_indices is not None and output_final_state and output_state is None:
        raise ValueError(
            "state_indices needs an explicit output_state pool: rows of N states have no such slots"
        )
    heads = max(q.shape[1], v.shape[1])
    if q.shape[1] > v.shape[1]:  # several query heads for a key head: a key head for each
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    if beta is None:
        beta = q.new_ones((q.shape[0], heads))
    cu_seqlens, state_indices = _index(cu_seqlens), _index(state_indices)
    states = _States(
        initial_state,
        output_state if output_final_state else None,
        state_indices,
        cu_seqlens,
        None if state_checkpoints is None else state_checkpoints.dtype,
    )
    gate = {} if g is None else {"g": g.clamp_min(_SMALLEST).log()[None]}
    function = ops.chunk_delta_rule if g is None else ops.chunk_gated_delta_rule
    kept = state_checkpoints
    if kept is not None and (kept.dtype is not states.dtype or not kept.is_contiguous()):
        kept = kept.to(states.dtype, copy=True, memory_format=torch.contiguous_format)
    out = _writable(output, q)
    o, final_state = function(
        q[None],
        k[None],
        v[None],
        beta=beta[None],
        scale=scale or None,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
        batch_invariant=use_cp != "auto",
        checkpoint_every=checkpoint_every_n_tokens or None,
        checkpoints=kept,
        out=None if out is None else out[None],
        output_final_state=output_final_state and not states.in_place,
        **gate,
        **states.options,
    )
    if kept is not state_checkpoints:
        state_checkpoints.copy_(kept)
    o = _put(o[0], output, out)
    if not output_final_state:
        return o
    return o, output_state if states.in_place else states.leave(final_state)


def _writable(output: Tensor | None, q: Tensor) -> Tensor | None:
    """output where an operator writes o to it itself."""
    fits = output is not None and output.dtype is q.dtype and output.is_contiguous()
    return output if fits else None


def _put(o: Tensor, output: Tensor | None, out: Tensor | None) -> Tensor:
    """o in output where there is one; in out it is there already."""
    return o if output is None else output if out is not None else output.copy_(o)


def _check_checkpoints(
    cu_seqlens: Tensor | None, checkpoints: Tensor | None, cu_starts: Tensor | None, every: int
) -> None:
    if every < 0 or every % 64:
        raise ValueError(
            f"checkpoint_every_n_tokens is {every}; it must be a non-negative multiple of the chunk size, 64"
        )
    if every == 0:
        if checkpoints is not None or cu_starts is not None:
            raise ValueError(
                "state_checkpoints and checkpoint_cu_starts must be None where checkpoint_every_n_tokens is 0"
            )
        return
    if checkpoints is None or cu_starts is None:
        raise ValueError(
            "state_checkpoints and checkpoint_cu_starts must both be provided with checkpoint_every_n_tokens"
        )
    if checkpoints.dtype not in _STATES:
        names = ", ".join(map(str, _STATES))
        raise ValueError(f"state_checkpoints must have dtype {names}; it has {checkpoints.dtype}")
    if cu_seqlens is not None and cu_starts.shape != cu_seqlens.shape:
        raise ValueError(
            f"checkpoint_cu_starts has {cu_starts.numel()} elements; it must have the "
            f"{cu_seqlens.numel()} of cu_seqlens"
        )


def _index(x: Tensor | None) -> Tensor | None:
    """x in a dtype that indices have."""
    return x if x is None or x.dtype in (torch.int32, torch.int64) else x.long()


class _States:
    """The states that sequences of a prefill start from, and where they leave theirs.

    kept: the dtype of states inside sequences. None: there are none.
    options: what the operator is given for it. in_place: whether it leaves final states where they belong.
    dtype: what the operator keeps states inside sequences in, of as many bits as kept or more.
    """

    def __init__(
        self,
        initial: Tensor | None,
        output: Tensor | None,
        index: Tensor | None,
        cu_seqlens: Tensor,
        kept: torch.dtype | None,
    ) -> None:
        self._output, self._index, self._cu_seqlens = output, index, cu_seqlens
        N = cu_seqlens.shape[0] - 1
        same = (
            initial is not None
            and output is not None
            and initial.data_ptr() == output.data_ptr()
            and initial.dtype is output.dtype
            and initial.stride() == output.stride()
        )
        self.in_place = (
            output is not None
            and (initial is None or same)
            and _is_pool(output)
            and (kept is None or output.dtype in (kept, torch.float32))
        )
        self.options: dict[str, Any] = {}
        self.dtype = kept if kept in _FLOATS else torch.float32
        if self.in_place:
            pool: Any = output
            self.dtype = pool.dtype
            if initial is None:  # a sequence without tokens leaves its row as it is
                rows = torch.arange(N, device=pool.device) if index is None else index
                self.options["state_index"] = torch.where(self._has_tokens(), rows, -1)
                self.options["has_initial_state"] = rows.new_zeros(N, dtype=torch.bool)
            elif index is not None:
                self.options["state_index"] = index
            self.options["state"] = pool
        elif initial is not None:
            rows = initial if index is None else initial[index]
            if rows.dtype not in _FLOATS or (kept is not None and rows.dtype is not kept):
                rows = rows.float()
            self.options["initial_state"] = rows
            self.dtype = rows.dtype

    def leave(self, final_state: Tensor) -> Tensor:
        """Puts final states where they belong, without waiting for the device; what is returned of them."""
        output, index = self._output, self._index
        if output is None:
            return final_state
        before = output if index is None else output[index]
        has_tokens = self._has_tokens()[:, None, None, None]
        after = torch.where(has_tokens, final_state, before.float()).to(output.dtype)
        if index is None:
            return output.copy_(after)
        output[index] = after
        return output

    def _has_tokens(self) -> Tensor:
        return self._cu_seqlens.diff() > 0


def _is_pool(x: Tensor) -> bool:
    """Whether the operators update x in place as a pool of states."""
    row = x.stride(0) * x.element_size()
    return x.dtype in _FLOATS and x[:1].is_contiguous() and row % 16 == 0 and x.data_ptr() % 16 == 0


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A token of each sequence; states ``[B, HV, K, V]``.

    Args:
        q, k: ``[B, 1, H, K]``.
        v: ``[B, 1, HV, V]``.
        state: updated in place.
        A_log, dt_bias: ``[HV]``, of the gate ``-exp(A_log) softplus(a + dt_bias)``.
        a, b: ``[B, 1, HV]``; the rate is sigmoid(b).
        output: ``[B, 1, HV, V]``, where o goes.

    Returns:
        o and ``state``.
    """
    o = _decode(q, k, v, a, b, A_log, dt_bias, state, scale, use_qk_l2norm, output, state_v_first=False)
    return o, state


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """T tokens of each sequence, at most 16; states ``[B, HV, V, K]``, or slots of a pool.

    As :func:`gated_delta_rule_mtp`, but that rows of o are 0 where the slot is -1, in ``output`` too. No
    slot is written for -1, slot 0 neither: FlashInfer's kernels for bfloat16 pools overwrite that one.

    Args:
        state: ``[B, HV, V, K]``, updated in place; None where ``initial_state`` is given.
        initial_state: a pool ``[slots, HV, V, K]``, updated in place, with ``initial_state_indices`` ``[B]``.

    Returns:
        o and ``state`` or ``initial_state``.
    """
    pool = state if initial_state is None else initial_state
    if pool is None or (initial_state is None) != (initial_state_indices is None):
        raise ValueError("initial_state and initial_state_indices must both be given, or state alone")
    update = not disable_state_update
    options = _drafts(
        q, initial_state_indices, output_state_indices, None, intermediate_states_buffer, update
    )
    return _decode(q, k, v, a, b, A_log, dt_bias, pool, scale, use_qk_l2norm, output, **options), pool


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """T tokens of each sequence, at most 16, that verify drafts, with a pool of states.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        initial_state: ``[slots, HV, V, K]``, updated in place.
        initial_state_indices: ``[B]``, the slot of each sequence; -1: its rows of o are 0, or stay as they
            are in ``output``, and nothing is written for it.
        A_log, dt_bias: ``[HV]``, of the gate ``-exp(A_log) softplus(a + dt_bias)``.
        a, b: ``[B, T, HV]``; the rate is sigmoid(b).
        output: ``[B, T, HV, V]``, where o goes.
        intermediate_states_buffer: ``[B or more, T or more, HV, V, K]`` in the dtype of the pool: the state
            after each token.
        ssm_state_indices: ``[B, T]``, the slot of the state after each token, -1: none. The last one is left
            nowhere else then.
        disable_state_update: the pool is read only; None is true.
        output_state_indices: ``[B]``, the slot of the last state; -1: none.
        cache_replayssm: must be false; no operator keeps ReplaySSM's caches.

    Returns:
        o and ``initial_state``.
    """
    caches = (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    if cache_replayssm or any(x is not None for x in caches):
        raise ValueError("cache_replayssm is true; it must be false: no operator keeps ReplaySSM's caches")
    update = disable_state_update is not None and not disable_state_update
    others = (intermediate_states_buffer, output_state_indices)
    if ssm_state_indices is not None and (not update or any(x is not None for x in others)):
        raise ValueError(
            "ssm_state_indices is given; disable_state_update must be False, and intermediate_states_buffer "
            "and output_state_indices None"
        )
    options = _drafts(
        q, initial_state_indices, output_state_indices, ssm_state_indices, intermediate_states_buffer, update
    )
    o = _decode(q, k, v, a, b, A_log, dt_bias, initial_state, scale, use_qk_l2norm, None, **options)
    if output is None:
        return o, initial_state
    live = (initial_state_indices >= 0)[:, None, None, None]
    return output.copy_(torch.where(live, o, output)), initial_state


def _drafts(
    q: Tensor,
    index: Tensor | None,
    output_index: Tensor | None,
    token_index: Tensor | None,
    buffer: Tensor | None,
    update: bool,
) -> dict[str, Any]:
    """What says to the operator which states of a pool sequences start from, and where they leave which.

    index: None: sequence n is slot n's. token_index: ``[B, T]``, a slot for the state after each token.
    """
    B, T = q.shape[:2]
    options: dict[str, Any] = {}
    index = _index(index)
    if not update:
        options["disable_state_update"] = True
    if update and (token_index is not None or output_index is not None):
        if index is None:
            raise ValueError(
                "output_state_indices is given without initial_state_indices; give both or neither"
            )
        # Behind the columns of the tokens' slots one for the slot to start from.
        if token_index is None:
            none = index.new_full((B, T - 1), -1)
            columns = (none, output_index[:, None].to(index), index[:, None])
        else:
            columns = (token_index.to(index), index[:, None])
        options["state_index"] = torch.cat(columns, 1)
        options["num_accepted"] = index.new_full((B,), T + 1)
    elif index is not None:
        options["state_index"] = index
    if buffer is not None:
        dtype = torch.int32 if index is None else index.dtype
        options["intermediate_states"] = buffer
        options["intermediate_index"] = torch.arange(B, device=q.device, dtype=dtype)
        if buffer.shape[1] != T:  # only packed sequences may have fewer tokens than the buffer
            options["cu_seqlens"] = torch.arange(0, B * T + 1, T, device=q.device)
    return options


@torch.no_grad()
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    pool: Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
    output: Tensor | None,
    **options: Any,
) -> Tensor:
    out, shape = _writable(output, q), v.shape
    if "cu_seqlens" in options:
        q, k, v, a, b = (x.flatten(0, 1)[None] for x in (q, k, v, a, b))
    o = decode(
        q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, kda=False, pool=pool, scale=scale, l2norm=use_qk_l2norm,
        out=out, **options,
    )  # fmt: skip
    return _put(o.view(shape), output, out)


def _find() -> Pairs:
    pairs: Pairs = []
    for name, path in _MODULES.items():
        try:
            original = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"wyvern.flashinfer needs FlashInfer 0.7, whose {path}.{name} was not found: "
                f"pip install -U flashinfer-python ({error})"
            ) from error
        pairs.append((original, replacement(original, globals()[name], _switch.counts, is_enabled)))
    return pairs


_switch = Switch(_find)
