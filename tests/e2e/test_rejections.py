"""Wrong inputs of a run: the right exit code, `error:` lines, no traceback, and nothing is changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ratel_cli.units import MIB
from tests.e2e import runs
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import (
    ROWS,
    assert_rejected,
    file_hash,
    ratel,
    works,
)


def copy_base(base: Path, directory: Path) -> Path:
    return Path(shutil.copytree(base, directory))


@pytest.mark.full
def test_bad_input_does_not_change_a_store(make_config: MakeConfig, tmp_path: Path) -> None:
    """After each rejection the store has the same bytes as before."""
    config = make_config()
    config.succeed()
    before = file_hash(config.store), file_hash(config.output / "model.safetensors")
    (tmp_path / "empty.jsonl").write_text("")
    for arguments, code, part in (
        (["base_model=nowhere/at/all", "--resume", "no"], 2, "nowhere/at/all"),
        ([f"datasets={tmp_path}/none.jsonl", "--resume", "no"], 2, "none.jsonl"),
        ([f"datasets={tmp_path}/empty.jsonl", "--resume", "no"], 2, "empty.jsonl"),
        (["max_stepz=3", "--resume", "no"], 2, "max_stepz"),
        (["limits.host_memory=150MiB", "--resume", "no"], 3, "RAM: a step needs"),
        (["dtype=bfloat16"], 2, "dtype was float32, is now bfloat16"),
        (["sequence_len=32", "seed=1"], 2, "sequence_len was 64, is now 32; seed was 42, is now 1"),
        (["--resume", "1"], 2, "--resume 1: that step is not saved; saved steps: none"),
        (["--resume", "1", "--dry-run"], 2, "--resume 1: that step is not saved; saved steps: none"),
    ):
        assert_rejected(config.finetune(*arguments), code, part)
    assert (file_hash(config.store), file_hash(config.output / "model.safetensors")) == before


def test_too_little_memory_is_reported_before_anything_is_written(make_config: MakeConfig) -> None:
    config = make_config(limits={"host_memory": "200MiB"})
    ended = config.finetune()
    assert_rejected(ended, 3, "RAM: a step needs", "200 MiB available (short by")
    assert "hint: raise limits.host_memory" in ended.stderr
    assert not config.store.parent.exists()


def test_pickles_are_never_loaded(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    directory, canary = copy_base(base, tmp_path / "pickled"), tmp_path / "canary"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(canary),)

    (directory / "model.safetensors").unlink()
    torch.save({"weight": Payload()}, directory / "pytorch_model.bin")
    ended = make_config(base=directory).finetune()
    assert_rejected(ended, 2, "pytorch_model.bin", "never loaded")
    assert "save_pretrained" in ended.stderr
    assert not canary.exists()


def test_too_many_bad_rows(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    lines[20] = '{"messages": [{"role": "user"}'
    path.write_text("\n".join(lines) + "\n")
    config = make_config(rows=path)
    ended = config.finetune()
    assert_rejected(ended, 2, num_errors=2)
    assert f"{path}:21" in ended.stderr
    rejects = (config.output / "run" / "rejects.jsonl").read_text().splitlines()
    assert len(rejects) == 1
    assert json.loads(rejects[0])["line"] == 21
    assert not config.store.parent.exists()


def test_infinite_weights_diverge_at_once(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    directory = copy_base(base, tmp_path / "poisoned")
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = make_config(base=directory)
    assert_rejected(
        config.finetune(), 5, "step 1 (samples ", "): the loss is", "also when it was computed again", "step 0 is saved"
    )
    assert config.committed_step == 0
    assert not (config.output / "model.safetensors").exists()


@pytest.mark.full
def test_a_run_that_diverges_stops_at_its_last_good_step(make_config: MakeConfig) -> None:
    config = make_config(learning_rate=1e15, max_grad_norm=0)
    ended = config.finetune()
    assert_rejected(ended, 5, "step 2 (samples ", "): the ", "also when it was computed again", "step 1 is saved")
    assert "lower learning_rate and train anew with another output_dir" in ended.stderr
    assert config.committed_step == 1
    assert [step for step, _, _ in config.curve] == [1]
    assert not (config.output / "model.safetensors").exists()
    assert "resuming from step 1" in config.finetune().stderr
    assert config.committed_step == 1


@pytest.mark.full
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "resumed"])
def test_a_limit_on_wear_that_ends_the_run_early_is_told_before(make_config: MakeConfig, is_new: bool) -> None:
    """By the dry run, with the step at which it ends then."""
    config = make_config(max_steps=4)
    if not is_new:
        config.succeed("max_steps=1")
    size = 872 * 1024 / 2  # of one of the store's two generations, with its share of the headers
    limit = f"storage.max_tb_written={(2 + 1 + 2.5) * size / 1e12}"
    ended = works("finetune", config, limit, "--dry-run")
    assert [line for line in ended.stderr.splitlines() if line.startswith("warning: storage.max_tb_written (")] != []
    assert "ends the run after step 2 of 4" in ended.stderr
    assert_rejected(config.finetune(limit), 3, "step 3 would write more than storage.max_tb_written allows")
    assert config.committed_step == 2
    enough = f"storage.max_tb_written={(2 + 1 + 4.5) * size / 1e12}"
    assert "storage.max_tb_written" not in config.succeed(enough)
    assert "storage.max_tb_written" not in config.succeed(limit), "all steps are done"


@pytest.mark.full
def test_a_disk_without_the_space_for_measuring_it(
    make_config: MakeConfig, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured with is no need of the run: the store of 872 KiB fits in 1 MiB. In less, its own need counts."""
    monkeypatch.setattr(runs, "BRIEFLY", replace(runs.BRIEFLY, span_bytes=4 * MIB, buffer_bytes=4 * MIB))
    config = make_config(storage={"engine": "threads", "paths": [str(small_disk)]})
    subprocess.run(["mount", "-o", "remount,size=512k", str(small_disk)], check=True)
    ended = config.finetune()
    assert_rejected(ended, 3, "not enough space for the store", "872 KiB", "512 KiB", str(small_disk))
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    stderr = config.succeed()
    assert "warning: the drives could not be measured: not enough space: needs 4.00 MiB" in stderr


@pytest.mark.full
def test_an_output_that_is_too_small(make_config: MakeConfig, small_disk: Path, tmp_path: Path) -> None:
    """It is told before the first step, and once there is space, the run begins."""
    config = make_config(
        output_dir=str(small_disk / "out"), storage={"engine": "threads", "paths": [str(tmp_path / "s")]}
    )
    for command in (["check"], ["finetune", "--dry-run"], ["finetune"]):
        ended = ratel(command[0], config, *command[1:])
        assert_rejected(ended, 3, f"not enough space for the export: it needs 2.14 MiB in {small_disk}/out, ")
        assert "hint: free some space there, or set output_dir to another device" in ended.stderr
    assert not config.store.exists()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    config.succeed()
    assert (small_disk / "out" / "model.safetensors").exists()


@pytest.mark.full
def test_an_output_that_fills_up_while_the_run_trains(
    make_config: MakeConfig, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is whole. Once there is space again, the run ends normally."""
    config = make_config(
        output_dir=str(small_disk / "out"), storage={"engine": "threads", "paths": [str(tmp_path / "s")]}
    )
    monkeypatch.setattr("ratel_cli.run.train.finetune.spaces_of", lambda *_, **__: ())
    ended = config.finetune()
    assert_rejected(ended, 3, f"{small_disk}/out: the export needs 2.14 MiB, ")
    assert not list((small_disk / "out").glob("*.safetensors"))
    monkeypatch.undo()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    assert "all 4 steps are done" in config.succeed()
    assert (small_disk / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("key", ["storage", "output_dir"])
def test_a_read_only_directory(make_config: MakeConfig, small_disk: Path, tmp_path: Path, key: str) -> None:
    """On a disk that is mounted read-only, which also stops root."""
    store = {"engine": "threads", "paths": [str(small_disk / "store")]}
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    config = make_config(**({"storage": store} if key == "storage" else {"output_dir": str(small_disk / "out")}))
    assert_rejected(config.finetune(), 3, str(small_disk))
    assert not config.store.exists()
