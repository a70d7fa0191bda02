"""Which run a path names, and the message if it names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.run_directory import find_run, is_output_of_run

TEXT = "base_model: m\ndatasets: d.jsonl\noutput_dir: out\nstorage: {paths: [s]}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def output(here: Path) -> Path:
    """A run's output directory that has moved since the run."""
    (here / "moved" / "run").mkdir(parents=True)
    (here / "moved" / "run" / "config.yaml").write_text(TEXT)
    return here / "moved"


def test_a_directory_names_the_run_that_it_holds(output: Path) -> None:
    assert is_output_of_run(output)
    config = find_run(output, RunLog())
    assert (config.output_dir, config.storage.paths) == (output, (Path("s"),))


def test_a_file_names_the_run_of_its_config(output: Path) -> None:
    file = output / "run" / "config.yaml"
    assert not is_output_of_run(file)
    config = find_run(file, RunLog(), ["storage.paths=[a, b]"])
    assert (config.output_dir, config.storage.paths) == (Path("out"), (Path("a"), Path("b")))


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("none", None, r"^none: no such file$"),
        (".", None, r"not the output directory of a run: it has no run/config\.yaml"),
        ("a.yaml", "base_model: 3\ndatasets: d\n", r"a\.yaml:1:13: `base_model` must be text"),
        (
            "a.yaml",
            "model_shape: {num_layers: 1, num_heads: 1, hidden_size: 8}\n",
            "`model_shape` is only for `ratel plan`",
        ),
    ],
)
def test_paths_that_name_no_run(here: Path, path: str, text: str | None, message: str) -> None:
    if text is not None:
        (here / path).write_text(text)
    with pytest.raises(BadInput, match=message):
        find_run(Path(path), RunLog())


def test_notices_are_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.yaml").write_text(TEXT + "lr: 1.0\n")
    find_run(here / "a.yaml", RunLog())
    assert "`lr` is read as `learning_rate`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "x.yaml"], "missing option '--output'"),
        (["export", "-o", "d"], "missing argument"),
        (["export", "x.yaml", "-o", "d", "--step", "two"], "invalid value for '--step'"),
        (["export", "x.yaml", "-o", "d", "--step", "-1"], "invalid value for '--step'"),
        (["export", "x.yaml", "-o", "d"], "x.yaml: no such file"),
        (["verify"], "missing argument"),
        (["verify", "a", "b"], "unexpected extra argument"),
        (["verify", "x.yaml", "--json"], "x.yaml: no such file"),
        (["restore"], "missing argument"),
        (["restore", "x.yaml", "--from"], "requires an argument"),
        (["restore", "x.yaml", "seed=1"], "x.yaml: no such file"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
