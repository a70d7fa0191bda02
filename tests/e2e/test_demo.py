"""`ratel demo`: what it makes, what it says, what it leaves, and how it ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ratel_cli.config.load import load_config
from ratel_cli.run.start import demo, planned_config
from tests.e2e.conftest import SignalAt
from tests.e2e.runs import Ended, ratel

FEW_STEPS = 8
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo has a smaller model, which it trains for some steps of short samples instead of 80."""
    write, config = demo.write_config, demo.LlamaConfig

    def shortened(directory: Path) -> Path:
        path = write(directory)
        text = re.sub(r"(?m)^sequence_len: .*\n", "", path.read_text())
        text = re.sub(r"(?m)^max_steps: .*$", f"max_steps: {FEW_STEPS}", text)
        path.write_text(re.sub(r"(?m)^warmup_steps: .*$", "warmup_steps: 1\nsequence_len: 128", text))
        return path

    monkeypatch.setattr(demo, "write_config", shortened)
    monkeypatch.setattr(demo, "LlamaConfig", lambda **values: config(**{**values, **SMALL}))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def losses(ended: Ended) -> tuple[float, float]:
    [(first, last)] = re.findall(rf"loss ([\d.]+) in step 1, ([\d.]+) in step {FEW_STEPS}\n", ended.stderr)
    return float(first), float(last)


@pytest.mark.parametrize("name", ["demo", "it's: a #demo"])
def test_the_config_is_that_of_the_clone_with_other_paths(tmp_path: Path, name: str) -> None:
    directory = tmp_path / name
    directory.mkdir()
    loaded, shipped = load_config(demo.write_config(directory)), load_config(planned_config.SHIPPED / "demo.yaml")
    assert loaded.notices == ()
    paths = {"base_model": str(directory / "base"), "output_dir": directory / "output"}
    assert {key: getattr(loaded.config, key) for key in paths} == paths
    assert loaded.config.datasets[0].path == str(directory / "topics.jsonl")
    kept = {"base_model", "datasets", "output_dir", "storage"}
    assert loaded.config.model_dump(exclude=kept) == shipped.config.model_dump(exclude=kept)


@pytest.mark.parametrize("name", ["file", "full", "dangling"])
def test_a_place_where_something_is_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    ended = ratel("demo", "--keep", tmp_path / name)
    assert ended.code == 2 and f"argument '--keep {tmp_path / name}': there is something already" in ended.stderr
    assert (tmp_path / "full" / "mine").read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ended = ratel("demo", "--keep", tmp_path / "file" / "demo")
    assert (ended.code, "the demo's files cannot be written: Not a directory" in ended.stderr) == (3, True)


@pytest.mark.full
@pytest.mark.usefixtures("few_steps")
def test_the_loss_falls_and_nothing_remains(temporary: Path) -> None:
    ended = ratel("demo")
    assert ended.code == 0, ended.stderr
    first, last = losses(ended)
    assert last < first
    assert ended.stderr.count("> What is lambda?\n") == 1 and ended.stdout, "the answer of so few steps is no text"
    assert ended.stderr.endswith("all of it is removed again; `ratel demo --keep DIR` keeps it\n")
    assert os.listdir(temporary) == []


@pytest.mark.full
@pytest.mark.usefixtures("few_steps")
def test_what_is_kept_is_a_run_like_any_other(tmp_path: Path) -> None:
    place = tmp_path / "new" / "demo"
    ended = ratel("demo", "--keep", place)
    assert ended.code == 0, ended.stderr
    assert {path.name for path in place.iterdir()} == {"base", "topics.jsonl", "demo.yaml", "output", "output.store"}
    before, after = (load_file(place / name / "model.safetensors") for name in ("base", "output"))
    assert any((after[name] != before[name]).any() for name in after)
    assert f"{place} has all of it; try `ratel report {place}/demo.yaml`" in ended.stderr
    assert ratel("finetune", place / "demo.yaml").code == 0
    assert ratel("verify", place / "output").code == 0


@pytest.mark.full
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_demo_that_is_stopped(temporary: Path, tmp_path: Path, signal_at: SignalAt, is_kept: bool) -> None:
    place = tmp_path / "demo"
    signal_at(2, signal.SIGINT)
    ended = ratel("demo", *(["--keep", place] if is_kept else []))
    assert ended.code == 130
    assert os.listdir(temporary) == []
    if is_kept:
        assert f"Stopped. Run `ratel finetune {place}/demo.yaml` to continue.\n" in ended.stderr
        assert ratel("finetune", place / "demo.yaml").code == 0
