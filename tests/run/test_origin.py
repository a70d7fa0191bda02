"""`--from RUN[@STEP]`: which run and step it names, and what a run records of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.run.files.origin import (
    ORIGIN_NAME,
    Origin,
    OriginRecord,
    check_origin,
    check_same_origin,
    find_origin,
    read_origin,
    write_origin,
)

RECORD = OriginRecord(run="/runs/first", step=4, fresh_optimizer=False)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config_of(output_dir: str) -> RunConfig:
    Path("run.yaml").write_text(f"base_model: org/name\ndatasets: train.jsonl\noutput_dir: {output_dir}\n")
    return load_config(Path("run.yaml")).config


def run_in(output_dir: str) -> RunConfig:
    """A run that has left its config."""
    config = config_of(output_dir)
    (Path(output_dir) / "run").mkdir(parents=True)
    (Path(output_dir) / "run" / "config.yaml").write_text(to_yaml(config))
    return config


@pytest.mark.parametrize(
    ("text", "directory", "step"),
    [
        ("out", "out", None),
        ("out@0", "out", 0),
        ("out@120", "out", 120),
        ("out@7", "out@7", None),
        ("out@7@8", "out@7", 8),
        ("o@x", "o@x", None),
    ],
)
def test_the_run_and_the_step(text: str, directory: str, step: int | None) -> None:
    """A directory that exists is the run, whatever its name ends with."""
    run_in(directory)
    origin = find_origin(text, RunLog(), fresh_optimizer=True)
    assert (str(origin.config.output_dir), origin.step, origin.fresh_optimizer) == (directory, step, True)
    assert str(origin) == directory + ("" if step is None else f"@{step}")


@pytest.mark.parametrize("text", ["none", "none@3", "out@", "out@-1", "out@" + "9" * 19, "@3", ""])
def test_no_run(text: str) -> None:
    run_in("out")
    with pytest.raises(BadInput, match=f"^--from {text}: "):
        find_origin(text, RunLog(), fresh_optimizer=False)


def test_a_run_needs_directories_of_its_own() -> None:
    origin = Origin(config=run_in("out"), step=None, fresh_optimizer=False)
    check_origin(config_of("other"), origin)
    with pytest.raises(BadInput, match="--from out: that run has the same output_dir, out"):
        check_origin(config_of("./out"), origin)
    storage = origin.config.storage
    with pytest.raises(BadInput, match=r"that run has its store in the same directory, .*out\.store"):
        check_origin(config_of("other").model_copy(update={"storage": storage}), origin)


def test_a_record_comes_back_and_is_forgotten() -> None:
    config = config_of("out")
    assert read_origin(config) is None
    write_origin(config, None)
    for record in (RECORD, OriginRecord(run="/ä", step=0, fresh_optimizer=True)):
        write_origin(config, record)
        assert read_origin(config) == record
    assert (RECORD.first_step, read_origin(config)) == (4, OriginRecord(run="/ä", step=0, fresh_optimizer=True))
    write_origin(config, None)
    assert read_origin(config) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"run": 3, "step": 4, "fresh_optimizer": false}', "\udcff"])
def test_a_damaged_record_is_none(content: str) -> None:
    config = config_of("out")
    write_origin(config, RECORD)
    (Path("out") / "run" / ORIGIN_NAME).write_bytes(content.encode(errors="surrogateescape"))
    assert read_origin(config) is None


def test_a_record_that_cannot_be_written() -> None:
    (Path("out") / "run" / ORIGIN_NAME).mkdir(parents=True)
    with pytest.raises(EnvironmentFailure, match=f"{ORIGIN_NAME} cannot be written"):
        write_origin(config_of("out"), RECORD)


def test_a_run_that_has_begun_elsewhere() -> None:
    config, first = config_of("out"), run_in("first")
    record = OriginRecord(run=str(Path("first").resolve()), step=4, fresh_optimizer=False)

    def origin(step: int | None, *, fresh_optimizer: bool = False) -> Origin:
        return Origin(config=first, step=step, fresh_optimizer=fresh_optimizer)

    with pytest.raises(BadInput, match="--from first@4: the run in out has begun already, at its base model"):
        check_same_origin(config, origin(4))
    write_origin(config, record)
    check_same_origin(config, origin(4))
    check_same_origin(config, origin(None))
    for other in (origin(5), origin(4, fresh_optimizer=True), origin(None, fresh_optimizer=True)):
        with pytest.raises(BadInput, match=f"has begun already, from {record.run}@4"):
            check_same_origin(config, other)
    write_origin(config, RECORD)
    with pytest.raises(BadInput, match="has begun already, from /runs/first@4"):
        check_same_origin(config, origin(4))
