"""A run and an export write only where Ratel wrote before, or where nothing is; a dry run writes nowhere."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.model.files.marker import read_marker, write_marker
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, file_hash, ratel, tree, works, write_config

README = "README.md"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> Config:
    """The config of a run that has saved steps 1 and 2. Tests must not change it."""
    config = write_config(
        tmp_path_factory.mktemp("saved"), base=base, rows=rows, max_steps=2, save_steps=1, save_total_limit=2
    )
    config.succeed()
    return config


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder of the user's."""
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    for name in (README, SHARD, "deep/notes.txt"):
        (folder / name).write_text(f"my {name}")
    (folder / "link").symlink_to("deep/notes.txt")
    return folder


@pytest.mark.full
def test_a_folder_of_the_users_is_refused(make_config: MakeConfig, saved: Config, mine: Path) -> None:
    before = tree(mine)
    config = make_config(max_steps=1, output_dir=str(mine))
    for ended in (config.finetune(), config.finetune("--dry-run"), ratel("export", saved, "-o", mine)):
        assert_rejected(ended, 2, str(mine), "has files in it, and Ratel did not make it")
        assert "--overwrite" in ended.stderr
        assert tree(mine) == before
    assert not config.store.exists() and not mine.with_name("mine.store").exists()


@pytest.mark.full
def test_a_claim_that_was_cut_short(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output directory that a stopped or killed process has made is not taken for one of the user's."""
    config = make_config()
    output = config.output

    def interrupted(descriptor: int) -> None:
        assert [path.name for path in output.iterdir()] == ["ratel.files.new"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", interrupted)
        assert config.finetune().code == 130
    assert list(output.iterdir()) == []
    (output / "ratel.files.new").write_text('{"format_ver')
    (output / "notes").write_text("mine")
    assert_rejected(config.finetune(), 2, f"{output} has files in it, and Ratel did not make it")
    (output / "notes").unlink()
    config.succeed()
    (output / "ratel.files.new").write_text('{"format_ver')
    works("clean", config, "--output", "--yes")
    assert not output.exists()


@pytest.mark.full
def test_overwrite_replaces_only_the_models_names(make_config: MakeConfig, saved: Config, mine: Path) -> None:
    before = tree(mine)
    config = make_config(max_steps=1, output_dir=str(mine))
    config.succeed("--overwrite")
    after = tree(mine)
    assert {name for name in before if after[name] != before[name]} == {README}
    assert_rejected(ratel("export", saved, "-o", mine), 2, f"{mine} holds step 1 of the run mine")
    works("export", saved, "-o", mine, "--overwrite")
    assert {name for name in before if tree(mine)[name] != before[name]} == {README}


@pytest.mark.full
def test_a_file_that_was_changed_since_is_the_users(make_config: MakeConfig) -> None:
    config = make_config(max_steps=1)
    config.succeed()
    (config.output / README).write_text("my own card")
    before = tree(config.output)
    assert_rejected(config.finetune(), 2, README, "would be replaced", "was changed since")
    assert_rejected(ratel("export", config, "-o", config.output), 2, README, "was changed since")
    assert tree(config.output) == before
    config.succeed("--overwrite")
    assert "my own card" not in (config.output / README).read_text()


def test_a_template_that_the_run_adds_replaces_none_of_the_users(
    make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    """That is found before training, although the base model has no such file."""
    shutil.copytree(base, plain := tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = make_config(base=plain, max_steps=1, chat_template="chatml", save_steps=1)
    config.succeed()
    template = config.output / "chat_template.jinja"
    template.write_text("mine")
    before = tree(config.output)
    for options in (["--dry-run"], []):
        assert_rejected(ratel("finetune", config, "max_steps=2", *options), 2, template.name, "would be replaced")
        assert tree(config.output) == before


def test_an_export_replaces_only_itself(saved: Config, make_config: MakeConfig, tmp_path: Path) -> None:
    out = tmp_path / "export"
    works("export", saved, "--step", 1, "-o", out)
    works("export", saved, "--step", 1, "-o", out)
    before = tree(out)
    assert_rejected(ratel("export", saved, "-o", out), 2, f"{out} holds step 1 of the run out", "-o")
    other = make_config(max_steps=1)
    other.succeed()
    assert_rejected(ratel("export", other, "-o", out), 2, "holds step 1 of the run out")
    assert_rejected(ratel("export", other, "-o", saved.output), 2, "holds step 2 of the run out")
    assert_rejected(other.finetune(f"output_dir={out}"), 2, "output_dir", "holds step 1 of the run out")
    assert tree(out) == before
    works("export", saved, "-o", out, "--overwrite")
    assert file_hash(out / "model.safetensors") == file_hash(saved.output / "model.safetensors")


def test_the_base_model_and_the_output_are_apart(make_config: MakeConfig, base: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(base, tmp_path / "models" / "base"))
    (tmp_path / "link").symlink_to(model)
    config = make_config(base=model, max_steps=1)
    before = tree(tmp_path)
    for output, part in (
        (model, "are the same directory"),
        (tmp_path / "link", "are the same directory"),
        (model / "out", "is inside the base model"),
        (tmp_path / "link" / "out", "is inside the base model"),
        (tmp_path / "models", "is inside"),
        (tmp_path, "is inside"),
    ):
        assert_rejected(config.finetune(f"output_dir={output}"), 2, "output_dir", part)
        assert_rejected(ratel("export", config, "-o", output), 2, "-o", part)
        assert tree(tmp_path) == before


def test_a_base_model_of_links_into_the_output(make_config: MakeConfig, saved: Config, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in saved.output.iterdir():
        (linked / path.name).symlink_to(path)
    before = tree(saved.output)
    assert_rejected(make_config(base=linked).finetune(f"output_dir={saved.output}"), 2, "a file of it is inside")
    assert tree(saved.output) == before


@pytest.mark.full
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_dry_run_writes_nothing(make_config: MakeConfig, tmp_path: Path, is_finished: bool) -> None:
    config = make_config(max_steps=1)
    if is_finished:
        config.succeed()
        shutil.rmtree(next((config.output / "run" / "tokens").iterdir()))
    before = tree(tmp_path)
    config.succeed("--dry-run")
    assert tree(tmp_path) == before


@pytest.mark.full
def test_a_run_whose_store_is_gone_is_not_begun_again(make_config: MakeConfig) -> None:
    config = make_config(max_steps=2)
    config.succeed()
    shutil.rmtree(config.store.parent)
    before = tree(config.output)
    for arguments in ((), ("--dry-run",)):
        ended = config.finetune(*arguments)
        assert_rejected(ended, 2, "holds step 2 of the run out", "its store is gone", str(config.store.parent))
        assert "restore" not in ended.stderr, "it has no snapshot"
        assert "choose another output_dir" in ended.stderr
        assert tree(config.output) == before
    weights = config.exported
    config.succeed("--resume", "no")
    assert config.exported.keys() == weights.keys() and len(config.metrics) == 2


@pytest.mark.full
def test_a_result_of_other_settings_is_not_begun_over(make_config: MakeConfig, tmp_path: Path) -> None:
    """Also if the new run has a store of its own elsewhere."""
    config = make_config(max_steps=1)
    config.succeed()
    before = tree(config.output)
    changed = ("seed=3", f"storage.paths=[{tmp_path}/drive]", "--resume", "no")
    assert_rejected(config.finetune(*changed), 2, "holds step 1 of a run with other settings: seed was 42, is now 3")
    after = tree(config.output)
    assert {name: after[name] for name in before} == before
    config.succeed(*changed, "--overwrite-store")


@pytest.mark.full
def test_records_without_a_store_are_not_begun_again(make_config: MakeConfig) -> None:
    """Those of a run that has exported nothing yet."""
    config = make_config(max_steps=1)
    config.succeed()
    shutil.rmtree(config.store.parent)
    marker = read_marker(config.output)
    assert marker is not None
    for file in marker.files:
        (config.output / file.name).unlink()
    write_marker(config.output, replace(marker, step=None, files=()))
    assert_rejected(config.finetune(), 2, "holds the records of a run", "its store is gone")
    (config.output / "run" / "metrics.jsonl").unlink()
    config.succeed()


@pytest.mark.full
def test_two_runs_with_one_storage_path(make_config: MakeConfig, tmp_path: Path) -> None:
    """Also with equal settings each has its own store, and the same command finds it again."""
    storage = {"engine": "threads", "paths": [str(tmp_path / "drive")]}
    first, second = make_config("a", max_steps=2, storage=storage), make_config("b", max_steps=2, storage=storage)
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "ratel.store").write_text("mine")
    first.succeed()
    before = tree(tmp_path / "drive")
    assert "step 1/2" in second.succeed()
    after = tree(tmp_path / "drive")
    assert {name: after[name] for name in before} == before
    assert len({name.split("/")[0] for name in after}) == 3
    assert "all 2 steps are done" in first.succeed()
    second.succeed("--resume", "no")
    assert {name: content for name, content in tree(tmp_path / "drive").items() if name in before} == before
    assert ratel("verify", first.output).code == ratel("verify", second).code == 0
