"""`--from RUN[@STEP]`: a new run that starts from a step of another run.

The oracle is plain PyTorch: the other run's batches and rates up to that step, and the new run's from there on. With a
fresh optimizer it is a run whose base model is the other run's export.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from ratel_cli.config.load import load_config
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, file_hash, works
from tests.e2e.trained import LORA_IN_PEFT, TRAINED, WHOLE_OR_ADAPTER, OfEach, run_of_each
from tests.reference import Recipe, train_in_memory
from tests.tiers import rotating, sample

SAVING: dict[str, object] = {"max_steps": 6, "save_steps": 2, "save_total_limit": 3}


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> OfEach:
    """Of runs of six steps, of which 2, 4 and 6 are saved."""
    return run_of_each(tmp_path_factory, base=base, rows=rows, **SAVING)


@pytest.fixture
def source(source_of: OfEach) -> Config:
    """The config of such a run of all weights. Tests must not change it."""
    return source_of("all weights")


def trained_in_memory(source: Config, branch: Config, base: Path, *, step: int, num_steps: int) -> list[torch.Tensor]:
    """The weights of plain PyTorch: `source` up to `step`, and `branch` after it; sorted by name."""
    before, after = (load_config(config).config for config in (source, branch))
    steps = [(source if index < step else branch).load_data().step(index) for index in range(num_steps)]
    recipe = Recipe(
        dtype=getattr(torch, before.dtype),
        learning_rates=tuple((before if index < step else after).learning_rate for index in range(num_steps)),
        weight_decay=before.weight_decay,
        max_grad_norm=before.max_grad_norm,
        lora=LORA_IN_PEFT if before.adapter else None,
    )
    trained = train_in_memory(
        LlamaConfig.from_pretrained(base), load_file(base / "model.safetensors"), steps, recipe
    ).weights
    if before.adapter:
        return [trained[name] for name in sorted(trained) if "lora_" in name]
    return [trained[name].to(recipe.dtype) for name in sorted(trained)]


def weights_of(config: Config) -> list[torch.Tensor]:
    weights = config.exported
    return [weights[name] for name in sorted(weights)]


def assert_same_weights(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.full
@pytest.mark.parametrize("what", ["all weights", "lora"])
def test_another_rate_batch_and_length_from_a_saved_step(
    make_config: MakeConfig, source_of: OfEach, base: Path, what: str
) -> None:
    """Moments and the number of updates are those of the other run, which is left as it was."""
    source, keys = source_of(what), {**TRAINED[what], "learning_rate": 0.003, "gradient_accumulation_steps": 3}
    before = file_hash(source.store)
    branch = make_config("branch", **keys, max_steps=7)
    stderr = branch.succeed("--from", f"{source.output}@4")
    assert "steps 5 to 7" in stderr
    assert [line["step"] for line in branch.metrics] == [5, 6, 7]
    assert_same_weights(weights_of(branch), trained_in_memory(source, branch, base, step=4, num_steps=7))
    assert file_hash(source.store) == before
    origin = json.loads((branch.output / "run" / "origin.json").read_text())
    assert origin == {"run": str(source.output.resolve()), "step": 4, "fresh_optimizer": False}


@pytest.mark.nightly
def test_from_the_last_step_in_bfloat16_with_other_data(make_config: MakeConfig, tmp_path: Path, base: Path) -> None:
    """RUN as a config; the data is other rows, in another order."""
    lines = [{"prompt": f"{number}?", "completion": "yes" * (1 + number % 5)} for number in range(40)]
    rows = tmp_path / "other.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    begun = make_config("begun", dtype="bfloat16", max_steps=3)
    begun.succeed()
    branch = make_config("branch", dtype="bfloat16", rows=rows, max_steps=5)
    branch.succeed("--from", str(begun))
    assert_same_weights(weights_of(branch), trained_in_memory(begun, branch, base, step=3, num_steps=5))


@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        *rotating(WHOLE_OR_ADAPTER, ["float32", "bfloat16"], every=3, full_rotation=True),
        pytest.param("without a master", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_with_the_same_settings_it_is_the_same_run(make_config: MakeConfig, what: str, dtype: str) -> None:
    keys = {**TRAINED[what], "dtype": dtype, "max_steps": 5}
    first, branch, whole = (make_config(name, **keys) for name in ("first", "branch", "whole"))
    first.succeed("max_steps=3")
    whole.succeed()
    stderr = branch.succeed("--from", str(first.output))
    assert "; steps 4 to 5\n" in stderr
    assert_same_weights(weights_of(branch), weights_of(whole))
    assert branch.curve == whole.curve[3:]


@pytest.mark.full
def test_a_fresh_optimizer_is_a_run_of_the_exported_weights(make_config: MakeConfig, source: Config) -> None:
    """In fp32 an export has the master weights."""
    step = source.output.parent / "step"
    if not step.exists():
        works("export", source, "--step", 4, "-o", step)
    branch = make_config("branch")
    branch.succeed("--from", f"{source}@4", "--fresh-optimizer")
    begun = make_config("begun", base=step)
    begun.succeed()
    branch.assert_same_result(begun)


@pytest.mark.nightly
@pytest.mark.parametrize("what", list(TRAINED))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_fresh_optimizer_keeps_the_masters(make_config: MakeConfig, dtype: str, what: str) -> None:
    """Their fp32 bits, which no export in the compute dtype has: without a step to do, both stores export the same."""
    keys = {**TRAINED[what], "dtype": dtype}
    if dtype == "float16" and "bf16_master" in keys:
        keys["dtype"] = "bfloat16"  # which it is about
    first, branch = make_config("first", **keys), make_config("branch", **keys, learning_rate=0.0)
    first.succeed()
    branch.succeed("--from", str(first), "--fresh-optimizer")
    assert_same_weights(weights_of(branch), weights_of(first))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=2))
def test_the_same_command_resumes(make_config: MakeConfig, source_of: OfEach, what: str) -> None:
    """Killed while it copies, and killed while it trains. Once there is a store, it resumes without --from too."""
    source, keys = source_of(what), {**TRAINED[what], "max_steps": 8}
    arguments = ("--from", f"{source.output}@4")
    branch, whole = make_config("branch", **keys), make_config("whole", **keys)
    branch.run_until_killed(*arguments, kill_at="commit.written:1")
    branch.run_until_killed(*arguments, kill_at="commit.written:3")
    assert [line["step"] for line in branch.metrics] == [5, 6]
    stderr = branch.succeed(*arguments)
    assert "resuming from step 5" in stderr
    assert "all 8 steps are done" in branch.succeed()
    whole.succeed()
    assert_same_weights(weights_of(branch), weights_of(whole))
    for wrong in (f"{source.output}@2", f"{source.output}@4 --fresh-optimizer"):
        ended = branch.finetune("--from", *wrong.split())
        assert_rejected(ended, 2, f"--from {wrong}: the run in {branch.output} has begun already, from ", "out@4")
    assert_rejected(whole.finetune(*arguments), 2, "has begun already, at its base model")


@pytest.mark.nightly
def test_starting_over_forgets_the_origin(make_config: MakeConfig, source: Config, plain_run: Config) -> None:
    branch = make_config("branch")
    branch.succeed("--from", f"{source.output}@2")
    branch.succeed("--resume", "no")
    branch.assert_same_result(plain_run)
    assert not (branch.output / "run" / "origin.json").exists()


@pytest.mark.nightly
def test_what_the_other_run_wrote_does_not_count(make_config: MakeConfig, source: Config) -> None:
    """A limit that allows the copy and two steps allows two steps, whatever step they are."""
    size = source.store.stat().st_size / 5  # of one generation: three are saved, two are for training
    storage = {"engine": "threads", "max_tb_written": 5.5 * size / 1e12}
    branch = make_config("branch", storage=storage, max_steps=9)
    ended = branch.finetune("--from", f"{source.output}@4")
    assert ended.code == 3
    assert "storage.max_tb_written" in ended.errors[0]
    assert [line["step"] for line in branch.metrics] == [5, 6]


def test_what_cannot_start(make_config: MakeConfig, source: Config, base: Path, tied_base: Path) -> None:
    """Each is rejected before anything is written, with both values."""
    run = source.output
    branch = make_config("branch")
    cases: list[tuple[list[str], list[str]]] = [
        (["--from", f"{run}@3", "max_steps=9"], ["step 3 is not saved in the store; saved steps: 2, 4, 6"]),
        (["--from", str(run)], ["has done 6 steps, and this one ends after step 4"]),
        (["--from", str(run), "dtype=bfloat16"], ["another model: dtype was float32, is now bfloat16"]),
        (
            ["--from", str(run), "dtype=bfloat16", "bf16_master=stochastic"],
            ["bf16_master was fp32, is now stochastic"],
        ),
        (["--from", str(run), f"base_model={tied_base}"], [f"base_model was {base}, is now {tied_base}"]),
        (["--from", str(run), f"output_dir={run}", "learning_rate=0.1"], ["that run has the same output_dir"]),
        (["--from", str(run.parent / "none")], ["none", "no such file"]),
        (["--from", str(base)], [f"--from {base}: ", "not the output directory of a run"]),
        (["--from", str(run), "--resume", "2"], ["arguments '--from' and '--resume 2'"]),
        (["--fresh-optimizer"], ["argument '--fresh-optimizer': it belongs to --from RUN"]),
    ]
    for arguments, parts in cases:
        assert_rejected(branch.finetune(*arguments), 2, *parts)
        assert not branch.store.exists()


@pytest.mark.nightly
def test_a_run_without_its_store(make_config: MakeConfig) -> None:
    first, branch = make_config("first"), make_config("branch", max_steps=9)
    first.succeed()
    shutil.rmtree(first.store.parent)
    ended = branch.finetune("--from", str(first.output))
    assert_rejected(ended, 2, f"--from {first.output}: there is no store in ")
    assert "hint: to train its exported model, set base_model to the directory of the export" in ended.stderr


@pytest.mark.nightly
def test_a_dry_run_writes_nothing(make_config: MakeConfig, source: Config) -> None:
    branch = make_config("branch", max_steps=9)
    before = file_hash(source.store)
    stderr = branch.succeed("--from", str(source.output), "--dry-run")
    assert "steps 7 to 9" in stderr
    assert not branch.output.exists()
    assert not branch.store.exists()
    assert file_hash(source.store) == before


@pytest.mark.full
def test_what_a_run_cannot_change_leads_to_a_new_one(make_config: MakeConfig, source: Config) -> None:
    """The hint of the rejected command is the command that works, where the state allows it."""
    ended = source.finetune("learning_rate=0.003", "max_steps=8")
    assert_rejected(ended, 2, "which has other settings: learning_rate was 0.01, is now 0.003")
    run = source.output
    assert f"for a new run, set another output_dir (--from {run} starts it from this run's state); " in ended.stderr
    branch = make_config("branch")
    branch.succeed("learning_rate=0.003", "max_steps=8", "--from", str(run))
    assert [line["step"] for line in branch.metrics] == [7, 8]
    ended = source.finetune("dtype=bfloat16")
    assert_rejected(ended, 2, "which has other settings: dtype was float32, is now bfloat16")
    assert "hint: to resume that run, restore the old values; for a new run, set another output_dir;" in ended.stderr


@pytest.mark.nightly
def test_runs_that_share_the_drives(make_config: MakeConfig, tmp_path: Path) -> None:
    """Each has a store of its own in the same `storage.paths`."""
    storage = {"engine": "threads", "paths": [str(tmp_path / "drive")]}
    first, branch, whole = (make_config(name, storage=storage, max_steps=5) for name in ("first", "branch", "whole"))
    first.succeed("max_steps=3")
    branch.succeed("--from", str(first))
    whole.succeed()
    assert_same_weights(weights_of(branch), weights_of(whole))


@pytest.mark.full
@pytest.mark.parametrize("what", sample(WHOLE_OR_ADAPTER, every=3, offset=2))
def test_cleaning_leaves_nothing_of_it(make_config: MakeConfig, source_of: OfEach, what: str) -> None:
    source, branch = source_of(what), make_config("branch", **TRAINED[what], max_steps=7)
    branch.succeed("--from", str(source.output))
    assert (branch.output / "run" / "origin.json").exists()
    works("clean", branch, "--yes")
    assert not (branch.output / "run").exists()
    assert not branch.store.exists()
    assert source.store.exists()
