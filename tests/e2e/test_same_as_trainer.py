"""The same run in transformers' Trainer and in Ratel: `examples/same_as_trainer.py`, and what it says of other runs.

Here Ratel's command line runs in this process. One test runs the example as a user does.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from examples import same_as_trainer
from examples.same_as_trainer import MODELS, Step, Trained, is_equal, num_equal, num_weights, run_both, table
from tests.e2e.runs import works
from tests.tiers import sample

ROOT = Path(__file__).parents[2]


def with_changes(*changes: str) -> Callable[[Path], None]:
    """`ratel finetune CONFIG` with `key=value` arguments, in this process."""

    def finetune(config: Path) -> None:
        works("finetune", config, *changes)

    return finetune


@pytest.mark.full
@pytest.mark.parametrize("name", sample(list(MODELS), every=2))
def test_everything_is_equal(name: str, tmp_path: Path) -> None:
    trainer, ratel = run_both(name, tmp_path / name, with_changes())
    assert list(trainer.steps) == list(ratel.steps)
    assert (len(trainer.steps), num_equal(trainer, ratel)) == (10, num_weights(trainer))
    assert is_equal(trainer, ratel)
    assert {step.norm > 1.0 for step in trainer.steps} == {True, False}, "some steps are clipped, and some are not"
    assert trainer.steps[-1].loss < trainer.steps[0].loss - 1, "the run learns"


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(MODELS))
def test_any_number_of_targets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 116 targets in a step the losses are rounded at other places. Everything else is equal."""
    monkeypatch.setattr(same_as_trainer, "ANSWER_TOKENS", 29)
    trainer, ratel = run_both(name, tmp_path / name, with_changes())
    assert num_equal(trainer, ratel) == num_weights(trainer)
    assert [(step.rate, step.norm) for step in trainer.steps] == [(step.rate, step.norm) for step in ratel.steps]
    assert [step.loss for step in trainer.steps] == pytest.approx([step.loss for step in ratel.steps], rel=3e-7)


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["weight_decay=0.101", "warmup_steps=3", "max_grad_norm=0", "adam_beta2=0.998"])
def test_other_settings_are_not_equal(change: str, tmp_path: Path) -> None:
    trainer, ratel = run_both("qwen3", tmp_path / "qwen3", with_changes(change))
    assert not is_equal(trainer, ratel)
    assert num_equal(trainer, ratel) < num_weights(trainer)


class _WithMasters(torch.optim.AdamW):
    """AdamW on fp32 masters of bf16 parameters; each step copies the masters down."""

    def __init__(self, model: PreTrainedModel, masters: PreTrainedModel, decaying: Iterable[str], decay: float) -> None:
        names, of_name = {*decaying}, dict(masters.named_parameters())
        self._pairs = [(parameter, of_name[name]) for name, parameter in model.named_parameters()]
        groups = [
            {"params": [p for n, p in of_name.items() if (n in names) == decays], "weight_decay": decay * decays}
            for decays in (True, False)
        ]
        super().__init__(groups, lr=1e-2)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter, master in self._pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)


def bf16_in_trainer(base: Path, rows: Path, directory: Path, *, masters: bool) -> Trained:
    """bf16 weights without autocast; `masters`: with fp32 masters, which Trainer itself does not have."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    arguments = TrainingArguments(
        output_dir=str(directory),
        train_sampling_strategy="sequential",
        per_device_train_batch_size=2,
        max_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        optim="adamw_torch",
        weight_decay=0.1,
        max_grad_norm=0.0,  # of bf16 gradients torch takes a bf16 norm
        use_cpu=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(PreTrainedTokenizerFast.from_pretrained(base))
    trainer = Trainer(
        model=model, args=arguments, train_dataset=same_as_trainer.read_rows(rows), data_collator=collator
    )
    if masters:
        full = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        trainer.optimizer = _WithMasters(model, full, trainer.get_decay_parameter_names(model), 0.1)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(directory))
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return Trained(
        steps=[Step(loss=line["loss"], rate=line["learning_rate"], norm=line["grad_norm"]) for line in logged],
        weights=load_file(directory / "model.safetensors"),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(MODELS))
def test_bf16_weights_need_fp32_masters(name: str, tmp_path: Path) -> None:
    """`dtype: bfloat16` is bf16 weights with fp32 masters: equal to Trainer only if it gets an optimizer that has them.

    One micro-batch, because Trainer sums bf16 gradients in bf16 and Ratel sums them in fp32.
    """
    base, rows = tmp_path / "base", tmp_path / "rows.jsonl"
    same_as_trainer.make_base(name, base)
    same_as_trainer.make_rows(rows)
    finetune = with_changes("dtype=bfloat16", "gradient_accumulation_steps=1", "max_grad_norm=0")
    ratel = same_as_trainer.train_with_ratel(base, rows, tmp_path / "ratel", finetune)
    with_masters = bf16_in_trainer(base, rows, tmp_path / "masters", masters=True)
    without = bf16_in_trainer(base, rows, tmp_path / "plain", masters=False)
    assert {key: weight.dtype for key, weight in ratel.weights.items()} == dict.fromkeys(ratel.weights, torch.bfloat16)
    assert [step.loss for step in with_masters.steps] == [step.loss for step in ratel.steps]
    assert all(torch.equal(weight, ratel.weights[key]) for key, weight in with_masters.weights.items())
    assert without.steps[0].loss == ratel.steps[0].loss, "the same weights, before the first update"
    assert [step.loss for step in without.steps[2:]] != [step.loss for step in ratel.steps[2:]]


TRAINED = Trained(steps=[Step(loss=2.0, rate=0.1, norm=1.0)], weights={"a": torch.tensor([0.0, 1.0, 2.0])})


def test_the_comparison_can_fail() -> None:
    assert is_equal(TRAINED, TRAINED)
    for change in ({"loss": 2.0000002}, {"rate": 0.2}, {"norm": 1.1}):
        other = replace(TRAINED, steps=[replace(TRAINED.steps[0], **change)])
        assert not is_equal(TRAINED, other)
        assert [line.rsplit(maxsplit=1)[-1] for line in table(TRAINED, other)][2] == "NO"
    other = replace(TRAINED, weights={"a": torch.tensor([-0.0, 1.0, 2.0])})
    assert not is_equal(TRAINED, other)
    assert list(table(TRAINED, other))[-1] == "weights: 2 of 3 equal to the bit"


def test_a_run_that_fails_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no such file(?s:.*)ended with exit code 2"):
        same_as_trainer.ratel_finetune(tmp_path / "missing.yaml")


def test_a_directory_that_exists_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        same_as_trainer.main(["--directory", str(tmp_path)])
    assert f"{tmp_path} exists; name a new directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_the_program(tmp_path: Path) -> None:
    """As a user runs it, both models. The documents show what it prints."""
    command = [sys.executable, "examples/same_as_trainer.py", "--directory", str(tmp_path / "runs")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout.splitlines()
    assert printed[-1] == "Trainer and Ratel are equal to the bit."
    for line in [*printed[:3], printed[13]]:  # of qwen3: all but the numbers, which are those of a processor
        for document in ("README.md", "examples/README.md"):
            assert line in (ROOT / document).read_text(encoding="utf-8").splitlines(), f"{document}: {line}"
