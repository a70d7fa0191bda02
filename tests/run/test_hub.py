"""The upload of an export: only its own files, only where the config says, and never a reason to fail."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.model.files.marker import Marker, write_marker, written_file
from ratel_cli.run.train.hub import upload_export


class FakeHub:
    """Records what is asked of it, and fails at one of the calls if it should."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.calls: list[tuple[str, dict[str, object]]] = []

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> object:
        self._call("create_repo", repo_id=repo_id, private=private, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def upload_folder(
        self, *, repo_id: str, folder_path: str, allow_patterns: list[str], commit_message: str
    ) -> object:
        self._call("upload_folder", repo_id=repo_id, folder=folder_path, files=allow_patterns, message=commit_message)
        return None

    def _call(self, name: str, **values: object) -> None:
        self.calls.append((name, values))
        if name == self.failing:
            raise ConnectionError("no route to the hub\nmore")


def config_of(directory: Path, **changes: object) -> RunConfig:
    values = {"hub_model_id": "org/model", "output_dir": directory, **changes}
    return RunConfig(base_model="base", datasets=(DatasetConfig(path="a.jsonl"),), **values)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An export, with a file of the user's next to it."""
    for name in ("config.json", "LICENSE[1]", "mine.txt"):
        (tmp_path / name).write_text(name)
    files = tuple(written_file(tmp_path, name) for name in ("config.json", "LICENSE[1]"))
    write_marker(tmp_path, Marker(run=str(tmp_path), is_run=True, step=7, files=files))
    return tmp_path


def upload(config: RunConfig, hub: FakeHub) -> str:
    printed = io.StringIO()
    upload_export(config, RunLog(printed), hub)
    return printed.getvalue()


def test_the_files_of_the_export_are_uploaded(directory: Path) -> None:
    hub = FakeHub()
    said = upload(config_of(directory, hub_private_repo=True), hub)
    assert hub.calls == [
        ("create_repo", {"repo_id": "org/model", "private": True, "exist_ok": True}),
        (
            "upload_folder",
            {
                "repo_id": "org/model",
                "folder": str(directory),
                "files": ["config.json", "LICENSE[[]1]"],
                "message": "Upload the model of step 7",
            },
        ),
    ]
    assert said.endswith("uploaded the model to https://huggingface.co/org/model\n")


def test_a_name_without_an_owner_is_the_users(directory: Path) -> None:
    assert "https://huggingface.co/me/model\n" in upload(config_of(directory, hub_model_id="model"), FakeHub())


@pytest.mark.parametrize("failing", ["create_repo", "upload_folder"])
def test_a_failure_is_a_warning(directory: Path, failing: str) -> None:
    said = upload(config_of(directory), FakeHub(failing))
    assert "warning: the model was not uploaded to org/model: no route to the hub; it is complete in " in said
    assert f"hf upload org/model {directory} . '--exclude=run/*' --exclude=ratel.files\n" in said


def test_nothing_to_upload(tmp_path: Path) -> None:
    hub = FakeHub()
    assert upload(config_of(tmp_path), hub) == "" and hub.calls == []
