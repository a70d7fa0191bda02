"""Encoders that learn masked tokens, classifiers, and encoder-decoders, in a loop of one's own: the weights of plain
PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ratel_cli as ratel
from ratel_cli.sizes import DtypeName, Task
from tests.library.encoders import (
    AUTO_CLASSES,
    CAUSAL,
    CONFIGS,
    DROPOUT,
    EAGER,
    NUM_CLASSES,
    PAIRS,
    VOCABULARY,
    LabelledBatch,
    encoder,
    encoder_config,
    labelled_steps,
    saved_encoder,
    trained_encoder,
)
from tests.reference import Recipe
from tests.tiers import pairwise, rotating, thinned

pytestmark = pytest.mark.usefixtures("_measured_briefly")

DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RATES = (1e-3, 5e-4, 2e-3, 1e-3, 1e-3)
"""At which every parameter changes in bf16."""


@pytest.mark.parametrize(
    ("name", "task", "dtype", "num_micro_batches", "max_grad_norm"),
    [
        *thinned(
            pairwise([*CONFIGS], ["masked_lm", "classification"], ["float32", "bfloat16"], [1, 3], [None, 0.5]),
            every=4,
        ),
        *thinned(pairwise([*PAIRS], ["seq2seq"], ["float32", "bfloat16"], [1, 3], [None, 0.5]), every=8),
        *thinned(pairwise([*CAUSAL], ["classification"], ["float32", "bfloat16"], [1, 3], [None, 0.5]), every=8),
    ],
)
def test_they_train_as_plain_pytorch_does(
    tmp_path: Path, name: str, task: Task, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    """Rows are padded, and only some tokens have labels."""
    steps = labelled_steps(task, len(RATES), num_micro_batches, vocabulary=encoder_config(name).vocab_size)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm, weight_decay=0.1, learning_rates=RATES)
    before = {key: each.detach() for key, each in encoder(name, task).named_parameters()}
    trained = trained_encoder(name, task, steps, recipe)
    losses, norms = [], []
    notice = pytest.warns(UserWarning, match="using eager") if name in EAGER else nullcontext()
    with (
        notice,
        ratel.open(
            saved_encoder(tmp_path / "base", name, task),
            storage=[tmp_path / "a", tmp_path / "b"],
            task=task,
            dtype=dtype,
            device="cpu",
            weight_decay=0.1,
            max_grad_norm=max_grad_norm,
        ) as model,
    ):
        for batch, rate in zip(steps, RATES, strict=True):
            losses.append(model.forward_backward(batch if num_micro_batches > 1 else batch[0]))
            model.step(learning_rate=rate)
            norms.append(model.grad_norm)
        model.save_pretrained(tmp_path / "out")
    assert losses == list(trained.losses)
    assert norms == list(trained.norms)
    loaded = AUTO_CLASSES[task].from_pretrained(tmp_path / "out", dtype=DTYPES[dtype])
    assert [
        name for name, each in loaded.named_parameters() if not torch.equal(each, trained.weights[name].to(each.dtype))
    ] == []
    frozen = {key for key, each in encoder(name, task).named_parameters() if not each.requires_grad}
    stayed = {key for key, each in loaded.named_parameters() if torch.equal(before[key].to(each.dtype), each)}
    assert len(stayed - frozen) <= 1, stayed


@pytest.mark.parametrize(
    ("name", "dtype", "num_micro_batches"),
    [
        *rotating(["bert"], ["float32", "bfloat16"], [1, 3], full_pairs=True, offset=3),
        *thinned(
            pairwise([each for each in DROPOUT if each != "bert"], ["float32", "bfloat16"], [1, 3]),
            every=8,
            full_every=2,
        ),
    ],
)
def test_every_part_draws_by_a_seed_of_its_own(
    tmp_path: Path, name: str, dtype: DtypeName, num_micro_batches: int
) -> None:
    """Dropout in the embedding, in the layers and in the head, which is behind a second call of the embedding; between
    the stacks of an encoder-decoder, too. Draws of layers and embedding are those of forward when they run again."""
    task: Task = "seq2seq" if name in PAIRS else "classification"
    steps = labelled_steps(task, 3, num_micro_batches, vocabulary=encoder_config(name).vocab_size)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=0.5)
    trained = trained_encoder(name, task, steps, recipe, drops=True)
    base = saved_encoder(tmp_path / "base", name, task, drops=True)
    losses, norms = [], []
    notice = pytest.warns(UserWarning, match="using eager") if name in EAGER else nullcontext()
    with (
        notice,
        ratel.open(
            base,
            storage=[tmp_path / "store"],
            task=task,
            dtype=dtype,
            device="cpu",
            weight_decay=0.1,
            max_grad_norm=0.5,
        ) as model,
    ):
        for batch in steps:
            losses.append(model.forward_backward(batch))
            model.step(learning_rate=recipe.learning_rate)
            norms.append(model.grad_norm)
        model.save_pretrained(tmp_path / "out")
    assert (losses, norms) == (list(trained.losses), list(trained.norms))
    loaded = AUTO_CLASSES[task].from_pretrained(tmp_path / "out", dtype=DTYPES[dtype])
    assert [
        name for name, each in loaded.named_parameters() if not torch.equal(each, trained.weights[name].to(each.dtype))
    ] == []


@pytest.mark.parametrize("task", ["masked_lm", "classification", "seq2seq"])
def test_a_loss_of_the_callers_own(tmp_path: Path, task: Task) -> None:
    """It gets the logits and labels of tokens, or of rows."""
    name = "t5" if task == "seq2seq" else "bert"
    [[batch]] = labelled_steps(task, 1, 1)

    def doubled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")

    base = saved_encoder(tmp_path / "base", name, task)
    with ratel.open(base, storage=[tmp_path / "s"], task=task, dtype="float32", device="cpu") as model:
        assert model.evaluate(batch, loss=doubled) == pytest.approx(2 * model.evaluate(batch), rel=1e-6)


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("masked_lm", lambda batch: batch.pop("labels"), "'labels' is missing"),
        ("classification", lambda batch: batch.update(labels=torch.tensor([0, NUM_CLASSES])), "classes are 0 to 2"),
        ("classification", lambda batch: batch.update(labels=batch["input_ids"]), "the class of each line"),
        ("masked_lm", lambda batch: batch.update(labels=batch["input_ids"] * 0 + VOCABULARY), "tokens are 0 to 98"),
    ],
)
def test_labels_that_do_not_fit(
    tmp_path: Path, task: Task, change: Callable[[LabelledBatch], object], message: str
) -> None:
    [[batch]] = labelled_steps(task, 1, 1)
    change(batch)
    base = saved_encoder(tmp_path / "base", "bert", task)
    with (
        ratel.open(base, storage=[tmp_path / "s"], task=task, dtype="float32", device="cpu") as model,
        pytest.raises(ratel.RatelError, match=message),
    ):
        model.forward_backward(batch)


def test_a_model_of_another_task(tmp_path: Path) -> None:
    """An encoder predicts no next token, and classes must be known."""
    base = saved_encoder(tmp_path / "base", "bert", "masked_lm")
    for task, message in (("causal_lm", "is a masked language model"), ("classification", "classes are not known")):
        with pytest.raises(ratel.RatelError, match=message):
            ratel.open(base, storage=[tmp_path / "s"], task=task, device="cpu")


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """The loss is that of plain PyTorch, whatever stands in the padding."""
    [[batch]] = labelled_steps("masked_lm", 1, 1)
    other = LabelledBatch(batch, input_ids=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 42))
    recipe = Recipe(weight_decay=0.0)
    trained = trained_encoder("bert", "masked_lm", [[batch]], replace(recipe, learning_rate=0.0))
    base = saved_encoder(tmp_path / "base", "bert", "masked_lm")
    with ratel.open(base, storage=[tmp_path / "s"], task="masked_lm", dtype="float32", device="cpu") as model:
        assert model.evaluate(batch) == model.evaluate(other) == trained.losses[0]
