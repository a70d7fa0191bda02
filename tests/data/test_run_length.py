"""How many steps a run has, of which kinds: as transformers' Trainer counts them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_callback import TrainerState

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.run.inputs.length import learning_rates, num_steps, rounds_up
from tests.data.conftest import Load, WriteRows
from tests.tiers import examples


class _Counting(Trainer):
    """A Trainer without a model, that only counts."""

    def __init__(self, args: object) -> None:
        self.args = args  # type: ignore[assignment]

    def get_sp_size(self) -> int:
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return args.per_device_train_batch_size * args.gradient_accumulation_steps


def counted_by_trainer(config: RunConfig, num_samples: int) -> tuple[int, int, TrainerState, list[float]]:
    """Steps of an epoch and of the run, when it saves and evaluates, and its learning rates."""
    arguments = SimpleNamespace(
        max_steps=-1 if config.max_steps is None else config.max_steps,
        num_train_epochs=config.num_epochs,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        warmup_steps=config.warmup_steps or config.warmup_ratio,
        logging_steps=1,
        save_steps=config.save_steps,
        eval_steps=config.eval_steps,
    )
    loader: DataLoader[int] = DataLoader(range(num_samples), batch_size=config.micro_batch_size)  # type: ignore[arg-type]
    counted = _Counting(arguments).set_initial_training_values(arguments, loader)  # type: ignore[arg-type]
    of_epoch, of_run = counted[1], counted[-1]
    state = TrainerState()
    state.compute_steps(arguments, of_run)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    warmup = TrainingArguments.get_warmup_steps(arguments, of_run)  # type: ignore[arg-type]
    scheduler = get_scheduler(config.lr_scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=of_run)
    rates = []
    for _ in range(of_run):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return of_epoch, of_run, state, rates


@examples(200)
@given(
    num_samples=st.integers(1, 40),
    micro_batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    num_epochs=st.floats(0.001, 3) | st.integers(1, 3),
    warmup=st.sampled_from(["warmup_steps", "warmup_ratio"]),
    ratios=st.tuples(*[st.floats(0.001, 0.999) | st.sampled_from([0.03, 0.05, 0.1, 0.3])] * 3),
    max_steps=st.none() | st.integers(1, 12),
)
@example(
    num_samples=20, micro_batch_size=2, accumulation=2, num_epochs=0.5, warmup="warmup_ratio", ratios=(0.03, 0.1, 0.3),
    max_steps=None,
)  # fmt: skip
def test_lengths_are_those_of_trainer(
    load: Load,
    write_rows: WriteRows,
    num_samples: int,
    micro_batch_size: int,
    accumulation: int,
    num_epochs: float,
    warmup: str,
    ratios: tuple[float, float, float],
    max_steps: int | None,
) -> None:
    """Steps of epoch and run, the last micro-batches of an epoch, warm-up, intervals of saving and evaluating."""
    sizes_of_step = {"micro_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation}
    settings = {
        "num_epochs": num_epochs, "max_steps": max_steps, warmup: ratios[0], "save_steps": ratios[1],
        "eval_steps": ratios[2], "val_set_size": 1, "lr_scheduler": "linear", **sizes_of_step,
    }  # fmt: skip
    config = RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "p"}], **settings})
    rows = write_rows(*({"input_ids": [5, 6]} for _ in range(num_samples)))
    data = load(
        rows,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        packing=False,
        sequence_len=16,
    )
    of_epoch, of_run, state, rates = counted_by_trainer(config, num_samples)
    found = num_steps(config, data.steps_per_epoch)
    assert (data.steps_per_epoch, found) == (of_epoch, of_run)
    assert (config.save_interval(found), config.eval_interval(found)) == (state.save_steps, state.eval_steps)
    schedule = learning_rates(config, found)
    assert [schedule.at(step) for step in range(found)] == rates
    sizes = [len(batch.sample_ids) for step in range(of_epoch) for batch in data.step(step)]
    loader: DataLoader[int] = DataLoader(range(num_samples), batch_size=micro_batch_size)  # type: ignore[arg-type]
    assert sizes == [len(batch) for batch in loader]
    assert len(data.step(of_epoch - 1)) == (math.ceil(num_samples / micro_batch_size) % accumulation or accumulation)


@pytest.mark.parametrize(
    ("content", "expected"), [(None, True), ("{", True), ('{"rounds_up": true}', True), ("{}", False)]
)
def test_which_runs_round_as_before(tmp_path: Path, content: str | None, expected: bool) -> None:
    """Those whose record does not say that they round up."""
    config = RunConfig.model_validate({"base_model": "m", "datasets": [{"path": "p"}], "output_dir": str(tmp_path)})
    facts = (
        '"num_steps": 8, "first_step": 2, "num_samples": 3, "num_tokens": 4, "software": "s", "started": "", "pid": 7'
    )
    if content is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "run.json").write_text(content.replace("}", f", {facts}}}").replace("{, ", "{"))
    assert rounds_up(config) is expected


def test_a_run_of_an_earlier_version_has_its_numbers() -> None:
    config = RunConfig.model_validate(
        {"base_model": "m", "datasets": [{"path": "p"}], "num_epochs": 0.5, "warmup_ratio": 0.3}
    )
    assert (num_steps(config, 5), num_steps(config, 5, rounds_up=False)) == (3, 2)
    assert num_steps(config, 1, rounds_up=False) == 1
    warmups = [learning_rates(config, 4, rounds_up=rounds).num_warmup_steps for rounds in (True, False)]
    assert warmups == [2, 1]
    in_steps = config.model_copy(update={"warmup_steps": 0.3, "warmup_ratio": 0.0})
    assert learning_rates(in_steps, 4, rounds_up=False).num_warmup_steps == 2
