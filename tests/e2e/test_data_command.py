"""`ratel data`: the samples that a run trains on with their mask, counts of each dataset, and rejected rows."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ratel_cli.console import RunLog
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import CHAT, as_json, assert_rejected, ratel, ratel_command, works

SAMPLE = "<|user|>Which number is 0?<|assistant|>⟦0 is even<|end|>⟧"


@pytest.mark.full
def test_samples_counts_and_packing(make_config: MakeConfig, rows: Path) -> None:
    config = make_config("run", data_type=CHAT)
    lines = works("data", config, "-n", 2).stdout.splitlines()
    assert lines[0].startswith(f"{rows}, sample 1: ") and lines[0].endswith(" with loss")
    assert lines[1] == SAMPLE
    assert lines[3].startswith(f"{rows}, sample 2: ")
    table = [line.split() for line in lines if line.startswith(("dataset", str(rows) + "  "))]
    assert table[0][:2] == ["dataset", "rows"] and table[1][1:6] == ["48", "0", "0", "0", "48"]
    assert any(line.startswith("packing") and line.endswith(" % full") for line in lines)
    assert not config.output.exists(), "nothing is written"


def test_the_numbers_are_those_of_the_run(make_config: MakeConfig, rows: Path) -> None:
    config = make_config("run", data_type=CHAT, max_steps=None, num_epochs=1, val_set_size=5)
    before = as_json("data", config)
    config.succeed()
    steps = [row for row in config.metrics if "tokens" in row]
    assert len(steps) == before["epoch"]["num_steps"]
    assert sum(row["tokens"] for row in steps) == before["epoch"]["num_tokens"]
    assert before["num_held_out"] == 5
    (counts,) = before["datasets"]
    assert (counts["name"], counts["num_samples"]) == (str(rows), 48)
    assert as_json("data", config.output) == before, "from the tokens of the run"
    for sample in before["samples"]:
        assert len(sample["input_ids"]) == len(sample["has_loss"])
        assert sum(sample["has_loss"]) < len(sample["has_loss"])


@pytest.mark.full
def test_commands_share_tokens(make_config: MakeConfig, rows: Path) -> None:
    """Each of them repeats the notice that is in the one entry, so none has tokenised by itself."""
    config = make_config("run", data_type=CHAT)
    works("check", config)
    (entry,) = (Path(os.environ["XDG_CACHE_HOME"]) / "ratel" / "tokens").iterdir()
    meta = json.loads((entry / "meta.json").read_text())
    (entry / "meta.json").write_text(json.dumps({**meta, "notices": ["from the entry"]}))
    for command in ("data", "finetune"):
        assert "note: from the entry\n" in works(command, config).stderr
    assert list(entry.parent.iterdir()) == [entry]
    (own,) = (config.output / "run" / "tokens").iterdir()
    assert {each.name: each.read_bytes() for each in own.iterdir()} == {
        each.name: each.read_bytes() for each in entry.iterdir()
    }
    shutil.rmtree(entry)
    works("eval", config.output, rows)
    assert len(list(entry.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_ends_reading_at_once(
    make_config: MakeConfig, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """In the middle of a template, of which nothing is left: no process, no file."""
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    config = make_config("run", data_type=CHAT, chat_template_jinja=endless)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command = [str(ratel_command()), "data", str(config)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"takes long for one conversation" not in process.stderr.readline():
            assert process.poll() is None
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        rest = process.stderr.read().decode()
        assert process.wait() == code
    assert rest.splitlines() == ["Stopped. Run the same command again."]
    assert not Path("/proc", child).exists() and list(temporary.iterdir()) == []
    assert not (Path(os.environ["XDG_CACHE_HOME"]) / "ratel" / "tokens").exists()


@pytest.mark.full
def test_nothing_is_written_into_a_run(make_config: MakeConfig) -> None:
    """Nor into a folder with the name of the tokens', whoever made it. With the run's own settings its tokens do."""
    config = make_config("run")
    config.succeed()
    before = sorted(config.output.rglob("*"))
    works("data", config, "sequence_len=32")
    works("data", config.output)
    assert sorted(config.output.rglob("*")) == before
    mine = config.output.parent / "mine" / "run" / "tokens"
    mine.mkdir(parents=True)
    works("data", config, f"output_dir={mine.parents[1]}")
    assert not list(mine.iterdir())
    for cache in (config.output / "run" / "tokens").iterdir():  # as after `ratel clean`
        shutil.rmtree(cache)
        cache.mkdir()
        (cache / "notes.txt").write_text("mine")
    before = sorted(config.output.rglob("*"))
    works("data", config)
    assert sorted(config.output.rglob("*")) == before


@pytest.mark.full
def test_datasets_take_turns(make_config: MakeConfig, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(rows.read_text().splitlines(keepends=True)[0])
    sets = [{"path": str(rows), "type": CHAT}, {"path": str(tmp_path / "one.jsonl"), "type": CHAT}]
    config = make_config("run", datasets=sets, test_datasets=[sets[1]])
    found = as_json("data", config, "-n", 4)
    order = [(Path(sample["dataset"]).name, sample["number"]) for sample in found["samples"]]
    assert order == [(rows.name, 1), ("one.jsonl", 1), (rows.name, 2), (rows.name, 3)]
    assert [each["num_samples"] for each in found["test_datasets"]] == [1]
    assert "one.jsonl (test)" in ratel("data", config, "-n", 0).stdout


@pytest.mark.parametrize("num_bad", [0, 1, 30])
def test_rejected_rows(make_config: MakeConfig, rows: Path, tmp_path: Path, num_bad: int) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(rows.read_text() * 3 + "{}\n" * num_bad)
    config = make_config("run", rows=path, data_type=CHAT)
    ended = ratel("data", config, "--bad")
    if num_bad > 1:
        assert_rejected(ended, 2, "rejected 30 of 174 rows", num_errors=6)
        assert "hint: repair or remove these rows and 25 more; `ratel data" in ended.stderr
    else:
        assert ended.code == 0
    expected = [f"{path}:{145 + index}: the field 'messages' is missing" for index in range(num_bad)]
    shown = [line for line in ended.stdout.splitlines() if line.startswith(f"{path}:") or "no row" in line]
    assert shown == (expected or ["no row is rejected"])


def test_a_terminal_gets_colours_and_no_control_characters() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        RunLog(stream).marked([("a\x1b[2J\n", False), ("b", True)])
    assert file.getvalue() == "a\\x1b[2J\n⟦b⟧\n"
    assert "\x1b[2J" not in terminal.getvalue() and "⟦" not in terminal.getvalue() and "\x1b[" in terminal.getvalue()


def test_a_shape_has_no_data(tmp_path: Path) -> None:
    config = tmp_path / "shape.yaml"
    config.write_text("model_shape: {num_layers: 2, num_heads: 2, hidden_size: 8}\n")
    assert_rejected(ratel("data", config), 2, "`model_shape` is only for `ratel plan`")


@pytest.mark.full
@pytest.mark.parametrize(
    "command", [["data", "-n", 1], ["data", "--bad"], ["check"], ["finetune", "--dry-run"]], ids=str
)
def test_the_hint_about_bad_rows_works(
    make_config: MakeConfig, rows: Path, tmp_path: Path, command: Sequence[object]
) -> None:
    """It names no file that is deleted when the command ends, and the config as it was given."""
    path = tmp_path / "bad.jsonl"
    path.write_text(rows.read_text() + "{}\n" * 3)
    config = make_config("my run", rows=path, data_type=CHAT)
    name, *options = command
    ended = ratel(name, config, "seed=3", *options)
    assert ended.code == 2
    [hint] = {line for line in ended.stderr.splitlines() if "lists them" in line}
    words = shlex.split(hint.split("`")[1])
    assert words == ["ratel", "data", str(config), "seed=3", "--bad"]
    assert f"{path}:49: " in ratel(*words[1:]).stdout
    path.write_text(rows.read_text() * 3 + "{}\n")
    few = ratel("data", config, "-n", 0)
    assert f"rejected 1 of 145 rows: see `ratel data '{config}' --bad`" in few.stderr
