"""Opens the package's libraries: libwyvern alone, or with the operators for PyTorch."""

from __future__ import annotations

import atexit
import ctypes
import functools
import glob
import importlib.util
import json
import os

from ._files import EXTENSION, LIBRARY
from ._records import Prepared

_NVRTC = ("libnvrtc.so.13", "libnvrtc.so.12")


@functools.cache
def library() -> ctypes.CDLL:
    """libwyvern, whose C interface is <wyvern/wyvern.h>."""
    return ctypes.CDLL(LIBRARY)


def version() -> str:
    """The version of the library: "MAJOR.MINOR.PATCH"."""
    function = library().wyvern_version
    function.restype = ctypes.c_char_p
    return function().decode()


@functools.cache
def extension() -> ctypes.CDLL:
    """The library with the operators, without them registered: no PyTorch is needed."""
    opened = ctypes.CDLL(EXTENSION)
    opened.wyvern_extension_load.restype = ctypes.c_char_p
    opened.wyvern_extension_described.restype = ctypes.c_char_p
    opened.wyvern_extension_tuning_budget.argtypes = [ctypes.c_double]
    opened.wyvern_extension_tuning_budget.restype = ctypes.c_double
    opened.wyvern_extension_wait_for_tuning.argtypes = [ctypes.c_double]
    opened.wyvern_extension_wait_for_tuning.restype = ctypes.c_int64
    return opened


@functools.cache
def load() -> None:
    """Registers the operators, wyvern::forward and the others, with PyTorch; ImportError where it cannot."""
    import torch

    if torch.version.cuda is not None:
        _map_nvrtc()
    problem = extension().wyvern_extension_load().decode()
    atexit.register(extension().wyvern_extension_stop)
    if problem:
        raise ImportError(problem.removeprefix("wyvern.RuntimeError: "))


def prepared() -> Prepared:
    """What operators of this process were prepared, in no order: each with the "problem" (the key under
    which its plan is stored), the "device", the "origin" of the plan ("exact": tuned for this problem,
    "nearest": for one of other tokens, sequences or heads, "default") and the "plan" itself.

    A list of dictionaries that prints as a table."""
    return Prepared(json.loads(extension().wyvern_extension_described()))


def nvrtc_folders() -> list[str]:
    """The folders of NVRTC among NVIDIA's Python packages, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = []
    for place in (spec.submodule_search_locations or []) if spec else []:
        folders += sorted(glob.glob(os.path.join(place, "cu[0-9]*", "lib")), reverse=True)
        folders += glob.glob(os.path.join(place, "cuda_nvrtc", "lib"))
    return [folder for folder in folders if glob.glob(os.path.join(folder, "libnvrtc.so.1*"))]


def _map_nvrtc() -> None:
    """Maps NVRTC where the loader would not find it by its plain name, as libwyvern looks for it."""
    for name in _NVRTC:
        try:
            ctypes.CDLL(name)
            return
        except OSError:
            pass
    for folder in nvrtc_folders():
        for name in _NVRTC:
            if os.path.exists(path := os.path.join(folder, name)):
                ctypes.CDLL(path)
                return
