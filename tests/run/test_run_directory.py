"""Which run a path names, and the message if it names none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.load import to_yaml
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of
from ratel_cli.run.files.run_directory import find_run, is_output_of_run, stores_on_machine, with_own_store
from ratel_cli.run.inputs.named_model import find_model

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


def test_no_notice_is_about_a_file_that_ratel_wrote(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments are the user's, and so is a config that names the same run."""
    written = output / "run" / "config.yaml"
    written.write_text(f"{TEXT}learning_rate: 5\n")
    find_run(output, RunLog())
    assert capsys.readouterr().err == ""
    find_run(output, RunLog(), ["lora_r=8"])
    assert "`lora_r` is ignored" in capsys.readouterr().err
    find_run(written, RunLog())
    assert f"{written}:" in capsys.readouterr().err


def test_a_file_names_the_run_of_its_config(output: Path) -> None:
    file = output / "run" / "config.yaml"
    assert not is_output_of_run(file)
    config = find_run(file, RunLog(), ["storage.paths=[a, b]"])
    own = f"out-{hash_of(os.path.realpath('out'))[:8]}.store"
    assert (config.output_dir, config.storage.paths) == (Path("out"), (Path("a") / own, Path("b") / own))


def test_the_store_has_a_directory_of_its_own(here: Path) -> None:
    """Named by its run; what a run has recorded, and the default, are its own already."""
    file = here / "a.yaml"
    file.write_text("base_model: m\ndatasets: d\noutput_dir: deep/out\n")
    default = find_run(file, RunLog())
    assert default.storage.paths == (Path("deep/out.store"),)
    assert find_run(file, RunLog(), ["storage.paths=deep/out.store"]).storage.paths == default.storage.paths
    named = find_run(file, RunLog(), ["storage.paths=[a, b]"])
    assert [path.parent for path in named.storage.paths] == [Path("a"), Path("b")]
    assert len({path.name for path in named.storage.paths}) == 1
    assert with_own_store(named) == named
    other = find_run(file, RunLog(), ["storage.paths=[a, b]", "output_dir=elsewhere/out"])
    assert not {path.name for path in other.storage.paths} & {path.name for path in named.storage.paths}
    file.write_text(to_yaml(named))
    assert find_run(file, RunLog()) == named


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("none", None, r"^none: no such file or directory$"),
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.yml", "did you mean a.yaml?"),
        ("nope.yaml", "check the path; `ratel init` writes a config"),
        ("my-rum", "did you mean my-run?"),
        ("notes", "`ratel status` lists the runs below this directory"),
        ("nowhere/a.yaml", "check the path; `ratel init` writes a config"),
    ],
)
def test_the_hint_for_a_run_that_is_not_there(here: Path, name: str, hint: str) -> None:
    """A config, or a directory with a run in it, with a similar name; else how to find it."""
    (here / "a.yaml").write_text(TEXT)
    (here / "notes.txt").write_text("")
    (here / "notes-2").mkdir()
    (here / "my-run" / "run").mkdir(parents=True)
    (here / "my-run" / "run" / "config.yaml").write_text(TEXT)
    for find in (find_run, lambda path, log: find_model(path, log, [])):
        with pytest.raises(BadInput) as caught:
            find(Path(name), RunLog())
        assert (caught.value.message, caught.value.hint) == (f"{name}: no such file or directory", hint)


def test_the_stores_of_ranks(here: Path, output: Path) -> None:
    """Within those of rank 0, and elsewhere if the config says so; as each has recorded it, for a run's directory."""
    file = here / "a.yaml"
    file.write_text("base_model: m\ndatasets: d\nstorage: {paths: [s]}\n")
    [first] = stores_on_machine(file, (), 1)[0]
    assert stores_on_machine(file, (), 3) == [(first,), (first / "rank-1.store",), (first / "rank-2.store",)]
    named = stores_on_machine(file, ["storage.paths=['a{rank}', 'b{local_rank}']"], 2)
    assert named == [
        (Path("a0") / first.name, Path("b0") / first.name),
        (Path("a1") / first.name / "rank-1.store", Path("b1") / first.name / "rank-1.store"),
    ]
    assert stores_on_machine(output, (), 2) == [(Path("s"),), (Path("s/rank-1.store"),)]
    recorded = output / "run" / "ranks" / "1" / "run" / "config.yaml"
    recorded.parent.mkdir(parents=True)
    recorded.write_text(TEXT.replace("[s]", "[elsewhere]"))
    assert stores_on_machine(output, (), 2)[1] == (Path("elsewhere"),)


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
