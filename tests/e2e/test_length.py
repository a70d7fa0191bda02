"""A run that gets more or fewer steps: the steps that are done stay, and those that follow are those of the new length.

The oracle is plain PyTorch with the rates of `transformers.get_scheduler`: the earlier length's for the steps that were
done with it, and the new length's from there on.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from ratel_cli.config.load import load_config
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, assert_rejected, file_hash
from tests.e2e.trained import assert_trained, in_plain_torch
from tests.reference import Trained

WARMED_UP: dict[str, object] = {"warmup_ratio": 0.3, "lr_scheduler": "linear"}


def rates(config: Config, num_steps: int, *, num_warmup_steps: int | None = None) -> list[float]:
    """The rates of a run of this many steps, by transformers. `num_warmup_steps`: not those of the config."""
    settings = load_config(config).config
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=settings.learning_rate)
    warmup = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=settings.warmup_ratio), num_steps)  # type: ignore[arg-type]
    name = "constant_with_warmup" if settings.lr_scheduler == "constant" else settings.lr_scheduler
    warmup = warmup if num_warmup_steps is None else num_warmup_steps
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)
    found = []
    for _ in range(num_steps):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def reference(config: Config, base: Path, learning_rates: list[float]) -> Trained:
    """The config's steps in memory, with these rates."""
    return in_plain_torch(config, base, learning_rates=tuple(learning_rates))


def check_same(config: Config, trained: Trained, learning_rates: list[float]) -> None:
    """Weights, losses, norms and rates, bit for bit."""
    assert_trained(config, trained)
    found = [(line["step"], line["learning_rate"]) for line in config.metrics]
    assert found == list(enumerate(learning_rates, start=1))


@pytest.mark.parametrize(
    ("scheduler", "dtype"),
    [
        ("linear", "float32"),
        pytest.param("cosine", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("linear", "bfloat16", marks=pytest.mark.nightly),
        pytest.param("cosine", "float32", marks=pytest.mark.nightly),
        pytest.param("constant_with_warmup", "float32", marks=pytest.mark.nightly),
    ],
)
def test_a_finished_run_gets_more_steps(make_config: MakeConfig, base: Path, scheduler: str, dtype: str) -> None:
    """With warm-up, clipping and accumulation, twice; the last step of each part has a rate of its own."""
    config = make_config(**WARMED_UP | {"lr_scheduler": scheduler, "dtype": dtype})
    config.succeed()
    stderr = config.succeed("max_steps=6")
    expected = [*rates(config, 4), *rates(config, 6)[4:], *rates(config, 11)[6:]]
    words = (
        "max_steps was 4, is now 6: the run now ends with step 6; from step 5 on its learning rate is that of a run of "
        f"6 steps ({expected[4]:.2e} in step 5)"
    )
    assert words in stderr
    assert "resuming from step 4" in stderr
    assert "max_steps was 6, is now 11" in config.succeed("max_steps=11")
    check_same(config, reference(config, base, expected), expected)
    assert "was" not in config.succeed("max_steps=11"), "it has this length now"


@pytest.mark.full
def test_epochs_are_added(make_config: MakeConfig) -> None:
    """At a constant rate it is the longer run, bit for bit."""
    extended, whole = (make_config(name, max_steps=None, num_epochs=2.5) for name in ("extended", "whole"))
    whole.succeed()
    extended.succeed("num_epochs=0.5")
    assert len(extended.metrics) < extended.load_data().steps_per_epoch
    stderr = extended.succeed()
    assert f"num_epochs was 0.5, is now 2.5: the run now ends with step {len(whole.metrics)}; " in stderr
    extended.assert_same_result(whole)


@pytest.mark.full
def test_a_run_of_an_earlier_version_keeps_its_length(make_config: MakeConfig) -> None:
    """It was to have 3 steps, the nearest number to 3.4, without a warm-up: 0.9 steps were none. Now it would be 4 and
    2 of them; so it is when the run starts over."""
    steps_per_epoch = make_config().load_data().steps_per_epoch
    config = make_config(**WARMED_UP | {"max_steps": None, "num_epochs": 3.4 / steps_per_epoch})
    config.run_until_killed(kill_at="commit.written:4")
    file = config.output / "run" / "run.json"
    facts = json.loads(file.read_text())
    assert (facts["num_steps"], facts.pop("rounds_up")) == (4, True)
    file.write_text(json.dumps({**facts, "num_steps": 3}))
    for _ in range(2):  # what it was begun with stays known
        assert "is now" not in config.succeed()
        facts = json.loads(file.read_text())
        assert (facts["num_steps"], facts["rounds_up"]) == (3, False)
    expected = [*rates(config, 4)[:2], rates(config, 3, num_warmup_steps=0)[2]]
    assert [line["learning_rate"] for line in config.metrics] == expected
    config.succeed("--resume", "no")
    assert [line["learning_rate"] for line in config.metrics] == rates(config, 4)
    assert json.loads(file.read_text())["rounds_up"]


@pytest.mark.nightly
def test_a_run_that_was_killed_gets_more_steps(make_config: MakeConfig, base: Path) -> None:
    """The steps that it had done are those of the earlier length, though that run never ended."""
    config = make_config(**WARMED_UP | {"max_steps": 6})
    config.run_until_killed(kill_at="commit.written:4")
    config.succeed("max_steps=9")
    expected = [*rates(config, 6)[:2], *rates(config, 9)[2:]]
    lines = [line["learning_rate"] for line in config.metrics]
    assert lines == expected
    check_same(config, reference(config, base, expected), expected)


@pytest.mark.nightly
def test_without_the_files_of_the_run(make_config: MakeConfig, plain_run: Config) -> None:
    """The store alone is enough; only the notice needs the earlier config."""
    config = make_config(max_steps=2)
    config.succeed()
    shutil.rmtree(config.output / "run")
    assert "is now" not in config.succeed("max_steps=4")
    assert [line["step"] for line in config.metrics] == [3, 4]
    weights, expected = config.exported, plain_run.exported
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.nightly
def test_a_planned_split_stays(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has the split, whatever the length."""
    split = {"tokens_per_step": 256, "micro_batch_size": None, "gradient_accumulation_steps": None}
    written_out = make_config("run", micro_batch_size=1, gradient_accumulation_steps=4, max_steps=2)
    written_out.succeed()
    planned = make_config("run", **split)
    assert planned == written_out
    assert "4 micro-batches of 1 x 64 = 256 tokens, split by the plan; steps 3 to 4" in planned.succeed()


@pytest.mark.full
def test_fewer_steps_than_are_done(make_config: MakeConfig, base: Path) -> None:
    """Rejected, with the ways back; the saved step that the hint names can be exported and gone back to."""
    config = make_config(**WARMED_UP | {"max_steps": 8, "save_steps": 3, "save_total_limit": 3})
    config.succeed()
    before = file_hash(config.store)
    ended = config.finetune("max_steps=5")
    assert_rejected(ended, 2, "has done 8 steps, but would now end after step 5: max_steps was 8, is now 5")
    hint = (
        "hint: set max_steps or num_epochs higher to train on; or go back to a saved step with --resume 3, which drops "
        f"the later steps; or export it with `ratel export {config} --step 3 -o DIR`"
    )
    assert hint in ended.stderr
    assert_rejected(config.finetune("max_steps=5", "--resume", "6"), 2, "has done 6 steps, but would now end after")
    assert file_hash(config.store) == before
    stderr = config.succeed("max_steps=5", "--resume", "3")
    assert "max_steps was 8, is now 5: the run now ends with step 5; from step 4 on" in stderr
    expected = [*rates(config, 8)[:3], *rates(config, 5)[3:]]
    check_same(config, reference(config, base, expected), expected)


@pytest.mark.nightly
def test_no_step_to_go_back_to(make_config: MakeConfig) -> None:
    config = make_config(max_steps=3)
    config.succeed()
    shutil.rmtree(config.output / "run")
    ended = config.finetune("max_steps=2")
    assert_rejected(ended, 2, "the run has done 3 steps, but would now end after step 2")
    assert "or start over with --resume no; no step is saved that is early enough to go back to" in ended.stderr


def test_a_run_may_end_where_it_is(make_config: MakeConfig, plain_run: Config) -> None:
    """It was stopped; now what it has done is all, and it is exported."""
    config = make_config(max_steps=9)
    config.run_until_killed(kill_at="commit.written:6")
    stderr = config.succeed("max_steps=4")
    assert "max_steps was 9, is now 4: the run now ends with step 4, which is done" in stderr
    config.assert_same_result(plain_run)
