"""Each example runs, and so do the lines of the README."""

from __future__ import annotations

import importlib
import importlib.util
import json
import runpy
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1]
LOSSES = FOLDER.parents[1] / "tools" / "benchmark" / "losses"
# Below as two runs, one with each backend, and with few requests.
OF_THEIR_OWN = ("language_model", "serving")
EXAMPLES = [file for file in sorted((FOLDER / "examples").glob("*.py")) if file.stem not in OF_THEIR_OWN]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(file)])
    runpy.run_path(str(file), run_name="__main__")


@pytest.mark.parametrize("kind", [0, 1], ids=["qwen3_next", "kimi_linear"])
def test_serving(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix reuse, drafts, both and neither each request's tokens are those that it gets alone."""
    monkeypatch.syspath_prepend(FOLDER / "examples")
    serving = importlib.import_module("serving")
    model, requests = serving.Model(serving.KINDS[kind]).eval(), serving.some_requests()
    alone = [serving.served(model, [one], "cpu", reuse=False, drafts=0) for one in requests]
    wanted = [tokens for (tokens,), _ in alone]
    assert all(len(set(tokens)) > 1 for tokens in wanted)  # one token over and over shows nothing
    steps = {}
    for reuse in (False, True):
        for drafts in (0, serving.DRAFTS):
            tokens, counts = serving.served(model, requests, "cpu", reuse=reuse, drafts=drafts)
            assert tokens == wanted, (reuse, drafts)
            assert (counts.reused > 0, counts.evicted > 0) == (reuse, reuse), counts
            assert (counts.accepted > 0, counts.rejected > 0) == (drafts > 0, drafts > 0), counts
            steps[reuse, drafts] = counts.steps
    assert steps[True, serving.DRAFTS] < steps[True, 0] < sum(counts.steps for _, counts in alone)


def test_serving_by_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With two requests, as the test above serves all of them."""
    monkeypatch.syspath_prepend(FOLDER / "examples")
    serving = importlib.import_module("serving")
    requests = serving.some_requests()[:2]
    monkeypatch.setattr(serving, "some_requests", lambda: requests)
    serving.main()
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        kind.name for kind in serving.KINDS
    ]


def run(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def language_model(backend: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A small one's exit status; its report is in the file."""
    pytest.importorskip("fla.layers", reason="pip install flash-linear-attention")
    small = "--device cpu --steps 4 --batch 2 --length 100 --width 64 --head-dim 32 --layers 2"
    example = str(FOLDER / "examples" / "language_model.py")
    monkeypatch.setattr(sys, "argv", [example, "--backend", backend, "--json", str(file), *small.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example, run_name="__main__")
    return ended.value.code


def test_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Wyvern it learns what it learns with flash-linear-attention, and no call falls back."""
    files = [tmp_path / f"{backend}.json" for backend in ("wyvern", "fla")]
    for file in files:
        assert language_model(file.stem, file, monkeypatch) == 0
    ours, theirs = (json.loads(file.read_text()) for file in files)
    assert ours["served"] == {"chunk_gated_delta_rule": 4, "chunk_kda": 4} and not ours["declined"]
    assert set(theirs["computed_by"]) == set(ours["served"]) and not theirs["served"]
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
    told = run(LOSSES, *files)
    assert "| wyvern (wyvern) |" in told and "| fla (fla) |" in told


def test_language_model_with_a_call_that_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kda = pytest.importorskip("fla.layers.kda", reason="pip install flash-linear-attention")
    monkeypatch.setattr(kda, "chunk_kda", lambda q, k, v, **_: (v, None))
    assert language_model("wyvern", tmp_path / "report.json", monkeypatch) == 1
    assert "a silent fallback" in capsys.readouterr().err


def test_losses(tmp_path: Path) -> None:
    runs: dict[str, list[float]] = {"first": [3.0, 2.0, 1.0], "second": [3.0, 2.5, 1.25]}
    common: dict[str, Any] = {
        "backend": "none",
        "device": "cpu",
        "torch": "2.10",
        "parameters": 10,
        "batch": 2,
        "length": 64,
        "tokens_per_second": 100.0,
    }
    files = [tmp_path / f"{name}.json" for name in runs]
    for file, losses in zip(files, runs.values(), strict=True):
        file.write_text(json.dumps(common | {"losses": losses}))
    told = run(LOSSES, *files).splitlines()
    assert told[-1] == "| second (none) | 100 | 3.0000 | 2.2500 | 0.5000 | 0.2500 |"
    if importlib.util.find_spec("matplotlib"):
        run(LOSSES, *files, "--plot", tmp_path / "losses.png")
        assert (tmp_path / "losses.png").stat().st_size > 10_000


def test_lines_of_the_readme() -> None:
    """Those after `pip install`: from import to a training step."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    code = takewhile(bool, lines[lines.index("    import torch, wyvern") :])
    exec(compile("\n".join(line[4:] for line in code), "README.md", "exec"), {})


def test_host_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds far from what is measured, which a call that prepares, copies or checks too much breaks."""
    import host_time

    host_time.main()
    ratios = [float(line.split()[-5]) for line in capsys.readouterr().out.splitlines()]
    assert max(ratios[1:3]) < 4 and max(ratios[3:]) < 12, ratios
