"""The operators of PyTorch's dispatcher, their gradients, their shapes, and what their errors become.

``wyvern::forward`` and ``wyvern::backward`` take a problem as text, "op=kda scale=0.5", whose names are
the fields that ``wyvern_field_get()`` lists; in Python it is a dictionary until it crosses
(``text_of``). A forward pass's may end in ``gradients=1``: a backward pass is to follow, and its kernels are
compiled meanwhile. They give a list of the tensors that the problem has:

* forward: o, final_state, intermediate_states, final_conv_state, o_scale, then what ``disable_recompute=1`` and
  ``keep_output=1`` keep for the backward pass (``KEPT``);
* backward: the gradients of q, k, v, g, beta, erase, write, initial_state, A_log, dt_bias, norm_weight,
  norm_gate, conv_weight, conv_bias, initial_conv_state.

``wyvern::update`` is the forward or the recurrent pass that has no gradient: it writes to tensors of the
caller, a pool of states, states inside sequences, o (``out`` in Python) and final states, and gives o, or
nothing where the caller has it.

``wyvern::summary`` and ``wyvern::backward_summary`` take what a forward and a backward pass take (the latter
no initial state, and nothing that is kept), and give what their tokens do to a state (section 13 of
the specification), one float32 tensor: ``[N, HV, K, V]``, R, with ``transition=1`` ``[N, HV, K, V + K]``, R and M;
backwards dR ``[N, HV, K, V]``. ``wyvern::shared_summary`` is the former of a problem with ``chunk_size`` and
``segment_chunks``, and gives a list: the summary, ``segment_M`` and ``segment_R``; ``wyvern::resume`` is the forward
pass with these two fields that takes the two tensors behind its inputs. Of q forwards and of v backwards the sizes
count alone. ``wyvern::fold`` makes of
such ``summaries`` ``[ranges, ..., K, V or V + K]`` the states ``[ranges, ..., K, V]`` that enter each range, with
``reverse`` the gradients of those that leave it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from ._arguments import tensor
from ._extension import load
from ._policy import apply_environment

load()
apply_environment()
forward_op = torch.ops.wyvern.forward.default
backward_op = torch.ops.wyvern.backward.default
update_op = torch.ops.wyvern.update.default
summary_op = torch.ops.wyvern.summary.default
shared_summary_op = torch.ops.wyvern.shared_summary.default
resume_op = torch.ops.wyvern.resume.default
backward_summary_op = torch.ops.wyvern.backward_summary.default
fold_op = torch.ops.wyvern.fold.default

Problem = dict[str, "str | int | float"]
"""Fields of a problem by name. Flags are 1; a field that is left out has its default."""


class Inputs(NamedTuple):
    """The tensors of a forward call, in the order of wyvern::forward."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    erase: Tensor | None = None
    write: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_gate: Tensor | None = None
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    initial_conv_state: Tensor | None = None
    cu_seqlens_cpu: Tensor | None = None


UPDATED = {  # whether it is written, by the names that parameters have
    "out" if argument.name == "o" else argument.name: argument.is_write
    for argument in update_op._schema.arguments[1:]
}
INPUTS = Inputs._fields
_BESIDE = tuple(UPDATED)[len(INPUTS) :]  # what an update takes beside the inputs
_HAS_GRADIENT = tuple(not name.startswith("cu_seqlens") for name in INPUTS)
KEPT = ("Tinv", "Aqk", "w", "qg", "kg", "h", "v_new", "o_raw")
_PARAMETERS = ("A_log", "dt_bias", "norm_weight", "conv_weight", "conv_bias")  # the batch shares them
_FP32_GRADIENTS = ("initial_state", "conv_weight", "conv_bias")  # whatever dtype the input has
VECTOR_GATED = ("kda", "gdn2")


def text_of(problem: Problem) -> str:
    """The problem as the operators take it."""
    return " ".join([f"{name}={value}" for name, value in problem.items()])


def fields_of(problem: str) -> dict[str, str]:
    """The fields that a problem's text names."""
    return dict(field.split("=", 1) for field in problem.split(" "))


def by_parameter(problem: Mapping[str, object], inputs: Inputs) -> dict[str, Tensor | None]:
    """The inputs by the names that they have in wyvern.ops."""
    names = {"erase": "b", "write": "w"} if problem["op"] == "gdn2" else {}
    return {names.get(name, name): x for name, x in zip(INPUTS, inputs, strict=True)}


def _set(fields: dict[str, str], name: str) -> bool:
    return fields.get(name, "0") == "1"


def scale_shape(fields: Mapping[str, object], q: Tensor, v: Tensor) -> list[int]:
    """Of o_scale."""
    tokens, scales = q.shape[0] * q.shape[1], v.shape[2] * (v.shape[3] // 128)
    return [scales, (tokens + 3) // 4 * 4] if "output_scale_tokens_last" in fields else [tokens, scales]


def _empty_output(fields: Mapping[str, object], q: Tensor, v: Tensor) -> Tensor:
    dtype = torch.float8_e4m3fn if "output_dtype" in fields else q.dtype
    return q.new_empty([*q.shape[:2], *v.shape[2:]], dtype=dtype)


def _kept_chunk_size(fields: dict[str, str], v: Tensor) -> int:
    """As kept_chunk_size() of <wyvern/problem.hpp>."""
    if "chunk_size" in fields:
        return int(fields["chunk_size"])
    row_bytes = v.shape[3] * v.element_size()
    if not _set(fields, "disable_recompute") or row_bytes <= 512:
        return 64
    return 32 if row_bytes <= 1024 else 16


def refuse_meta(**tensors: Tensor | None) -> None:
    """Refuses tensors without values, but for those of a trace, which has only shapes.

    PyTorch takes the functions below for calls on the meta device too, where they would answer with memory
    that nothing wrote as soon as q is elsewhere.
    """
    for name, x in tensors.items():
        if x is not None and x.device.type == "meta" and not isinstance(x, FakeTensor):
            raise RuntimeError(
                f"wyvern.ValueError: {name} is on meta, where tensors have no values; it must be on the CPU "
                "or a CUDA device"
            )


def _forward_shapes(problem: str, *tensors: Tensor | None) -> list[Tensor]:
    """Of a pass with segments too."""
    fields, tensors = fields_of(problem), tensors[: len(INPUTS)]
    refuse_meta(**by_parameter(fields, Inputs(*tensors)))
    q, _, v, *_, cu_seqlens = tensors[: INPUTS.index("cu_seqlens") + 1]
    B, T, _, K = q.shape
    HV, V = v.shape[2], v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = [HV, V, K] if _set(fields, "state_v_first") else [HV, K, V]
    outputs = [_empty_output(fields, q, v)]
    if _set(fields, "output_final_state"):
        outputs.append(q.new_empty([N, *state], dtype=torch.float32))
    C = _kept_chunk_size(fields, v)
    rows = T * int(fields.get("num_householder", "1"))
    slots = B * ((rows + C - 1) // C) if cu_seqlens is None else rows // C + N
    if _set(fields, "return_intermediate_states"):
        outputs.append(q.new_empty([slots, *state]))
    if _set(fields, "output_conv_state"):
        channels, W = Inputs(*tensors).conv_weight.shape
        outputs.append(q.new_empty([N, channels, W - 1]))
    if "output_dtype" in fields:
        outputs.append(q.new_empty(scale_shape(fields, q, v), dtype=torch.float32))
    shapes = {}
    if _set(fields, "disable_recompute"):
        shapes = {"h": [slots, HV, K, V], "v_new": [B, rows, HV, V]}
        if fields["op"] in VECTOR_GATED:
            shapes |= dict.fromkeys(("Tinv", "Aqk"), [B, T, HV, C])
            shapes |= dict.fromkeys(("w", "qg", "kg"), [B, T, HV, K])
    if _set(fields, "keep_output"):
        shapes["o_raw"] = [B, T, HV, V]
    for name in KEPT:
        if name in shapes:
            dtype = torch.float32 if name == "Aqk" else q.dtype
            outputs.append(q.new_empty(shapes[name], dtype=dtype))
    return outputs


torch.library.register_fake("wyvern::forward", _forward_shapes)
torch.library.register_fake("wyvern::resume", _forward_shapes)


@torch.library.register_fake("wyvern::update")
def _update_shapes(problem: str, *tensors: Tensor | None) -> Tensor:
    inputs = Inputs(*tensors[: len(INPUTS)])
    beside = dict(zip(_BESIDE, tensors[len(INPUTS) :], strict=True))
    fields = fields_of(problem)
    refuse_meta(**by_parameter(fields, inputs), **beside)
    if beside["out"] is not None:
        return inputs.q.new_empty([0], dtype=torch.uint8)
    return _empty_output(fields, inputs.q, inputs.v)


@torch.library.register_fake("wyvern::backward")
def _backward_shapes(problem: str, *tensors: Any) -> list[Tensor]:
    return [
        x.new_empty(x.shape, dtype=torch.float32 if name in _FP32_GRADIENTS else x.dtype)
        for name, x, has_gradient in zip(INPUTS, tensors, _HAS_GRADIENT, strict=False)
        if x is not None and has_gradient
    ]


def _summary_shape(problem: str, *tensors: Tensor | None) -> Tensor:
    """Of either pass."""
    fields, x = fields_of(problem), Inputs(*tensors[: len(INPUTS)])
    refuse_meta(**by_parameter(fields, x))
    (B, _, _, K), (HV, V) = x.q.shape, x.v.shape[2:]
    N = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    columns = V + K if _set(fields, "transition") else V
    return x.q.new_empty([N, HV, K, columns], dtype=torch.float32)


torch.library.register_fake("wyvern::summary", _summary_shape)
torch.library.register_fake("wyvern::backward_summary", _summary_shape)


@torch.library.register_fake("wyvern::shared_summary")
def _shared_summary_shapes(problem: str, *tensors: Tensor | None) -> list[Tensor]:
    fields, x = fields_of(problem), Inputs(*tensors)
    summary = _summary_shape(problem, *tensors)
    N, HV, K, _ = summary.shape
    rows = int(fields["chunk_size"]) * int(fields["segment_chunks"])
    NS = N * max(1, (x.k.shape[1] + rows - 1) // rows)
    return [summary, *(summary.new_empty([NS, HV, K, columns]) for columns in (K, x.v.shape[3]))]


@torch.library.register_fake("wyvern::fold")
def _fold_shape(summaries: Tensor, order: list[int], V: int, reverse: bool) -> Tensor:
    refuse_meta(summaries=summaries)
    return summaries.new_empty([*summaries.shape[:-1], V])


def _vmap_rule(op: Any) -> Any:
    """The rule of torch.func.vmap: its dimension becomes a part of the batch.

    Calls are made one after the other where that cannot be: of packed batches, with parameters of
    the gate or the norm that differ, and for their gradients, which are sums over the batch.
    """
    names = [argument.name for argument in op._schema.arguments[1:]]

    def rule(
        info: Any, in_dims: tuple[Any, ...], problem: str, *operands: Any
    ) -> tuple[list[Tensor], list[int]]:
        size, dims = info.batch_size, in_dims[1:]
        given = dict(zip(names, zip(operands, dims, strict=True), strict=True))

        def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None:
                return None
            return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        def one_of(i: int) -> list[Any]:
            return tree_map(lambda x, dim: x if dim is None else x.select(dim, i), operands, dims)

        if given["cu_seqlens"][0] is not None or any(
            x is not None and (dim is not None or op is backward_op)
            for x, dim in map(given.get, _PARAMETERS)
        ):
            each = [op(problem, *one_of(i)) for i in range(size)]
            outputs = [torch.stack(x) for x in zip(*each, strict=True)]
        else:
            folded = [
                x if name in _PARAMETERS else tree_map(fold, x, dim)
                for name, (x, dim) in given.items()
            ]
            outputs = [x.unflatten(0, (size, x.shape[0] // size)) for x in op(problem, *folded)]
        return outputs, [0] * len(outputs)

    return rule


for _op in (forward_op, backward_op):
    torch.library.register_vmap(_op, _vmap_rule(_op))


def _texts(problem: Problem, text: str, disable_recompute: bool) -> tuple[str, str]:
    """The texts of the backward pass, and of a forward pass that keeps what the former takes."""
    if disable_recompute:
        problem = {**problem, "disable_recompute": 1}
        text = text_of(problem)
    keeping = text_of({**problem, "keep_output": 1}) if "output_norm" in problem else text
    return text, keeping + " gradients=1"


class _Recurrence(torch.autograd.Function):
    """The forward pass with the backward pass as its gradient; its arguments are the operator's.

    problem, keeping: as _texts() has them.
    given: how many outputs come before what is kept for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: str, keeping: str, given: int, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = forward_op(keeping, *inputs)
        ctx.problem = problem
        ctx.kept_from = len(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *outputs[given:])
        return tuple(outputs[:given])

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        dht = others[0] if "output_final_state=1" in ctx.problem else None
        dlast = others[-1] if "output_conv_state=1" in ctx.problem else None
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.kept_from], list(saved[ctx.kept_from :])
        q, _, v = inputs[:3]
        if do is None:
            if dht is None and dlast is None:
                return (None,) * (ctx.kept_from + 3)
            do = q.new_zeros([*q.shape[:2], *v.shape[2:]])
        gradients = backward_op(ctx.problem, *inputs, do, dht, dlast, kept)
        if torch.is_grad_enabled():  # create_graph=True, or torch.func
            count = len(gradients)
            gradients = _OnceDifferentiable.apply(ctx.problem, count, *gradients, *inputs, do, dht, dlast)
        result: list[Tensor | None] = [None, None, None]
        at = 0
        for x, has_gradient in zip(inputs, _HAS_GRADIENT, strict=True):
            if x is None or not has_gradient:
                result.append(None)
                continue
            result.append(gradients[at] if gradients[at].dtype == x.dtype else gradients[at].to(x.dtype))
            at += 1
        return tuple(result)


class _Transformable(torch.autograd.Function):
    """The same for torch.func, which takes only this form; calling it costs the host more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: str, keeping: str, given: int, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(forward_op(keeping, *inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        problem, _, given, *tensors = inputs
        ctx.problem = problem
        ctx.given = given
        ctx.kept_from = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[given:])
        ctx.save_for_backward(*tensors, *output[given:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return _Recurrence.backward(ctx, *gradients[: ctx.given])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _refuse_forward_mode(fields_of(ctx.problem)["op"])


class _OnceDifferentiable(torch.autograd.Function):
    """The gradients, made of tensors, that refuse to be differentiated by them.

    PyTorch would take them for constants, and so second derivatives for zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(problem: str, count: int, *gradients_and_tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients_and_tensors[:count]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.problem = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(
            f"{fields_of(ctx.problem)['op']} has no second derivatives: its gradients (create_graph=True, "
            "torch.func.grad) cannot be differentiated again"
        )


def _refuse_forward_mode(op: str) -> NoReturn:
    raise NotImplementedError(
        f"{op} has no forward-mode derivative (torch.autograd.forward_ad, "
        "torch.func.jvp, torch.func.jacfwd): use reverse mode, as torch.autograd.grad does"
    )


def refuse_tangents(op: str, *tensors: Tensor | None) -> None:
    """Refuses derivatives that are carried forwards, which PyTorch would drop without a word."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        _refuse_forward_mode(op)


is_transformed = torch._C._are_functorch_transforms_active


def run(
    problem: Problem, text: str, inputs: Inputs, disable_recompute: bool = False
) -> Sequence[Tensor]:
    """o, with the final state and the last rows where the problem asks for them, with their gradients where
    they are asked.

    text: the problem's. RuntimeErrors of it are for :func:`raise_as_python`.
    """
    given = 1 + ("output_final_state" in problem) + ("output_conv_state" in problem)
    recurrent_norm = "output_norm" in problem and problem.get("pass") == "recurrent"
    quantizes = "output_dtype" in problem
    if is_transformed():
        if quantizes:
            raise NotImplementedError("output_dtype is given, and torch.func cannot transform o in 8 bits")
        if recurrent_norm:
            raise NotImplementedError(
                "norm_gate is given to a fused_recurrent function, which torch.func cannot transform then: call "
                "the chunk function"
            )
        # That a tensor requires a gradient or has a tangent shows at its own level alone.
        texts = _texts(problem, text, disable_recompute and torch.is_grad_enabled())
        return _Transformable.apply(*texts, given, *inputs)[:given]
    if torch.is_grad_enabled() and _requires_gradient(inputs):
        if "batch_invariant" in problem:
            raise ValueError("batch_invariant is true; it has no gradient, so call under torch.no_grad()")
        if recurrent_norm or quantizes:
            named = by_parameter(problem, inputs).items()
            first = next(name for name, x in named if x is not None and x.requires_grad)
            if quantizes:
                raise ValueError(
                    f"{first} requires a gradient; with output_dtype there is none: call under torch.no_grad()"
                )
            raise ValueError(
                f"{first} requires a gradient; a fused_recurrent function has none with norm_gate: call the "
                "chunk function, or call under torch.no_grad()"
            )
        return _Recurrence.apply(*_texts(problem, text, disable_recompute), given, *inputs)
    return forward_op(text, *inputs)


def _requires_gradient(inputs: Inputs) -> bool:
    for x in inputs:  # a loop ends at the first, and makes no list
        if x is not None and x.requires_grad:
            return True
    return False


def update(problem: str, inputs: Inputs, beside: dict[str, Tensor]) -> Tensor:
    """o, which is out where that is given.

    beside: what wyvern::update takes beside the inputs, by the names of parameters.

    RuntimeErrors of it are for :func:`raise_as_python`.
    """
    written = {name: beside[name] for name, is_write in UPDATED.items() if is_write and name in beside}
    made = ("final_state", "final_conv_state", "o_scale")  # not given by the caller
    first = next(name for name in written if name not in made)
    if is_transformed():
        raise NotImplementedError(f"{first} is updated in place, which torch.func cannot transform")
    tensors = [*inputs, *[beside.get(name) for name in _BESIDE]]
    if torch.is_grad_enabled():
        refused = [i for i, x in enumerate(tensors) if x is not None and x.requires_grad]
        if refused:
            names = [*by_parameter(fields_of(problem), inputs), *_BESIDE]
            raise ValueError(
                f"{names[refused[0]]} requires a gradient; with {first}, which is updated in place, there is "
                "none: call under torch.no_grad()"
            )
    o = update_op(problem, *tensors)
    for x in written.values():
        # PyTorch counts the changes of tensors that it saves; of a trace it finds them by the schema.
        if not torch.compiler.is_compiling() and not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return written.get("out", o)


_KINDS = {
    "wyvern.TypeError": TypeError,
    "wyvern.ValueError": ValueError,
    "wyvern.RuntimeError": RuntimeError,
}


def raise_as_python(error: Exception, **arguments: object) -> NoReturn:
    """Raises what an error of an operator's call with these arguments stands for."""
    for name, value in arguments.items():
        if value is not None or name in ("q", "k", "v"):
            tensor(name, value)
    cu_seqlens = arguments.get("cu_seqlens")
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.shape == (0,):
        raise ValueError("cu_seqlens is empty; it must have N + 1 entries, of N sequences") from None
    # PyTorch keeps the text alone of what the extension throws.
    kind, _, what = str(error).partition(": ")
    if kind in _KINDS:
        raise _KINDS[kind](what) from None
    raise error
