"""Finding faster plans for the operators that a piece of code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ._torch import torch  # before what imports it by its own name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._call import backward_op, fields_of, forward_op
from ._extension import extension

_DTYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}


def tune(
    function: Callable[..., Any],
    /,
    *args: Any,
    budget: float = 60.0,
    progress: bool = True,
    **kwargs: Any,
) -> list[dict[str, Any]]:
    """Calls ``function(*args, **kwargs)`` once and tunes every problem that Wyvern's operators met in it.

    ``function`` may be an operator or anything that calls some, a training step with its backward pass
    too. Where it gives a tensor, or a tuple with one, that wants a gradient, the backward pass is run and
    tuned as well (gradients that parameters had are kept as they were).

    Each problem takes at most about ``budget`` seconds, in a process of its own, on the device of its
    tensors; a bar on stderr shows how far it is, unless ``progress`` is false. What is found is stored in
    the cache and used by this process, and by every later one, under the policy "cached". What was tuned
    before goes on where it stopped.

    Returns:
        For each problem what ``wyvern tune --json`` prints: "operator", "problem" with its fields,
        "tuned_ms", "default_ms", "plan", "complete", "stored" and more.

    Raises:
        ValueError where the function called no operator of Wyvern.
    """
    from ._command import run

    with _Recorder() as recorder:
        outputs = function(*args, **kwargs)
        _run_backward(outputs)
    if not recorder.problems:
        raise ValueError("function called no operator of Wyvern; there is nothing to tune")
    documents = []
    for operator, device, fields in recorder.problems:
        documents.append(
            run("tune", operator, "--problem", fields, "--device", device, "--budget", f"{budget}s",
                quiet=not progress)  # fmt: skip
        )
    extension().wyvern_extension_forget()
    return documents


def _run_backward(outputs: Any) -> None:
    tensors = [outputs] if isinstance(outputs, Tensor) else outputs
    if not isinstance(tensors, Iterable):
        return
    wanting = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
    if wanting:
        leaves = _leaves(wanting)
        torch.autograd.grad(wanting, leaves, [torch.ones_like(x) for x in wanting], allow_unused=True)


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors of which these are functions, and that want gradients."""
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
    """Notes what the operators are called with, each problem once."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[tuple[str, str, str]] = []  # operator, device, fields

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (forward_op, backward_op):
            one = _problem(func is backward_op, *args)
            if one not in self.problems:
                self.problems.append(one)
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
    cu_seqlens_cpu: Tensor | None,
    do: Tensor | None = None,
    dht: Tensor | None = None,
    kept: object = (),
) -> tuple[str, str, str]:
    """The operator, the device and the fields of a call, as the library reads it (prepared.cpp)."""
    fields = fields_of(problem)
    operator = fields.pop("op")
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
    if backward:
        fields |= {"pass": "backward", "output_final_state": str(int(dht is not None))}
    device = "cpu" if q.device.type == "cpu" else f"cuda:{q.device.index}"
    return operator, device, ",".join(f"{name}={value}" for name, value in fields.items())
