"""Which files of a base model are opened: only regular files of its own directory, and weights only as safetensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from ratel_cli.errors import BadInput, EnvironmentFailure, RatelError
from ratel_cli.model.files.directory import INDEX_NAME, resolve_base_model, trusted_file
from ratel_cli.model.values.spec import MAX_LAYERS
from tests.model.tiny import (
    assert_same,
    import_all,
    reference,
    rejection,
    save_tiny,
    skeleton_of,
    tiny_config,
    tiny_model,
)


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


ELSEWHERE = {
    "../model.safetensors": "is outside",
    "sub/../../model.safetensors": "is outside",
    "/etc/model.safetensors": "is outside",
    "a\0.safetensors": r"a\x00.safetensors is outside",
    "": "in weight_map is not a .safetensors file",
    "..": "in weight_map is not a .safetensors file",
    "pytorch_model.bin": "is not a .safetensors file",
    "none.safetensors": "is missing",
    "\x1b[2J.safetensors": r"file \x1b[2J.safetensors is missing",
    "loop.safetensors": "cannot be opened",
    "out.safetensors": "is a link to a file outside",
    "fifo.safetensors": "not a regular file",
    "null.safetensors": "is a link to a file outside",
    "folder.safetensors": "not a regular file",
    "\ud800.safetensors": r"\ud800.safetensors cannot be opened",
    "a" * 5_000 + ".safetensors": "cannot be opened",
}
"""By the name of a file that an index has: what is wrong with it, in a directory of which `put_odd_files` has been."""
NO_INDEX = ['{"weight_map": {"a": 1}}', '{"weight_map": []}', "[]", "{", '{"a": 1, "a": 2}', "", "[" * 50_000]


def put_odd_files(directory: Path) -> None:
    (directory / "loop.safetensors").symlink_to("loop.safetensors")
    (directory / "out.safetensors").symlink_to(directory.parent / "model.safetensors")
    (directory / "null.safetensors").symlink_to("/dev/null")
    (directory / "folder.safetensors").mkdir()
    os.mkfifo(directory / "fifo.safetensors")


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: ascii(name)[:30])
@pytest.mark.timeout(120)
def test_index_that_points_elsewhere(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    save_tiny("llama", directory)
    shutil.copy(min(directory.glob("*.safetensors")), tmp_path / "model.safetensors")
    put_odd_files(directory)
    edit_index(directory, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    assert ELSEWHERE[name] in rejection(directory)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"])
def test_small_files_that_are_no_files(tmp_path: Path, name: str) -> None:
    """transformers opens these files itself, and would wait forever for a FIFO."""
    tiny_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match=f"{name} is not a regular file"):
        skeleton_of(tmp_path)


def test_more_layers_than_any_model_has(tmp_path: Path) -> None:
    tiny_config("llama", num_hidden_layers=MAX_LAYERS + 1).save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="10001 layers are more than the limit of 10000"):
        skeleton_of(tmp_path)


def test_index_of_a_tensor_that_its_file_does_not_have(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    edit_index(tmp_path, lambda weight_map: weight_map.update({"model.extra": weight_map["model.norm.weight"]}))
    assert "model.extra is missing; the index says" in rejection(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    first = min(tmp_path.glob("*.safetensors"))
    shutil.copy(first, tmp_path / "copy.safetensors")
    edit_index(tmp_path, lambda weight_map: weight_map.update({"lm_head.weight": "copy.safetensors"}))
    assert "is in copy.safetensors too" in rejection(tmp_path)


@pytest.mark.parametrize("content", NO_INDEX, ids=range(len(NO_INDEX)))
def test_index_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / INDEX_NAME).write_text(content)
    assert str(tmp_path / INDEX_NAME) in rejection(tmp_path)


def test_files_of_the_hub_cache(tmp_path: Path) -> None:
    """A snapshot consists of links into `blobs` next to it."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    save_tiny("llama", snapshot)
    blobs.mkdir()
    for index, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{index:064x}")
        path.symlink_to(Path("../../blobs") / f"{index:064x}")
    assert_same(import_all(snapshot), reference(snapshot))
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "bad.json").symlink_to("../../elsewhere")
    with pytest.raises(BadInput, match="is a link to a file outside"):
        trusted_file(snapshot, "bad.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
def test_other_formats_are_never_loaded(tmp_path: Path, name: str) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    canary = tmp_path / "canary"
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    with pytest.raises(BadInput, match="is not a safetensors file") as raised:
        import_all(tmp_path)
    assert raised.value.hint is not None and "save_pretrained" in raised.value.hint
    assert not canary.exists()


def test_no_weights_at_all(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    assert "no model.safetensors" in rejection(tmp_path)


def test_a_models_code_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "code.py").write_text(f"open({str(canary)!r}, 'w')\n")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "nobody_knows", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
        )
    )
    with pytest.raises(BadInput):
        skeleton_of(tmp_path)
    assert not canary.exists()


def test_resolving_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_base_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_base_model("org/model") == Path("org/model")


def test_resolving_a_hub_id(tmp_path: Path) -> None:
    asked: list[str] = []

    def download(repository: str) -> str:
        asked.append(repository)
        return str(tmp_path)

    for name in ("org/model-1.5_b", "gpt2"):
        assert resolve_base_model(name, download=download) == tmp_path
    assert asked == ["org/model-1.5_b", "gpt2"]


def test_a_revision_is_of_a_hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, object]] = []

    def download(repository: str, **options: object) -> str:
        asked.append((repository, options["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for revision in (None, "v1.5"):
        assert resolve_base_model("org/model", revision=revision) == tmp_path
    assert asked == [("org/model", None), ("org/model", "v1.5")]
    with pytest.raises(BadInput, match="is a directory, which has one revision") as raised:
        resolve_base_model(str(tmp_path), revision="main")
    assert raised.value.key == ("revision_of_model",)


@pytest.mark.parametrize("name", ["", "./none", "/none", "~/none", "a/b/c", "a/../b", "a b", "a\0b", "\x1b[2J"])
def test_names_that_are_no_directory_and_no_hub_id(name: str) -> None:
    def download(repository: str) -> str:
        raise AssertionError(repository)

    with pytest.raises(BadInput) as raised:
        resolve_base_model(name, download=download)
    assert raised.value.message.isprintable()


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(BadInput, match="is a file"):
        resolve_base_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("error", "translated", "words"),
    [
        (errors.GatedRepoError, BadInput, "licence"),
        (errors.RepositoryNotFoundError, BadInput, "no hub model"),
        (errors.RevisionNotFoundError, BadInput, "org/model has no branch, tag or commit v2"),
        (errors.HfHubHTTPError, EnvironmentFailure, "cannot be reached"),
        (errors.LocalEntryNotFoundError, EnvironmentFailure, "cannot be reached"),
        (ConnectionError, EnvironmentFailure, "cannot be downloaded"),
        (PermissionError, EnvironmentFailure, "cannot be downloaded"),
    ],
)
def test_failures_of_the_hub(error: type[Exception], translated: type[RatelError], words: str) -> None:
    def download(repository: str) -> str:
        raise error.__new__(error)  # the constructors need a server's response

    with pytest.raises(translated, match=words) as raised:
        resolve_base_model("org/model", revision="v2", download=download)
    assert isinstance(raised.value.__cause__, error)


def test_a_directory_that_is_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    with pytest.raises(EnvironmentFailure, match="there is no directory models/smal, and the hub cannot be") as raised:
        resolve_base_model("models/smal")
    assert raised.value.hint == "check the spelling: models exists here"


def test_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        resolve_base_model("nobody/no-such-model-in-any-cache")
    with pytest.raises(BadInput, match="no hub model"):
        resolve_base_model("nobody/ends-with-a-dash-")
