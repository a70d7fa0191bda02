"""Where the relative paths of a run's own config begin, and how they are written back."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config, to_yaml
from ratel_cli.console import RunLog
from ratel_cli.run.files.run_directory import as_recorded_by_run, find_run

TEXT = """
base_model: m
chat_template_jinja: t.jinja
datasets: [{path: d.jsonl}, {path: "e/**/*.jsonl"}, {path: on/hub}, {path: /abs/f.jsonl}]
test_datasets: t.jsonl
output_dir: deep/out
storage: {paths: [s], snapshot: {path: u, every: 3}}
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which a run was started, with a config of relative paths. There is no store."""
    started = tmp_path / "x"
    make_run(started / "deep" / "out")
    for name in ("d.jsonl", "t.jsonl", "t.jinja", "e/f/g.jsonl", "m/config.json", "elsewhere/note"):
        (started / name).parent.mkdir(parents=True, exist_ok=True)
        (started / name).write_text("")
    monkeypatch.chdir(started)
    return started


def make_run(output: Path, text: str = TEXT) -> None:
    (output / "run").mkdir(parents=True)
    (output / "run" / "config.yaml").write_text(text)


def find(path: str | Path, *overrides: str) -> RunConfig:
    return find_run(Path(path), RunLog(), overrides)


def test_there_they_stay_as_they_are(started: Path) -> None:
    recorded = load_config(started / "deep/out/run/config.yaml").config
    assert find("deep/out") == recorded
    assert find(started / "deep/out") == recorded.model_copy(update={"output_dir": started / "deep/out"})


@pytest.mark.parametrize("is_moved", [False, True])
@pytest.mark.parametrize(
    ("here", "path"), [("elsewhere", "../deep/out"), ("deep", "out"), ("deep/out", "."), ("/", "")]
)
def test_elsewhere_they_are_absolute(
    started: Path, monkeypatch: pytest.MonkeyPatch, here: str, path: str, is_moved: bool
) -> None:
    before = find("deep/out")
    if is_moved:
        started = started.rename(started.with_name("y"))
    monkeypatch.chdir(started / here)
    config = find(path or started / "deep/out")
    assert config.output_dir == Path(path or started / "deep/out")
    assert (config.base_model, config.chat_template_jinja) == (str(started / "m"), str(started / "t.jinja"))
    assert [each.path for each in config.datasets] == [
        str(started / "d.jsonl"), str(started / "e/**/*.jsonl"), "on/hub", "/abs/f.jsonl",
    ]  # fmt: skip
    assert [each.path for each in config.test_datasets] == [str(started / "t.jsonl")]
    assert config.storage.snapshot is not None
    assert [*config.storage.paths, config.storage.snapshot.path] == [started / "s", started / "u"]
    assert to_yaml(as_recorded_by_run(config)) == to_yaml(before)


def test_overrides_begin_here(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started / "elsewhere")
    config = find("../deep/out", "datasets.0.path=note", "storage.snapshot.path=v")
    assert config.datasets[0].path == str(started / "elsewhere/note")
    assert config.storage.snapshot is not None and config.storage.snapshot.path == started / "elsewhere/v"
    written = as_recorded_by_run(config)
    assert (written.datasets[0].path, written.datasets[1].path) == (config.datasets[0].path, "e/**/*.jsonl")
    assert (written.output_dir, written.storage.paths) == (Path("deep/out"), (Path("s"),))


def test_a_link_to_the_output(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is where it was named; through a link elsewhere, it is where the link leads."""
    (started / "deep/out").rename(started / "elsewhere/out")
    (started / "deep/out").symlink_to(started / "elsewhere/out")
    (started / "link").symlink_to(started / "deep")
    monkeypatch.chdir(started / "deep")
    for path in ("out", "../deep/out", started / "deep/out"):
        assert find(path).storage.paths == (started / "s",)
    assert find(started / "elsewhere/out").storage.paths == (Path("s"),)  # its place says nothing
    monkeypatch.chdir(started)
    assert find("elsewhere/../deep/out").storage.paths == (Path("s"),)


@pytest.mark.parametrize("output", ["../x/deep/out", "{here}/deep/out", "deep/other"])
def test_a_place_that_says_nothing(started: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    file = started / "deep/out/run/config.yaml"
    file.write_text(TEXT.replace("deep/out", output.format(here=started)))
    monkeypatch.chdir(started / "elsewhere")
    assert find("../deep/out").storage.paths == (Path("s"),)


def test_a_store_in_the_current_directory_does_not_count(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another run's, with the same paths."""
    other = started.with_name("other")
    make_run(other / "deep" / "out")
    (other / "s").mkdir()
    (other / "s/ratel.store").write_text("")
    monkeypatch.chdir(other)
    assert find("../x/deep/out").storage.paths == (started / "s",)
    assert find("deep/out").storage.paths == (Path("s"),)


def test_where_it_was_started_an_output_directory_may_be_elsewhere(
    started: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link leads there. The current directory has what was recorded; above the output there is nothing."""
    big = tmp_path / "big" / "deep"
    (started / "deep").rename(tmp_path / "deep")
    (tmp_path / "big").mkdir()
    (tmp_path / "deep").rename(big)
    (started / "deep").symlink_to(big)
    for path in ("deep/out", big / "out"):
        config = find(path)
        assert (config.base_model, config.storage.paths) == ("m", (Path("s"),))
        assert as_recorded_by_run(config).base_model == "m"
    monkeypatch.chdir(started / "elsewhere")
    config = find("../deep/out")
    assert config.base_model == str(started / "m") and as_recorded_by_run(config).base_model == "m"


def test_what_has_not_moved_with_the_run_begins_here(started: Path) -> None:
    (started / "archive").mkdir()
    (started / "deep").rename(started / "archive/deep")
    config = find("archive/deep/out")
    assert (config.base_model, config.storage.paths) == ("m", (started / "archive/s",))
    written = as_recorded_by_run(config)
    assert (written.base_model, written.storage.paths, written.output_dir) == ("m", (Path("s"),), Path("deep/out"))


@pytest.mark.parametrize("override", ["base_model=m", "datasets.0.path=d.jsonl", "datasets=[{path: d.jsonl}]"])
def test_overrides_that_are_spelled_as_what_is_recorded(
    started: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    here = started / "elsewhere"
    (here / "m").mkdir()
    (here / "d.jsonl").write_text("")
    monkeypatch.chdir(here)
    config = find("../deep/out", override)
    is_data = "d.jsonl" in override
    assert config.datasets[0].path == str((here if is_data else started) / "d.jsonl")
    assert config.base_model == str((started if is_data else here) / "m")


def test_other_names_of_what_is_recorded(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(started / "elsewhere")
    config = find("../deep/out", "base_model=../m", "storage.paths=[../elsewhere/../s]")
    assert as_recorded_by_run(config).base_model == "m"


def test_a_config_file_begins_here(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run that was started elsewhere has its records in the same output directory, they have absolute paths."""
    (started / "run.yaml").write_text(TEXT.replace("deep/out", "out"))
    (started / "deep/m").mkdir()
    monkeypatch.chdir(started / "deep")
    config = find("../run.yaml")
    assert config.output_dir == Path("out") and config.storage.paths[0].parent == Path("s")
    written = as_recorded_by_run(config)
    assert (written.base_model, written.output_dir) == (str(started / "deep/m"), Path("deep/out"))
    assert written.storage.paths == (started / "deep" / config.storage.paths[0],)
    assert written.datasets[0].path == "d.jsonl", "it is not there"


def test_the_current_directory_as_output(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(started / "own", "base_model: m\ndatasets: d\noutput_dir: .\n")
    monkeypatch.chdir(started)
    assert find("own").storage.paths == (started / "own/ratel.store",)
