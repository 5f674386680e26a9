"""Where the package's own libraries and its command are, and whether the package is whole: another
distribution, ``wyvern`` on PyPI, writes the same folder."""

from __future__ import annotations

import os
import sys
import warnings

PACKAGE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(PACKAGE, "lib", "libwyvern.so.0")
EXTENSION = os.path.join(PACKAGE, "lib", "libwyvern_torch.so")
COMMAND = os.path.join(PACKAGE, "bin", "wyvern")

_FIX = "run `pip uninstall -y wyvern wyvern-kernels` and install wyvern-kernels again"


def _check() -> None:
    """Refuses another package's __init__.py, and warns where one may replace this package's."""
    package = sys.modules[__package__ or "wyvern"]
    if getattr(package, "DISTRIBUTION", None) != "wyvern-kernels":
        raise ImportError(
            f"{package.__file__} is not of wyvern-kernels: another distribution, wyvern, is installed over it; "
            f"{_FIX}"
        )
    folder = os.path.dirname(PACKAGE)
    for name in os.listdir(folder):
        if name.startswith("wyvern-") and name.endswith((".dist-info", ".egg-info")):
            warnings.warn(
                f"{os.path.join(folder, name)} is another distribution with a package `wyvern`, and either may "
                f"replace the other's files; {_FIX}",
                stacklevel=2,
            )


_check()
