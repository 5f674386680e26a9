"""Runs test files by the Python that has PyTorch: for CTest, which knows exit code 77 as "skipped".

usage: run.py NAME_OR_FILE... (a name: test_NAME.py beside this one), in an environment with PYTHONPATH
set to the package.
The Python is $WYVERN_TEST_PYTHON, else the one that runs this, else that of build/pyenv, which
tools/test makes.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SKIPPED = 77
NO_TESTS = 5  # pytest's exit code where a file skips itself as a whole
# Without importing PyTorch, which takes seconds.
NEEDED = """
from importlib.metadata import version
assert version("pytest") and tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)
"""


def pythons():
    chosen = os.environ.get("WYVERN_TEST_PYTHON")
    if chosen:
        return [chosen]
    return [sys.executable, str(HERE.parents[2] / "build" / "pyenv" / "bin" / "python")]


def has_torch(python):
    try:
        done = subprocess.run([python, "-c", NEEDED], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def main():
    python = next((one for one in pythons() if has_torch(one)), None)
    if python is None:
        print("skipped: no Python with PyTorch 2.10 and pytest is at hand (tools/test makes one where "
              "PyPI can be reached; WYVERN_TEST_PYTHON names another)")
        sys.exit(SKIPPED)
    files = [name if name.endswith(".py") else str(HERE / f"test_{name}.py") for name in sys.argv[1:]]
    os.chdir(HERE)
    command = [python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--durations=5", *files]
    code = subprocess.run(command, check=False).returncode
    sys.exit(SKIPPED if code == NO_TESTS else code)


if __name__ == "__main__":
    main()
