"""The libraries that are measured, in the order of the table: a file each, and a line here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sides.cudnn_fe import CudnnFrontend
from sides.fla import FlaDispatched, FlaTriton
from sides.flash_kda import FlashKda
from sides.flash_qla import FlashQla
from sides.flashinfer_gdn import FlashInfer
from sides.side import Call, Side, one_line
from sides.wyvern_ops import Wyvern, WyvernDefault

__all__ = ["OURS", "PEERS", "Call", "Side", "Wyvern", "WyvernDefault", "from_file", "one_line"]

OURS = [Wyvern, WyvernDefault]
PEERS = [FlaTriton, FlaDispatched, FlashQla, FlashKda, FlashInfer, CudnnFrontend]


def from_file(path: str) -> list[type[Side]]:
    """The sides of a Python file that is no part of this folder."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Side)]
    return [one for one in made if one.name and one.__module__ == module.__name__]
