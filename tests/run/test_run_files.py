"""Which files in `run/` are Ratel's: those that the marker lists."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.errors import BadInput
from ratel_cli.model.files.marker import Marker, read_marker, write_marker
from ratel_cli.run.files.output import claim_output, may_claim_at_once
from ratel_cli.run.files.run_files import (
    files_of_run,
    forget_missing,
    is_users,
    list_run_files,
    own_run_files,
    reject_run_files_of_others,
    write_run_file,
)

OF_EVERY_RUN = {"config.yaml", "run.json", "hardware.json", "model.json", "plan.json", "metrics.jsonl"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("base_model: m\ndatasets: d\noutput_dir: out\n")
    return load_config(tmp_path / "a.yaml").config


def plant(name: str, text: str = "mine") -> Path:
    path = Path("out/run", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_names_that_a_run_may_write(config: RunConfig) -> None:
    assert {*files_of_run(config, has_origin=False)} == {*OF_EVERY_RUN, "rejects.jsonl"}
    more = config.model_copy(update={"trace": True, "report_to": ("wandb",), "test_datasets": config.datasets})
    assert {*files_of_run(more, has_origin=True)} == {
        *OF_EVERY_RUN, "rejects.jsonl", "test-rejects.jsonl", "trace.json", "origin.json", "wandb.json", "wandb.log",
    }  # fmt: skip


def test_only_what_is_listed_is_ratels(config: RunConfig) -> None:
    claim_output(config)
    assert own_run_files(config.output_dir) == set()
    plant("trace.json")
    list_run_files(config.output_dir, ["plan.json", "report.html"])
    plant("plan.json")
    assert own_run_files(config.output_dir) == {"plan.json", "report.html"}
    assert is_users(config.output_dir, "trace.json") and not is_users(config.output_dir, "plan.json")
    reject_run_files_of_others(config, ["plan.json", "metrics.jsonl"], overwrite=False)
    with pytest.raises(BadInput, match=r"out/run/trace\.json would be replaced, but Ratel did not write it") as caught:
        reject_run_files_of_others(config, ["plan.json", "trace.json"], overwrite=False)
    assert "--overwrite" in str(caught.value.hint)
    reject_run_files_of_others(config, ["plan.json", "trace.json"], overwrite=True)
    forget_missing(config.output_dir, ["plan.json", "report.html", "trace.json"])
    assert own_run_files(config.output_dir) == {"plan.json"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "tokens", ".", "pipe"])
def test_nothing_is_written_through_a_link(config: RunConfig, name: str, overwrite: bool) -> None:
    """Nor into a pipe, not even if a file of that name is listed."""
    elsewhere = Path("elsewhere")
    elsewhere.mkdir()
    claim_output(config, ["metrics.jsonl", "pipe"])
    place = Path("out/run", name)
    place.parent.mkdir(exist_ok=True)
    if name == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(elsewhere.resolve())
    with pytest.raises(BadInput, match="is a link" if name != "pipe" else "is not a regular file") as caught:
        reject_run_files_of_others(config, ["metrics.jsonl", "pipe"], overwrite=overwrite)
    assert "move it away" in str(caught.value.hint)


def test_a_link_that_appears_later_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "plan.json").symlink_to("mine")
    with pytest.raises(OSError, match="symbolic link"):
        write_run_file(tmp_path / "plan.json", "{}")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_claim_waits_where_the_user_has_files(config: RunConfig) -> None:
    assert may_claim_at_once(config)
    plant("notes.txt")
    assert not may_claim_at_once(config)
    shutil.rmtree("out")
    Path("out").mkdir()
    assert may_claim_at_once(config)
    write_marker(Path("out"), Marker(run="/x", is_run=False))
    assert may_claim_at_once(config)
    write_marker(Path("out"), Marker(run="/x", is_run=False, step=3))
    assert not may_claim_at_once(config)
    claim_output(config)
    marker = read_marker(Path("out"))
    assert marker == Marker(run=os.path.realpath("out"), is_run=True, step=3, run_files=())
    assert may_claim_at_once(config)
