"""Finding faster plans for the operators that a model or a piece of code calls."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ._torch import torch  # before what imports it by its own name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._call import (
    INPUTS,
    UPDATED,
    backward_op,
    backward_summary_op,
    fields_of,
    forward_op,
    resume_op,
    shared_summary_op,
    summary_op,
    update_op,
)
from ._extension import extension
from ._records import Cell, Records

_DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}


class Tuned(Records):
    """What :func:`tune` gives: a list of dictionaries that prints as a table of what was gained.

    Times are milliseconds of one call. Its last line is the sum over all calls that were met.
    """

    def _heading(self) -> tuple[str, ...]:
        return ("problem", "device", "calls", "default ms", "tuned ms", "default / tuned")

    def _lines(self) -> list[tuple[Cell, ...]]:
        lines: list[tuple[Cell, ...]] = [
            (
                one["problem"]["key"],
                one["device"],
                one["calls"],
                one["default_ms"],
                one["tuned_ms"],
                _ratio(one["default_ms"], one["tuned_ms"]),
            )
            for one in self
        ]
        calls = sum(one["calls"] for one in self)
        default, tuned = (
            sum(one["calls"] * one[name] for one in self) for name in ("default_ms", "tuned_ms")
        )
        lines.append(("all calls", "", calls, default, tuned, _ratio(default, tuned)))
        return lines


def _ratio(default: float, tuned: float) -> float | None:
    return default / tuned if tuned > 0 else None


def tune(
    function: Callable[..., Any],
    /,
    *args: Any,
    budget: float = 60.0,
    progress: bool = True,
    **kwargs: Any,
) -> Tuned:
    """Runs a model on a batch, or calls a function, and tunes every problem that it has for Wyvern.

    Args:
        function: a ``torch.nn.Module``, or anything else that can be called: an operator, or what
            calls some, a training step with its backward pass too.
        args, kwargs: the batch. A model takes a single dictionary as keyword arguments, a single
            tuple or list as positional ones, where its ``forward`` has such; a function is called
            with them as they are.
        budget: seconds, about, that each problem takes at most.
        progress: show a bar on stderr.

    A model runs forwards and backwards in training mode (from its ``loss`` where the output has
    one, else from all output tensors), if a parameter or the batch requires a gradient; then in
    evaluation mode forwards without gradients and, where it has a ``generate``, that for two new
    tokens: a prefill and a step of decoding. A ``generate`` that does not take the arguments of
    ``forward`` and ``max_new_tokens`` is left out with a warning. Its parameters, gradients,
    buffers and training mode are afterwards as before.

    A function is called once. Where it gives tensors that require a gradient, the backward pass is run
    and tuned as well; gradients that parameters had are kept as they were. PyTorch's random numbers
    go on, after either, as if nothing had been called.

    Each problem is tuned in a process of its own, on the device of its tensors. What is found is
    stored in the cache and used by this process, and by every later one, under the policy "cached".
    What was tuned before goes on where it stopped.

    Returns:
        For each problem, in the order met, what ``wyvern tune --json`` prints: "operator",
        "problem" with its fields, "tuned_ms" and "default_ms" (milliseconds of a call by the tuned
        and by the default plan), "plan", "complete", "stored" and more; and "calls", how often it
        was met. A list of dictionaries that prints as a table.

    Raises:
        ValueError where no operator of Wyvern was called.
    """
    from ._command import run

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), _Recorder() as recorder:
        if isinstance(function, torch.nn.Module):
            _run_model(function, *_batch(function, args, kwargs))
        else:
            _run_backward(function(*args, **kwargs))
    if not recorder.calls:
        raise ValueError(
            "function called no operator of Wyvern, so there is nothing to tune; models of other "
            "libraries call them after wyvern.fla.enable() or wyvern.transformers.enable()"
        )
    documents = Tuned()
    for (operator, device, fields), calls in recorder.calls.items():
        document = run(
            "tune", operator, "--problem", fields, "--device", device, "--budget", f"{budget}s",
            quiet=not progress,
        )  # fmt: skip
        documents.append(document | {"calls": calls})
    extension().wyvern_extension_forget()
    return documents


def _batch(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the model's forward: those of a single dictionary, tuple or list."""
    if len(args) == 1 and not kwargs:
        if isinstance(args[0], Mapping) and _takes(model.forward, **args[0]):
            return (), dict(args[0])
        if isinstance(args[0], tuple | list) and _takes(model.forward, *args[0]):
            return tuple(args[0]), {}
    return args, kwargs


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _run_model(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A training step without its update, a forward pass without gradients and a generation."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        sources = [*model.parameters(), *tree_leaves((args, kwargs))]
        if any(isinstance(x, Tensor) and x.requires_grad for x in sources):
            if not model.training:
                model.train()
            with torch.enable_grad():
                _run_backward(model(*args, **kwargs))
        model.eval()
        with torch.no_grad():
            model(*args, **kwargs)
            _run_generate(model, args, kwargs)
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer.copy_(value)


def _run_generate(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    generate = getattr(model, "generate", None)
    if generate is None:
        return
    signature = inspect.signature(model.forward)
    inputs = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            inputs |= inputs.pop(name, {})
    inputs = {name: x for name, x in inputs.items() if name not in ("labels", "use_cache")}
    options: dict[str, Any] = {"max_new_tokens": 2}
    if hasattr(model, "generation_config"):  # transformers: the first token must not be the last
        options |= {"min_new_tokens": 2, "do_sample": False}
    if not _takes(generate, **inputs, **options):
        warnings.warn(
            f"{type(model).__name__}.generate does not take {', '.join([*inputs, *options])}, so "
            "what it calls is not tuned; give wyvern.tune a function that calls it",
            stacklevel=4,
        )
        return
    generate(**inputs, **options)


def _run_backward(outputs: Any) -> None:
    if isinstance(outputs, Mapping):  # a cache's states are for later tokens, not for a loss
        outputs = {name: x for name, x in outputs.items() if name != "past_key_values"}
        outputs = outputs if outputs.get("loss") is None else outputs["loss"]
    wanting = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    if wanting:
        ones = [torch.ones_like(x) for x in wanting]
        torch.autograd.grad(wanting, _leaves(wanting), ones, allow_unused=True)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that these are functions of and that require gradients."""
    found: dict[int, Tensor] = {}
    nodes, seen = [torch.autograd.graph.get_gradient_edge(x).node for x in tensors], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found[id(leaf)] = leaf
        nodes += [after for after, _ in node.next_functions if after is not None]
    return list(found.values())


class _Recorder(TorchDispatchMode):
    """Counts the calls of each problem that the operators meet."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[str, str, str], int] = {}  # by operator, device and fields

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        summaries = (summary_op, backward_summary_op, shared_summary_op)
        if func in (forward_op, resume_op, backward_op, update_op, *summaries):
            is_backward = func in (backward_op, backward_summary_op)
            inputs = args if is_backward else args[: 1 + len(INPUTS)]
            pool = dict(zip(UPDATED, args[1:], strict=False)) if func is update_op else {}
            one = _problem(is_backward, *inputs, pool=pool, summary=func in summaries)
            if "batch_invariant" not in one[2]:  # which has its default plan whatever is tuned
                self.calls[one] = self.calls.get(one, 0) + 1
        return func(*args, **(kwargs or {}))


def _problem(
    backward: bool,
    problem: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_gate: Tensor | None,
    conv_weight: Tensor | None,
    conv_bias: Tensor | None,
    initial_conv_state: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    dfinal_conv_state: Tensor | None = None,
    kept: object = (),
    *,
    pool: dict[str, Tensor | None],
    summary: bool,
) -> tuple[str, str, str]:
    """The operator, the device and the fields of a call, as the library reads it (prepared.cpp)."""
    fields = fields_of(problem)
    operator = fields.pop("op")
    fields.pop("gradients", None)  # no field of a problem
    fields |= {
        "B": str(q.shape[0]),
        "T": str(q.shape[1]),
        "H": str(q.shape[2]),
        "K": str(q.shape[3]),
        "HV": str(v.shape[2]),
        "V": str(v.shape[3]),
        "N": str(q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1),
        "packed": str(int(cu_seqlens is not None)),
        "initial_state": str(int(initial_state is not None)),
        "dtype": _DTYPES[q.dtype],
    }
    rate = beta if erase is None else erase
    given = {"beta_dtype": rate, "g_dtype": g, "state_dtype": initial_state, "seqlens_dtype": cu_seqlens}
    fields |= {name: _DTYPES[x.dtype] for name, x in given.items() if x is not None}
    if conv_weight is not None:
        fields |= {
            "short_conv": str(conv_weight.shape[1]),
            "conv_dtype": _DTYPES[conv_weight.dtype],
            "has_conv_bias": str(int(conv_bias is not None)),
            "initial_conv_state": str(int(initial_conv_state is not None)),
        }
    if pool:
        fields |= _pool_fields(pool, cu_seqlens is not None)
        windows = pool.get("conv_state")
        if windows is not None:
            columns = windows.shape[1 if "conv_tokens_first" in fields else 2]
            fields |= {"inplace_conv_state": "1", "conv_columns": str(columns)}
    if summary:
        fields["summary"] = "1"
    if backward:
        fields |= {"pass": "backward", "output_final_state": str(int(dht is not None))}
        if conv_weight is not None:
            fields["output_conv_state"] = str(int(dfinal_conv_state is not None))
    device = "cpu" if q.device.type == "cpu" else f"cuda:{q.device.index}"
    return operator, device, ",".join(f"{name}={value}" for name, value in fields.items())


def _pool_fields(named: dict[str, Tensor | None], packed: bool) -> dict[str, str]:
    """What a call that writes to its caller's tensors has more, by the names of its parameters."""
    x = {name: one for name, one in named.items() if one is not None}
    fields = {"parent": str(int("parent" in x))}
    for field, names in {
        "state_dtype": ("state", "initial_state", "intermediate_states", "checkpoints"),
        "index_dtype": ("state_index", "intermediate_index", "parent", "checkpoint_offsets"),
    }.items():
        fields |= {field: _DTYPES[x[name].dtype] for name in reversed(names) if name in x}
    if "checkpoint_offsets" in x:
        fields["checkpoint_offsets"] = "1"
    elif "checkpoints" in x:
        fields["checkpoint_rows"] = str(x["checkpoints"].shape[0])
    if "checkpoints" in x and _DTYPES[x["checkpoints"].dtype] == "fp32" != fields["state_dtype"]:
        fields["fp32_checkpoints"] = "1"
    if "intermediate_states" in x:
        rows, tokens = x["intermediate_states"].shape[:2]
        fields["intermediate_rows"] = str(rows)
        if packed:
            fields["draft_tokens"] = str(tokens)
    if "state" in x:
        given = ("state_index", "output_state_index", "has_initial_state")
        fields |= {name: str(int(name in x)) for name in given} | {"inplace_state": "1"}
    if "state_index" in x and "state" in x:
        fields["state_slots"] = str(x["state"].shape[0])
        if x["state_index"].ndim == 2:
            fields["index_columns"] = str(x["state_index"].shape[1])
    return fields
