"""Where the package's own libraries and its command are."""

from __future__ import annotations

import os

PACKAGE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(PACKAGE, "lib", "libwyvern.so.0")
EXTENSION = os.path.join(PACKAGE, "lib", "libwyvern_torch.so")
COMMAND = os.path.join(PACKAGE, "bin", "wyvern")
