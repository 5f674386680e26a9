"""Acts on modules of other libraries as soon as they are imported, without importing them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: of the modules that are waited for it has the loader call back."""

    def __init__(self) -> None:
        self.acts: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        act = self.acts.get(name)
        if act is None:
            return None
        found = (
            finder.find_spec(name, path, target)
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = execute  # type: ignore[method-assign]
                execute(module)
                _call(act, module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Has act called with the module of this name: now where it is imported, else each time that it is.

    An error of act becomes a warning: the import goes on.
    """
    _finder.acts[name] = act
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None:
        _call(act, module)


def is_installed(name: str) -> bool:
    """Whether a module is imported, or its file is in its package's folder; nothing is imported."""
    if name in sys.modules:
        return sys.modules[name] is not None
    package, *parts = name.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = (spec and spec.submodule_search_locations) or []
    for part in parts:
        found = importlib.machinery.PathFinder.find_spec(part, list(folders))
        if found is None:
            return False
        folders = found.submodule_search_locations or []
    return spec is not None


def _call(act: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:
        warnings.warn(f"wyvern leaves {module.__name__} as it is: {error}", stacklevel=2)
