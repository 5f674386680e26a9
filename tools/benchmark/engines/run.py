"""One engine in this process: starts it, measures, and writes a document. What __main__.py starts."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # this folder, behind what the engine imports

import importlib.util
import json
import os
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import measures
from engine_rows import WYVERN, Settings

HERE = Path(__file__).resolve().parent


def adapter(engine: str) -> ModuleType:
    """engine_NAME.py beside this file, or the file that is named."""
    path = Path(engine) if engine.endswith(".py") else HERE / f"engine_{engine}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # functions of it go to workers by this name
    spec.loader.exec_module(module)
    return module


def measure(request: dict[str, Any]) -> dict[str, Any]:
    settings = Settings(**request["settings"])
    start = time.perf_counter()
    engine = adapter(request["engine"]).start(request["model"], settings)
    document: dict[str, Any] = {"start_s": time.perf_counter() - start, "parameters": engine.prepare()}
    if "logprobs" in request["measures"]:
        document["logprobs"] = measures.logprobs(engine)
    if "invariance" in request["measures"]:
        document["invariance"] = measures.invariance(engine)
    turns = measures.Turns(*request["turns"])
    if "speed" in request["measures"]:
        document["speed"] = measures.speed(engine, settings.max_model_len, turns)
    if "profile" in request["measures"]:
        document["profile"] = measures.profile(engine, turns)
    document["report"] = engine.report()
    if request["side"] == WYVERN and not document["report"]:
        raise RuntimeError("Wyvern serves nothing in this engine: is its wheel installed beside the engine?")
    engine.close()
    return document


def main() -> None:
    request = json.loads(sys.argv[1])
    document = measure(request)
    Path(request["document"]).write_text(json.dumps(document))
    sys.stdout.flush()
    os._exit(0)  # without ending what engines have begun, which some do not survive


if __name__ == "__main__":
    main()
