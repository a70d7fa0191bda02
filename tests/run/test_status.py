"""How far runs have come: each state, what a run without some of its files shows, and where runs are looked for."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.console import RunLog
from ratel_cli.report.page.run_report import key_figures
from ratel_cli.report.words.panel import Panel
from ratel_cli.report.words.status import STATES, RunStatus, status_lines, status_to_json
from ratel_cli.run.ask.report import report_of
from ratel_cli.run.ask.status import find_runs, find_statuses
from ratel_cli.run.files.run_directory import find_run
from ratel_cli.store.lock import OWNER_FILE_NAME, StoreLock, find_use
from tests.report.recorded import FACTS, steps, write_metrics, write_run
from tests.report.test_panel import FACTS as FACTS_OF_PANEL


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(path: Path) -> RunStatus:
    [found] = find_statuses(path, RunLog(StringIO()))
    return found


@pytest.fixture
def locked(here: Path) -> Iterator[Path]:
    """The output directory of a run whose store this process has open."""
    output = write_run(here / "out", steps(42))
    with StoreLock([here / "out.store"], create=False, wait_seconds=0.1):
        yield output


def test_a_run_that_trains(locked: Path) -> None:
    facts = locked / "run" / "run.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "pid": os.getpid()}))
    found = status(locked)
    assert (found.state, found.step, found.num_steps, found.pid) == ("running", 42, 100, os.getpid())
    assert found.figures["loss"] == pytest.approx(steps(42)[-1].loss)
    assert found.tokens_per_second == pytest.approx(8192 / 4, rel=0.1)
    assert found.steps_per_epoch == FACTS.steps_per_epoch is not None
    assert found.seconds_left == pytest.approx(58 * 4, rel=0.1)
    assert found.store_bytes == 1000
    assert found.last_step_at is not None


def test_speed_is_one_number(locked: Path) -> None:
    """In the status, the report and the panel, also of a run that was resumed; counted by hand."""
    made = [replace(each, tokens=each.step * 100, predicted_seconds=float(each.step // 9)) for each in steps(42)]
    write_metrics(locked / "run" / "metrics.jsonl", made)
    speed = sum(range(2300, 4300, 100)) / math.fsum(each.step_seconds for each in made[22:])
    found = status(locked)
    assert found.tokens_per_second == pytest.approx(speed, rel=1e-12)
    report = report_of(find_run(locked, RunLog(StringIO())))
    [figure] = [each for each in key_figures(report) if each.name == "speed"]
    assert figure.context.startswith("last 20 steps; ")
    assert f"  {speed:.4g}  " in status_lines([found], now=datetime.now().astimezone())[1]
    assert figure.value == f"{speed:.4g} tokens/s"
    for first in (0, 30, 41):
        panel = Panel(replace(FACTS_OF_PANEL, first_step=first), predicted_seconds=1.0, earlier_steps=made[:first])
        for each in made[first:]:
            panel.show(each)
        assert panel.lines(80)[4].plain.startswith(f"{speed:.4g} tokens/s  norm")


def test_another_command_that_has_the_store_open_is_not_training(locked: Path) -> None:
    assert status(locked).state == "in use"


def test_a_look_at_the_lock_leaves_no_trace(here: Path) -> None:
    """Nobody's lock is broken, and the store can be locked afterwards."""
    store = write_run(here / "out", steps(1)).with_name("out.store")
    with StoreLock([store], create=False, wait_seconds=0.1):
        assert find_use(store).is_locked and find_use(store).is_locked
        assert (store / OWNER_FILE_NAME).exists()
    assert not find_use(store).is_locked
    with StoreLock([store], create=False, wait_seconds=0.0):
        pass
    assert not find_use(here / "nowhere").is_locked


@pytest.mark.parametrize(
    ("num_steps", "exported_step", "owner", "has_store", "state"),
    [
        (100, 100, None, True, "finished"),
        (100, 100, None, False, "finished"),
        (100, 100, 7, True, "finished"),
        (100, None, None, True, "stopped"),  # before its export
        (100, 50, None, True, "stopped"),  # it was longer than before
        (42, None, None, True, "stopped"),
        (42, None, 7, True, "killed"),
        (42, None, None, False, "no store"),
        (0, None, None, True, "stopped"),
    ],
)
def test_a_run_that_no_process_trains(
    here: Path, num_steps: int, exported_step: int | None, owner: int | None, has_store: bool, state: str
) -> None:
    write_run(here / "out", steps(num_steps), exported_step=exported_step, owner=owner, has_store=has_store)
    found = status(here / "out")
    assert (found.state, found.step, found.num_steps) == (state, num_steps, 100)
    assert state in STATES


def test_a_run_of_an_earlier_version_has_no_facts(here: Path) -> None:
    assert status(write_run(here / "a", steps(3), facts=None)).num_steps is None
    assert status(write_run(here / "b", steps(3), facts=None, keys="max_steps: 7\n")).num_steps == 7


def test_half_a_line_and_lines_of_nonsense_are_no_steps(here: Path) -> None:
    output = write_run(here / "out", [])
    for rest in ('{"step": 4, "lo', "nonsense\n", "\n\n", "[" * 100_000 + "\n", '{"step": 9}\n'):
        write_metrics(output / "run" / "metrics.jsonl", steps(3), rest=rest)
        assert status(output).step == 3


def test_a_long_log_is_read_from_its_end(here: Path) -> None:
    output = write_run(here / "out", steps(500))
    found = status(output)
    assert (found.step, found.figures["loss"]) == (500, steps(500)[-1].loss)


def test_a_loss_that_is_not_finite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "out", [replace(steps(1)[0], loss=float("nan"), applied=False)])
    assert main(["status", "out", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"]
    assert row["loss"] is None
    assert " - " in status_lines([status(here / "out")], now=datetime.now().astimezone())[1]


def test_runs_are_found_below_a_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("outputs/a", "outputs/b", "x/y/z/c", "x/y/z/u/far", ".hidden/d"):
        write_run(here / name, steps(1))
    (here / "link").symlink_to(here / "outputs")
    assert [str(path) for path in find_runs(Path("."))] == ["outputs/a", "outputs/b", "x/y/z/c"]
    assert main(["status", "outputs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "state" and [line.split()[-1] for line in lines[1:]] == ["outputs/a", "outputs/b"]
    assert main(["status", "outputs/a", "--json"]) == 0
    assert [row["run"] for row in json.loads(capsys.readouterr().out)["runs"]] == ["outputs/a"]
    assert main(["status", ".hidden/d/run/config.yaml"]) == 0


def test_there_may_be_no_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "empty").mkdir()
    assert main(["status", "empty"]) == 0
    assert "there is no run in empty" in capsys.readouterr().err
    assert main(["status", "empty", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}
    assert main(["status", "nowhere"]) == 2


def test_a_run_that_cannot_be_read_does_not_hide_the_others(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "a", steps(2))
    write_run(here / "b", steps(2))
    (here / "a" / "run" / "config.yaml").write_text("no_such_key: 1\n")
    (here / "b" / "run" / "metrics.jsonl").unlink()
    (here / "b" / "run" / "metrics.jsonl").mkdir()
    assert main(["status"]) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[1:]] == ["damaged", "stopped"]
    assert "no_such_key" in printed.err


def test_relative_paths_begin_where_the_run_was_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = write_run(here / "deep" / "out", steps(2))
    (output / "run" / "config.yaml").write_text(
        "base_model: a/b\ndatasets: d\noutput_dir: deep/out\nstorage: {paths: [deep/out.store]}\n"
    )
    assert status(output).state == "stopped"
    monkeypatch.chdir(here / "deep")
    assert status(Path("out")).state == "stopped"


def test_the_store_of_another_run_does_not_count(here: Path) -> None:
    first = write_run(here / "first", steps(2))
    record = {"format_version": 1, "run": str(first), "made": "now"}
    (here / "first.store" / "ratel.run").write_text(json.dumps(record))
    copy = Path(shutil.copytree(first, here / "copy"))
    assert (status(first).state, status(copy).state) == ("stopped", "no store")
    first.rename(here / "away")  # then the copy is the run that has moved
    assert status(copy).state == "stopped"


def test_a_run_does_not_count_the_files_of_a_run_below_it(here: Path) -> None:
    outer = write_run(here / "outer", steps(2))
    before = status(outer).output_bytes
    inner = write_run(outer / "deep" / "inner", steps(2))
    (inner / "model.safetensors").write_bytes(bytes(5000))
    (outer / "notes").write_bytes(bytes(10))
    assert status(outer).output_bytes == before + 10
    assert status(inner).output_bytes > 5000 and status(inner).store_bytes == 1000


def test_the_words_of_a_row() -> None:
    now = datetime(2026, 11, 23, 8, 0).astimezone()
    found = RunStatus(
        output_dir=Path("outputs/my-run"),
        state="running",
        step=420,
        num_steps=FACTS.num_steps * 10,
        figures={"loss": 2.34567},
        tokens_per_second=1240.4,
        seconds_left=11100.0,
        last_step_at=now - timedelta(seconds=12),
        store_bytes=3 << 30,
    )
    [_, line] = status_lines([found], now=now)
    assert re.split(r"\s{2,}", line) == [
        "running", "420/1000", "2.3457", "1240", "3 h 05 min", "12 s ago", "3.00 GiB", "outputs/my-run",
    ]  # fmt: skip
    [_, line] = status_lines([replace(found, steps_per_epoch=300, best_step=400)], now=now)
    assert "  420/1000, epoch 2/4, best 400  " in line
    assert json.loads(json.dumps(status_to_json([found])))["runs"][0]["last_step_at"] == now_text(found)


def now_text(found: RunStatus) -> str:
    assert found.last_step_at is not None
    return found.last_step_at.isoformat(timespec="seconds")


def test_a_config_whose_run_has_not_begun(here: Path) -> None:
    config = here / "new.yaml"
    config.write_text("base_model: a/b\ndatasets: d\n")
    assert status(config).state == "not begun"
