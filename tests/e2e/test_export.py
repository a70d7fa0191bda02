"""`ratel export`: any saved step becomes a Hugging Face directory; wrong arguments are rejected."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratel_cli.io.queue import open_queue
from ratel_cli.store.store import Store
from tests.e2e.conftest import MakeConfig, SignalAt
from tests.e2e.runs import (
    assert_rejected,
    file_hash,
    finetune,
    output_of,
    ratel,
    store_of,
    succeed,
    write_config,
)

SAVING: dict[str, object] = {"max_steps": 6, "save_steps": 2, "save_total_limit": 2, "dtype": "bfloat16"}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Path:
    """The config of a run that has saved steps 4 and 6. Tests must not change it."""
    config = write_config(tmp_path_factory.mktemp("saved"), base=base, rows=rows, **SAVING)
    succeed(config)
    return config


@pytest.mark.full
@pytest.mark.parametrize("by", ["config", "directory"])
def test_the_last_step_is_the_runs_own_export(saved: Path, tmp_path: Path, by: str) -> None:
    before = file_hash(store_of(saved))
    ended = ratel("export", saved if by == "config" else output_of(saved), "-o", tmp_path / "new" / "out")
    assert (ended.code, ended.stdout) == (0, "")
    assert (
        ended.stderr == f"exported step 6 to {tmp_path / 'new' / 'out'}; load it with transformers' from_pretrained\n"
    )
    names = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    assert names == {path.name for path in output_of(saved).iterdir()} - {"run"}
    for name in names - {"ratel.files"}:
        assert file_hash(tmp_path / "new" / "out" / name) == file_hash(output_of(saved) / name), name
    assert file_hash(store_of(saved)) == before


@pytest.mark.full
def test_a_saved_step_is_the_export_of_a_shorter_run(saved: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    shorter = make_config("shorter", **{**SAVING, "max_steps": 4})
    succeed(shorter)
    assert ratel("export", output_of(saved), "--step", 4, "-o", tmp_path / "four").code == 0
    assert ratel("export", output_of(saved), "--step", 6, "-o", tmp_path / "six").code == 0
    assert file_hash(tmp_path / "four" / WEIGHTS) == file_hash(output_of(shorter) / WEIGHTS)
    assert file_hash(tmp_path / "six" / WEIGHTS) == file_hash(output_of(saved) / WEIGHTS)
    assert "4 optimizer updates" in (tmp_path / "four" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "four")
    assert model.dtype == torch.bfloat16
    assert len(AutoTokenizer.from_pretrained(tmp_path / "four")) == 300


@pytest.mark.full
def test_a_tied_model_and_random_weights(tied_base: Path, make_config: MakeConfig, tmp_path: Path) -> None:
    for name, changes in (("tied", {"base": tied_base}), ("drawn", {"random_init": True})):
        config = make_config(name, max_steps=1, **changes)
        succeed(config)
        assert ratel("export", config, "-o", tmp_path / f"{name}-out").code == 0
        assert file_hash(tmp_path / f"{name}-out" / WEIGHTS) == file_hash(output_of(config) / WEIGHTS)


def test_wrong_arguments_are_rejected(saved: Path, base: Path, tmp_path: Path) -> None:
    """Afterwards neither the store nor the run's export has changed, and nothing was written."""
    before = file_hash(store_of(saved)), file_hash(output_of(saved) / WEIGHTS), file_hash(base / WEIGHTS)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    copy = tmp_path / "bad.yaml"
    copy.write_text(saved.read_text() + "\nlearning_rte: 1\n")
    run, out = output_of(saved), tmp_path / "out"
    for arguments, code, parts in (
        ([tmp_path / "none.yaml", "-o", out], 2, ("none.yaml: no such file",)),
        ([tmp_path / "none", "-o", out], 2, ("none: no such file",)),
        ([tmp_path / "empty", "-o", out], 2, ("not the output directory of a run", "run/config.yaml")),
        ([copy, "-o", out], 2, ("bad.yaml:", "learning_rte")),
        ([run, "--step", 5, "-o", out], 2, ("step 5 is not saved in the store; saved steps: 4, 6",)),
        ([run, "--step", -1, "-o", out], 2, ("invalid value for '--step'",)),
        ([run], 2, ("missing option '--output'",)),
        ([run, "-o", base], 2, ("-o and base_model are the same directory",)),
        ([run, "-o", tmp_path / "file"], 2, ("file is not a directory",)),
    ):
        assert_rejected(ratel("export", *arguments), code, *parts)
        assert not out.exists()
    after = file_hash(store_of(saved)), file_hash(output_of(saved) / WEIGHTS), file_hash(base / WEIGHTS)
    assert after == before


def test_a_store_that_is_missing_or_of_another_model(
    saved: Path, tied_base: Path, make_config: MakeConfig, tmp_path: Path
) -> None:
    lost = make_config("lost", **SAVING)
    assert_rejected(
        ratel("export", lost, "-o", tmp_path / "out"), 2, "there is no store in", str(store_of(lost).parent)
    )
    output = str(output_of(saved))
    for name, changes in (("tied", {"base": tied_base}), ("wide", {"dtype": "float32"})):
        other = make_config(name, **{**SAVING, "output_dir": output, **changes})
        assert_rejected(ratel("export", other, "-o", tmp_path / "out"), 2, "was made for another model, not for")
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_damaged_chunk_is_not_exported(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(max_steps=2)
    succeed(config)
    before = file_hash(output_of(config) / WEIGHTS)
    data = store_of(config)
    content = bytearray(data.read_bytes())
    content[3 * 4096 :] = bytes(byte ^ 1 for byte in content[3 * 4096 :])
    data.write_bytes(content)
    for output in (tmp_path / "out", output_of(config)):
        assert_rejected(ratel("export", config, "-o", output), 4, "damaged")
    assert not (tmp_path / "out").exists()
    assert file_hash(output_of(config) / WEIGHTS) == before


def test_a_full_disk_and_a_read_only_disk(saved: Path, small_disk: Path) -> None:
    assert_rejected(ratel("export", saved, "-o", small_disk / "out"), 3, str(small_disk / "out"), "needs", "available")
    assert not (small_disk / "out").exists()


@pytest.mark.usefixtures("impatient")
def test_a_store_in_use(saved: Path, tmp_path: Path) -> None:
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([store_of(saved).parent], queue=queue, identity=None),
    ):
        assert_rejected(ratel("export", saved, "-o", tmp_path / "out"), 3, "is in use by process")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("call", [1, 3])
def test_a_signal_leaves_the_earlier_export(
    saved: Path, tmp_path: Path, signal_at: SignalAt, call: int, number: int, code: int
) -> None:
    out = Path(shutil.copytree(output_of(saved), tmp_path / "out"))
    before = {path.name: file_hash(path) for path in out.iterdir() if path.is_file()}
    signal_at(call, number)
    ended = ratel("export", saved, "--step", 4, "-o", out, "--overwrite")
    assert (ended.code, ended.stderr.splitlines()[-1]) == (code, "Stopped. Run the same command again.")
    assert {path.name: file_hash(path) for path in out.iterdir() if path.is_file()} == before
    assert not (out / ".export-in-progress").exists()


def failing_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file of this name can be put into place."""
    move = os.replace

    def fail(source: Path, destination: Path) -> None:
        if Path(destination).name == name:
            raise PermissionError(13, "Permission denied")
        move(source, destination)

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("name", ["README.md", WEIGHTS])
def test_an_export_that_broke_off_is_finished_without_being_asked(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out = tmp_path / "out"
    assert ratel("export", saved, "--step", 4, "-o", out).code == 0
    (out / "notes.txt").write_text("mine")
    with monkeypatch.context() as broken:
        failing_at(name, broken)
        assert_rejected(ratel("export", saved, "-o", out, "--overwrite"), 3, "cannot be written")
        assert_rejected(ratel("export", saved, "-o", out), 3, "the export that was begun", "cannot be finished")
    assert_rejected(ratel("export", saved, "--step", 4, "-o", out), 2, "holds step 6")
    ended = ratel("export", saved, "-o", out)
    assert ended.code == 0 and f"{out}: finished the export of step 6, which was interrupted" in ended.stderr
    assert file_hash(out / WEIGHTS) == file_hash(output_of(saved) / WEIGHTS)
    assert (out / "notes.txt").read_text() == "mine" and not (out / ".export-in-progress").exists()


@pytest.mark.full
def test_a_run_finishes_its_export(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    with monkeypatch.context() as broken:
        failing_at("README.md", broken)
        assert finetune(config, "max_steps=2").code == 3
    assert not (output_of(config) / WEIGHTS).exists()
    before = sorted(output_of(config).rglob("*"))
    succeed(config, "max_steps=3", "--dry-run")
    assert sorted(output_of(config).rglob("*")) == before
    assert "finished the export of step 2" in succeed(config, "max_steps=3")
    assert not (output_of(config) / ".export-in-progress").exists()


@pytest.mark.full
def test_what_broke_off_is_cleaned(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(max_steps=1)
    succeed(config)
    with monkeypatch.context() as broken:
        failing_at(WEIGHTS, broken)
        assert finetune(config, "max_steps=2").code == 3
    assert ratel("clean", config, "--output", "--yes").code == 0
    assert not output_of(config).exists()


def test_an_index_of_the_users_is_renamed(saved: Path, tmp_path: Path) -> None:
    """It would lead a loader to other weights than the single file of the export."""
    out, index = tmp_path / "out", "model.safetensors.index.json"
    out.mkdir()
    (out / index).write_text("mine")
    ended = ratel("export", saved, "-o", out, "--overwrite")
    assert ended.code == 0 and f"{out / index} was in the way of the model, and is now {index}.old" in ended.stderr
    assert (out / f"{index}.old").read_text() == "mine" and not (out / index).exists()
    (out / index).write_text("mine")
    ended = ratel("export", saved, "-o", out)
    assert_rejected(ended, 2, f"{out / index} would lead to other weights")
    assert f"with --overwrite it is renamed to {index}.old" in ended.stderr
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16
