"""The wheel, made from the build tree that WYVERN_BUILD names, in an environment with nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("WYVERN_BUILD", PACKAGE.parents[1] / "build"))
PLUGIN = "lib/wyvern/libwyvern_llvm.so"


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    tools = [sys.executable, "-m", "pip"]
    fetched = run(*tools, "download", "--no-deps", "-q", "-d", folder / "x", "scikit-build-core")
    if fetched.returncode != 0:
        pytest.skip("scikit-build-core, which makes wheels, cannot be fetched from PyPI")
    made = run(
        *tools, "wheel", "--no-deps", "-w", folder, "-C", f"build-dir={folder / 'build'}",
        "-C", f"cmake.define.WYVERN_BUILD={BUILD}", "-C", "cmake.define.WYVERN_WHEEL_PART=base",
        PACKAGE,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    (file,) = folder.glob("wyvern-*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of packages."""
    environment = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", environment).returncode == 0
    pip = run(environment / "bin" / "python", "-m", "pip", "install", "--no-index", "-q", wheel)
    assert pip.returncode == 0, pip.stderr
    (package,) = environment.glob("lib/python*/site-packages/wyvern")
    return package.parent


def test_content(wheel: Path) -> None:
    assert wheel.name.startswith("wyvern-") and "-py3-none-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "ops.py", "lib/libwyvern.so.0", "lib/libwyvern_torch.so", "bin/wyvern"):
        assert f"wyvern/{name}" in names
    assert f"wyvern/{PLUGIN}" not in names


def test_use_without_torch(installed: Path) -> None:
    bin_folder = installed.parents[2] / "bin"
    command = run(bin_folder / "wyvern", "devices")
    assert command.returncode == 0 and "cpu" in command.stdout, command.stderr
    python = run(bin_folder / "python", "-c", "import wyvern; print(wyvern.__version__, wyvern.cache.path())")
    assert python.returncode == 0, python.stderr
    missing = run(bin_folder / "python", "-c", "from wyvern import ops")
    assert "PyTorch" in missing.stderr


def test_use_with_torch(installed: Path, tmp_path: Path) -> None:
    """Without the CPU's compiler there is a sentence at the first call; with it there is a result."""
    example = PACKAGE / "examples" / "generation.py"
    variables = {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    without = run(sys.executable, example, **variables, WYVERN_CACHE_DIR=str(tmp_path))
    assert without.returncode != 0
    assert "RuntimeError: the plugin libwyvern_llvm.so, which compiles CPU kernels" in without.stderr
    plugin = installed / "wyvern" / PLUGIN
    plugin.parent.mkdir()
    shutil.copy(BUILD / PLUGIN, plugin)
    beside = run(sys.executable, example, **variables)
    plugin.unlink()
    assert beside.returncode == 0, beside.stderr
