"""The command end to end on a CPU, with sides that are made up; its oracle and its floors."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[2] / "runtime/python/tests"))

import inputs  # noqa: E402
import oracle  # noqa: E402
import rows  # noqa: E402
import sides  # noqa: E402
import work  # noqa: E402
from reference import recurrence  # noqa: E402


def peers(folder: Path, *options: str, code: int = 0) -> tuple[dict | None, str]:
    """The document of a run, and what it said on stderr."""
    command = [sys.executable, str(HERE), "--device", "cpu", "--out", str(folder), "--runs", "3"]
    command += ["--adapter", str(HERE / "fake_sides.py"), "--sets", "small", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads((folder / "peers.json").read_text()), done.stderr


def test_measures_what_is_there(tmp_path: Path) -> None:
    sides = "fake,broken,wrong,missing,hanging,fla"
    document, said = peers(tmp_path, "--peers", sides, "--rows", "gdn-1of[12]-1x|gdn.*packed")
    by_name = {row["row"]: row for row in document["rows"]}
    assert len(by_name) == 3 and said.count("wyvern") == 3

    row = by_name["gdn-1of2-1x96-D32-strong"]
    ours, fake, wrong = (row["sides"][name] for name in ("wyvern", "fake", "wrong"))
    assert ours["errors"]["o"] < 5e-3 and ours["errors"]["final_state"] < 5e-3
    assert fake["errors"]["o"] < 5e-3 and fake["errors"]["final_state"] < 1e-6
    assert wrong["errors"]["o"] == pytest.approx(0.5, rel=0.02)
    assert ours["call"]["runs"] >= 3 and ours["how"] == "call" and fake["ms"] > 5
    assert row["best_peer"] in ("fake", "wrong") and row["best_ratio"] > 0
    assert row["failed"] == {"broken": "RuntimeError: it is not for this"}
    assert row["declined"]["hanging"] == "it is for the delta rule"
    assert by_name["gdn-1of1-3x0to40-packed-D16-strong"]["declined"]["fake"] == "it has no packs"

    training = by_name["gdn-1of1-1x48-D16-strong-both"]["sides"]
    for name in ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state"):
        assert training["wyvern"]["errors"][name] < 2e-2
        assert training["fake"]["errors"][name] < 5e-3

    absent = document["environment"]["absent"]
    assert "a_module_that_is_nowhere" in absent["missing"]
    assert absent["fla"] == "it does not run on a CPU"
    page = (tmp_path / "peers.md").read_text()
    for piece in (
        "missing: absent",
        "broken: RuntimeError",
        "gdn-1of2-1x96-D32-strong",
        "5.0e-01 !",
    ):
        assert piece in page


def test_warms_up_and_then_measures(tmp_path: Path) -> None:
    document, said = peers(tmp_path, "--peers", "fake,broken", "--rows", "gdn-1of[12]-1x",
                           "--warm-up", "2")  # fmt: skip
    lines = said.splitlines()
    warm = [at for at, line in enumerate(lines) if line.startswith("warm-up, ")]
    timed = [at for at, line in enumerate(lines) if line.startswith("[")]
    assert len(warm) == len(timed) == len(document["rows"]) == 2 and max(warm) < min(timed)
    assert all(line.endswith(" s") for line in lines[: len(warm)]), said
    assert document["environment"]["warm_up"] == 2
    assert all(row["sides"]["fake"]["errors"]["o"] < 5e-3 for row in document["rows"])
    assert "after a warm-up" in (tmp_path / "peers.md").read_text()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs main() in this process, without a look at what is installed; gives the exit code."""
    spec = importlib.util.spec_from_file_location("peers_main", HERE / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    here = {"date": "", "device": "CPU", "torch": "", "sides": {}, "absent": {}}
    monkeypatch.setattr(module, "look_around", lambda options: here)

    def run(*options: str) -> int:
        fixed = ["peers", "--device", "cpu", "--sets", "small", "--out", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", fixed + list(options))
        with pytest.raises(SystemExit) as end:
            module.main()
        return end.value.code

    run.module = module
    return run


def test_a_row_that_takes_too_long(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fake = ["--adapter", str(HERE / "fake_sides.py"), "--peers", "hanging", "--rows", "delta_rule"]
    assert command(*fake, "--limit", "4") == 1
    assert "it took longer than 4 s" in capsys.readouterr().err
    document = json.loads((tmp_path / "peers.json").read_text())
    assert "it took longer than 4 s" in document["rows"][0]["error"]
    assert "Rows lost" in (tmp_path / "peers.md").read_text()


def test_goes_on_where_it_stopped(
    command: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    asked = []

    def measured(options: object, row: rows.Row) -> dict:
        asked.append(row.name)
        lost = {"error": "exit code -11: gone"} if row.op == "kda" else {"sides": {}}
        return row.describe() | lost

    monkeypatch.setattr(command.module, "measured", measured)
    names = [row.name for row in rows.chosen(["small"])]

    def run() -> list[str]:
        asked.clear()
        assert command("--json") == 1
        document = json.loads(capsys.readouterr().out)
        assert [row["row"] for row in document["rows"]] == names
        return list(asked)

    assert run() == names
    kept = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(kept[: kept.index(names[1]) + 20])  # a line that was cut
    assert run() == names[1:]
    assert run() == [name for name in names if name.startswith("kda")]  # what was lost only


def test_a_call_that_cannot_be_captured(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is measured anew by another process, which does not try that again."""
    answers = [(75, '{"side": "a", "reason": "no"}'), (75, '{"side": "b", "reason": "never"}'),
               (0, '{"row": "x"}')]  # fmt: skip
    plain = []

    def run_child(options: object, name: str, given: dict, limit: float) -> tuple:
        plain.append(dict(given))
        code, line = answers[len(plain) - 1]
        return code, f"a library says something\n{line}\n", ""

    monkeypatch.setattr(command.module, "run_child", run_child)
    monkeypatch.setattr(sys, "argv", ["peers", "--device", "cpu"])
    found = command.module.measured(command.module.parse(), rows.SMALL[0])
    assert found["row"] == "x"
    assert plain == [{}, {"a": "no"}, {"a": "no", "b": "never"}]


def test_refuses_what_there_is_not(command: Callable[..., int]) -> None:
    assert "there is no nobody; there are fla-triton" in command("--peers", "nobody")
    assert "there is no set none" in command("--sets", "none")


@pytest.mark.parametrize("row", rows.SMALL, ids=lambda row: row.name)
def test_oracle_is_the_recurrence(row: rows.Row) -> None:
    x = inputs.make(row, "cpu")
    sample = oracle.Sample(row)
    part = oracle.leaves(row, x, sample)
    o, state = oracle.outputs(row, x, sample, part)
    exact = {name: t.double() for name, t in x.given().items()}
    if row.bounded:
        exact |= {"A_log": x.A_log.double(), "dt_bias": x.dt_bias.double()}
    wanted_o, wanted_state = recurrence(
        **exact, cu_seqlens=x.cu_seqlens, l2norm=row.bounded, beta_sigmoid=row.bounded,
        gate=row.bounded, lower_bound=-5.0 if row.bounded else None,
    )  # fmt: skip
    assert oracle.relative(o, sample.of("o", wanted_o)) < 1e-12
    assert oracle.relative(state, sample.of("final_state", wanted_state)) < 1e-12
    if row.op != "delta_rule" and row.bounded:
        gates = -5 * torch.sigmoid(x.A_log.exp()[:, None] * (x.g.float() + x.dt_bias))
        assert gates.mean() == pytest.approx(rows.GATE_MEANS["kda"][row.gate], rel=0.5)


def test_who_declines_what() -> None:
    """Without the libraries: a side must know what it does not compute before it is loaded."""
    peers = {kind.name: kind() for kind in sides.PEERS}
    for row in rows.chosen(list(rows.SETS)):
        declined = {name: one.declines(row) for name, one in peers.items()}
        assert declined["fla-triton"] is None
        assert (declined["flash-kda"] is None) <= (row.op == "kda" and row.bounded and row.D == 128)
        assert (declined["flash-qla"] is None) == (row.op != "kda" and row.D == 128)
        assert (declined["flashinfer"] is None) <= (row.op != "kda" and row.part == "forward")
        assert (declined["cudnn"] is None) == (row.D in (64, 128))


def test_rows_cover_what_they_should() -> None:
    forward = rows.chosen(["targets", "sweep"])
    assert len({row.name for row in forward}) == len(forward)
    further = [row for row in forward if row.must is None]
    assert len(further) >= 20
    assert {row.D for row in further} >= {64, 128, 256} and {row.dtype for row in further} >= {
        "fp16"
    }
    assert {row.H for row in further} >= {1, 128}
    assert min(row.T for row in further) <= 64 and max(row.T for row in further) == 131072
    assert any(len(set(row.lengths)) > 1 for row in further)
    assert any(row.gate == "weak" for row in further)
    kda = [row for row in forward if row.op == "kda"]
    both = {(row.H, row.T, row.bounded, row.gate) for row in kda}
    wanted = {(row.H, row.T, row.bounded) for row in kda if row.must}
    assert {(*key, gate) for key in wanted for gate in ("weak", "strong")} <= both


@pytest.mark.parametrize(
    ("op", "row"),
    [
        ("gated_delta_rule", rows.Row("gdn", 1, 2, 1, 128, D=32, part="backward")),
        ("kda", rows.Row("kda", 2, 2, 1, 64, D=16)),
    ],
)
def test_floor_is_what_the_command_says(op: str, row: rows.Row) -> None:
    build = os.environ.get("WYVERN_BUILD")
    if build is None:
        pytest.skip("WYVERN_BUILD is not set")
    command = [Path(build) / "bin/wyvern", "bench", op, "--json", "--device", "cpu"]
    shape = f"T={row.T},H={row.H},HV={row.HV},K={row.D},V={row.D}"
    command += ["--shape", shape, "--pass", row.part]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    floor = json.loads(done.stdout)["floor"]
    found = work.work(row, inputs.make(row, "cpu"))
    assert found["flops"] == pytest.approx(floor["flops"])
    assert found["bytes"] == pytest.approx(floor["bytes"], rel=1e-3)
