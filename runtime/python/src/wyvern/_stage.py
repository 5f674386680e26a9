"""Stages through the C interface of the library: prepared once, launched on PyTorch's tensors."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from typing import NoReturn

import torch
from torch import Tensor

from ._arguments import floating, tensor
from ._extension import extension, library, load

# The numbers of wyvern_dtype, wyvern_access and wyvern_status.
_DTYPES = {
    1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.int32, 5: torch.int64, 6: torch.bool,
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "int32",
    torch.int64: "int64",
}
# What the public functions call tensors of stages.
PUBLIC = {"G": "g", "Gk": "gk", "kg": "k", "Tinv": "A", "v_new": "v"}
_READ = 1
_BAD_INPUT = 1
_ALIGNMENT = 16
_MOST = 32  # tensors of a stage
_MOST_KNOWN = 64  # layouts of them


class _Spec(ctypes.Structure):
    """wyvern_tensor_spec"""

    _fields_ = [
        ("name", c_char_p), ("present", c_int32), ("access", c_int32), ("dtype", c_int32),
        ("rank", c_int32), ("shape", c_int64 * 8), ("bytes", c_size_t), ("strided", c_int64),
    ]  # fmt: skip


class _Tensor(ctypes.Structure):
    """wyvern_tensor"""

    _fields_ = [
        ("name", c_char_p), ("data", c_void_p), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("dtype", c_int32), ("rank", c_int32),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    """wyvern_launch"""

    _fields_ = [
        ("struct_size", c_size_t), ("tensor_size", c_size_t), ("tensors", POINTER(_Tensor)),
        ("tensor_count", c_size_t), ("workspace", c_void_p), ("workspace_bytes", c_size_t),
        ("stream", c_void_p), ("cu_seqlens_host", POINTER(c_int64)), ("cu_seqlens_host_count", c_size_t),
    ]  # fmt: skip


FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)


def dtype_name(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> str:
    """What the library calls the dtype of the argument; TypeError where it is none of dtypes."""
    if tensor(name, x).dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    return _NAMES[x.dtype]


class Stage:
    """A prepared stage; it lives as long as the process."""

    def __init__(self, name: str, device: torch.device, fields: dict[str, object]) -> None:
        load()
        lib = library()
        extension().wyvern_extension_runtime.restype = c_void_p
        runtime, self._stage = c_void_p(extension().wyvern_extension_runtime()), c_void_p()
        opened, problem = c_void_p(), c_void_p()
        try:
            _check(lib.wyvern_device_open(_place(device), byref(opened)))
            _check(lib.wyvern_problem_create(str(fields["op"]).encode(), byref(problem)))
            for field, value in fields.items():
                if field != "op":
                    _check(_set(problem, field.encode(), value))
            _check(lib.wyvern_prepare_stage(runtime, opened, problem, name.encode(), byref(self._stage)))
            count, size, specs = c_size_t(), c_size_t(ctypes.sizeof(_Spec)), (_Spec * _MOST)()
            _check(lib.wyvern_stage_tensors(self._stage, specs, size, c_size_t(_MOST), byref(count)))
        finally:
            lib.wyvern_problem_destroy(problem)
            lib.wyvern_device_destroy(opened)
        self._specs = [
            (spec, spec.name.decode(), tuple(spec.shape[: spec.rank])) for spec in specs[: count.value] if spec.present
        ]
        # By how tensors lie in memory: their descriptions, where none needs a copy. The first ones are kept.
        self._known: dict[tuple[object, ...], ctypes.Array[_Tensor]] = {}

    def __call__(
        self,
        device: torch.device,
        given: dict[str, Tensor | None],
        into: dict[str, Tensor],
        public: dict[str, str],
    ) -> dict[str, Tensor]:
        outputs = dict(into)
        used = []
        for spec, name, shape in self._specs:
            if spec.access == _READ:
                used.append(given.get(name))
            else:
                if name not in outputs:
                    outputs[name] = torch.empty(shape, dtype=_DTYPES[spec.dtype], device=device)
                used.append(outputs[name])
        layout = tuple(_layout(x) for x in used)
        if (known := self._known.get(layout)) is not None:
            tensors = type(known).from_buffer_copy(known)
            for to, x in zip(tensors, used, strict=True):
                to.data = x.data_ptr()  # type: ignore[union-attr]
        else:
            tensors = (_Tensor * len(used))()
            ready = [
                self._ready(name, public.get(name, name), x, spec, shape, device) if spec.access == _READ else x
                for (spec, name, shape), x in zip(self._specs, used, strict=True)
            ]
            for to, (_, name, _), x in zip(tensors, self._specs, ready, strict=True):
                _describe(to, name, x)
            if len(self._known) < _MOST_KNOWN and all(a is b for a, b in zip(ready, used, strict=True)):
                self._known[layout] = tensors
            used = ready  # copies live until the launch
        stream = None if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
        launch = _Launch(
            ctypes.sizeof(_Launch), ctypes.sizeof(_Tensor), tensors, len(used), None, 0, stream, None, 0
        )
        _check(library().wyvern_stage_launch(self._stage, byref(launch)))
        return outputs

    def _ready(
        self, name: str, public: str, x: Tensor | None, spec: _Spec, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """The tensor as the library takes it; a copy where it does not take it as it is."""
        dtype = _DTYPES[spec.dtype]
        if x is None:
            raise ValueError(f"{public} is missing; it must be {dtype} {list(shape)}")
        if x.device != device:
            raise ValueError(f"{public} is on {x.device}; it must be on {device}")
        if tuple(x.shape) != shape:
            raise ValueError(f"{public} has shape {list(x.shape)}; it must be {list(shape)}")
        if dtype.is_floating_point:
            floating(public, x)
        x = x.to(dtype)
        # Dense rows from such an address on every stage takes; to ask costs microseconds.
        if (x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0) or self._takes(name, x):
            return x
        return x.clone(memory_format=torch.contiguous_format)

    def _takes(self, name: str, x: Tensor) -> bool:
        tensor, takes = _Tensor(), c_int32()
        _describe(tensor, name, x)
        size = c_size_t(ctypes.sizeof(_Tensor))
        _check(library().wyvern_stage_takes(self._stage, byref(tensor), size, byref(takes)))
        return takes.value != 0


def _layout(x: Tensor | None) -> tuple[object, ...] | None:
    """All that a description says of a tensor but where it is, and whether that is aligned."""
    if x is None:
        return None
    return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % _ALIGNMENT


def _describe(to: _Tensor, name: str, x: Tensor) -> None:
    to.name, to.data, to.dtype, to.rank = name.encode(), x.data_ptr(), _NUMBERS[x.dtype], x.dim()
    to.shape = (c_int64 * x.dim())(*x.shape)
    if not x.is_contiguous():
        to.strides = (c_int64 * x.dim())(*x.stride())


_stages: dict[tuple[object, ...], Stage] = {}


def run(
    name: str,
    fields: dict[str, object],
    given: dict[str, Tensor | None],
    into: dict[str, Tensor] | None = None,
    public: dict[str, str] = PUBLIC,
) -> dict[str, Tensor]:
    """What the stage of that name gives for the problem of these fields, by the names of its tensors.

    Of what is given it takes what it needs. into: where it writes, of the outputs that are named there.
    public: what errors call tensors, where that is not their name. Prepared at the first call, which a CUDA graph must
    not capture. No gradient is recorded.
    """
    for key, x in given.items():
        if x is not None:
            tensor(public.get(key, key), x)
    first, device = next((first, x.device) for first, x in given.items() if x is not None)
    if device.type not in ("cpu", "cuda"):
        first = public.get(first, first)
        raise ValueError(f"{first} is on {device}; it must be on the CPU or a CUDA device")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (name, device, tuple(sorted(fields.items())))
    if (stage := _stages.get(key)) is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is captured and this stage was not prepared before: call it once with these "
                "shapes and options before the capture"
            )
        stage = _stages.setdefault(key, Stage(name, device, fields))
    with torch.no_grad():
        return stage(device, given, into or {}, public)


def validate(fields: dict[str, object]) -> None:
    """Raises ValueError where the problem of these fields is not legal, on whatever device."""
    problem, lib = c_void_p(), library()
    try:
        _check(lib.wyvern_problem_create(str(fields["op"]).encode(), byref(problem)))
        for field, value in fields.items():
            if field != "op":
                _check(_set(problem, field.encode(), value))
        _check(lib.wyvern_problem_validate(problem))
    finally:
        lib.wyvern_problem_destroy(problem)


@functools.lru_cache(maxsize=1024)
def shared_segments(
    device: torch.device, fields: tuple[tuple[str, object], ...], transition: bool
) -> tuple[int, int]:
    """The chunk_size and segment_chunks by which the forward problem of these fields and its summary share segments
    where their plans then cost less than those of both alone; (0, 0) where they do not, or may not."""
    problem, opened, lib = c_void_p(), c_void_p(), library()
    chunk_size, segment_chunks = c_int64(), c_int64()
    try:
        _check(lib.wyvern_device_open(_place(device), byref(opened)))
        _check(lib.wyvern_problem_create(str(dict(fields)["op"]).encode(), byref(problem)))
        for field, value in fields:
            if field != "op":
                _check(_set(problem, field.encode(), value))
        status = lib.wyvern_shared_segments(
            opened, problem, int(transition), byref(chunk_size), byref(segment_chunks)
        )
        return (chunk_size.value, segment_chunks.value) if status == 0 else (0, 0)
    finally:
        lib.wyvern_problem_destroy(problem)
        lib.wyvern_device_destroy(opened)


def _place(device: torch.device) -> bytes:
    return b"cpu" if device.type == "cpu" else f"cuda:{device.index}".encode()


def _set(problem: c_void_p, field: bytes, value: object) -> int:
    lib = library()
    if isinstance(value, str):
        return lib.wyvern_problem_set_text(problem, field, value.encode())
    if isinstance(value, float):
        return lib.wyvern_problem_set_real(problem, field, ctypes.c_double(value))
    return lib.wyvern_problem_set_int(problem, field, c_int64(int(value)))


def _check(status: int) -> None:
    if status != 0:
        _fail(status)


def _fail(status: int) -> NoReturn:
    last_error = library().wyvern_last_error
    last_error.restype = c_char_p
    raise (ValueError if status == _BAD_INPUT else RuntimeError)(last_error().decode())
