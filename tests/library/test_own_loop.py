"""A loop of one's own trains as plain PyTorch does, goes on where it was left, and says what is wrong with it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import ratel_cli as ratel
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.hardware.host import kept_bytes
from ratel_cli.library import states
from ratel_cli.sizes import DtypeName
from ratel_cli.store.store import Store
from ratel_cli.units import GIB
from tests.engine.architectures import VOCAB_SIZE, tiny_config
from tests.engine.machine import attention_of, initial_weights
from tests.reference import Recipe, Trained, train_in_memory, train_module
from tests.tiers import pairwise, thinned

pytestmark = pytest.mark.usefixtures("_measured_briefly")

Batch = dict[str, torch.Tensor]
RATES = (1e-3, 5e-4, 2e-3, 1e-3, 1e-3)
"""At which every parameter changes in bf16."""
TOKENS = torch.ones(2, 3, dtype=torch.long)
DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def saved(directory: Path, architecture: str) -> Path:
    config = tiny_config(architecture)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(initial_weights(config), strict=False)
    model.save_pretrained(directory)
    return directory


def batches(number: int, num_micro_batches: int, *, num_tokens: int = 12) -> list[list[Batch]]:
    """Of each step the micro-batches: random tokens, some without loss, the second row padded."""
    generator = torch.Generator().manual_seed(number)

    def batch() -> Batch:
        tokens = torch.randint(0, VOCAB_SIZE, (2, num_tokens), generator=generator)
        labels = tokens.clone()
        labels[0, 3] = -100
        mask = torch.ones_like(tokens)
        mask[1, num_tokens - 2 :] = 0
        return {"input_ids": tokens, "labels": labels, "attention_mask": mask}

    return [[batch() for _ in range(num_micro_batches)] for _ in range(number)]


def for_reference(batch: Batch) -> MicroBatch:
    """The same for plain PyTorch, which looks at targets."""
    targets = torch.full_like(batch["labels"], -100)
    targets[:, :-1] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    return MicroBatch(
        input_ids=batch["input_ids"],
        targets=targets,
        position_ids=torch.arange(targets.shape[1]).expand_as(targets).contiguous(),
        sample_ids=(),
        num_targets=int((targets != -100).sum()),
        num_tokens=targets.numel(),
    )


def wanted(architecture: str, steps: Sequence[Sequence[Batch]], recipe: Recipe) -> Trained:
    config = tiny_config(architecture)
    recipe = replace(recipe, attn_implementation=attention_of(config), learning_rates=RATES[: len(steps)])
    return train_in_memory(config, initial_weights(config), [list(map(for_reference, step)) for step in steps], recipe)


def train(model: ratel.Model, steps: Iterable[Any], rates: Sequence[float] = RATES, **options: object) -> list[float]:
    """The losses of these steps."""
    losses = []
    for step, rate in zip(steps, rates, strict=False):
        losses.append(model.forward_backward(step, **options))  # type: ignore[arg-type]
        model.step(learning_rate=rate)
    return losses


def exported(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "dtype", "num_micro_batches", "max_grad_norm"),
    thinned(pairwise(["llama", "gpt2", "llama_tied"], ["float32", "bfloat16"], [1, 3], [None, 0.5]), every=2),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path, architecture: str, dtype: DtypeName, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    steps = batches(len(RATES), num_micro_batches)
    recipe = Recipe(dtype=DTYPES[dtype], max_grad_norm=max_grad_norm, weight_decay=0.1)
    losses, norms = [], []
    with ratel.open(
        saved(tmp_path / "base", architecture),
        storage=[tmp_path / "a", tmp_path / "b"],
        dtype=dtype,
        device="cpu",
        weight_decay=0.1,
        max_grad_norm=max_grad_norm,
    ) as model:
        for batch, rate in zip(steps, RATES, strict=True):
            losses.append(model.forward_backward(batch if num_micro_batches > 1 else batch[0]))
            model.step(learning_rate=rate)
            norms.append(model.grad_norm)
        model.save_pretrained(tmp_path / "out")
    plain = wanted(architecture, steps, recipe)
    assert losses == list(plain.losses)
    assert norms == list(plain.norms)
    for name, found in exported(tmp_path / "out").items():
        assert torch.equal(found, plain.weights[name].to(DTYPES[dtype])), name
        assert not torch.equal(found, initial_weights(tiny_config(architecture))[name].to(DTYPES[dtype])), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=DTYPES[dtype])
    assert all(torch.equal(value, plain.weights[name].to(value.dtype)) for name, value in loaded.named_parameters())


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with smoothed labels, and a penalty on the size of the logits."""
    loss = cross_entropy(logits.float(), labels, label_smoothing=0.1, reduction="sum", ignore_index=-100)
    return loss + 1e-3 * (logits.float().logsumexp(-1).square() * (labels != -100)).sum()


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_with_another_loss_it_trains_as_plain_pytorch_does(tmp_path: Path, base: Path, num_micro_batches: int) -> None:
    steps, config = batches(3, num_micro_batches), tiny_config("llama")
    plain_model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))

    def loss_sum(batch: MicroBatch) -> torch.Tensor:
        logits = plain_model(input_ids=batch.input_ids, use_cache=False).logits
        return smoothed(logits.view(-1, logits.shape[-1]), batch.targets.reshape(-1))

    recipe = Recipe(weight_decay=0.0, learning_rates=RATES[:3])
    micro_batches = [list(map(for_reference, step)) for step in steps]
    plain = train_module(plain_model, loss_sum, initial_weights(config), micro_batches, recipe, decayed=())
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        losses = train(model, steps, loss=smoothed)
        assert model.evaluate(steps[0], loss=smoothed) != model.evaluate(steps[0])
        model.save_pretrained(tmp_path / "out")
    assert losses == list(plain.losses)
    assert all(torch.equal(found, plain.weights[name]) for name, found in exported(tmp_path / "out").items())


def test_a_loss_that_is_no_sum_is_rejected_and_changes_nothing(tmp_path: Path, base: Path) -> None:
    """Whatever it raises in the middle of a step, the step before counts, and the next one can be computed."""
    steps, losses = batches(3, 1), []

    def fails(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    wrong = (lambda logits, labels: logits, lambda logits, labels: 1.0, lambda logits, labels: labels.sum())
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        for step, rate, loss in zip(steps, RATES, wrong, strict=False):
            with pytest.raises(ratel.RatelError, match="the loss must be one number"):
                model.forward_backward(step, loss=loss)  # type: ignore[arg-type, return-value]
            with pytest.raises(ZeroDivisionError):
                model.forward_backward(step, loss=fails)
            losses.append(model.forward_backward(step))
            model.step(learning_rate=rate)
        model.save_pretrained(tmp_path / "out")
    plain = wanted("llama", steps, Recipe(weight_decay=0.0))
    assert losses == list(plain.losses)
    assert all(torch.equal(found, plain.weights[name]) for name, found in exported(tmp_path / "out").items())


def test_an_import_that_was_interrupted_begins_again(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    steps = batches(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(states, "imported_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu")
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        assert [model.forward_backward(steps[0])] == list(wanted("llama", steps, Recipe()).losses)


def test_it_goes_on_where_it_was_left(tmp_path: Path, base: Path) -> None:
    """After a close, and after gradients that no step followed."""
    steps = batches(4, 1)
    for first, last in ((0, 2), (2, 3), (3, 4)):
        with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
            assert model.num_steps == first
            for number in range(first, last):
                model.forward_backward(steps[number])
                model.step(learning_rate=RATES[number])
            if last < 4:
                model.forward_backward(steps[last])
            else:
                model.save_pretrained(tmp_path / "out")
    plain = wanted("llama", steps, Recipe(weight_decay=0.0))
    assert all(torch.equal(found, plain.weights[name]) for name, found in exported(tmp_path / "out").items())


def test_batches_may_become_larger_and_smaller(tmp_path: Path, base: Path) -> None:
    steps = [*batches(1, 1, num_tokens=8), *batches(1, 3, num_tokens=20), *batches(1, 2, num_tokens=6)]
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        losses = train(model, steps)
    assert losses == list(wanted("llama", steps, Recipe(weight_decay=0.0)).losses)


def test_an_evaluation_is_the_loss_of_the_model_as_it_is(tmp_path: Path, base: Path) -> None:
    [first], [second] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        before = model.evaluate(second)
        train(model, [first])
        after = model.evaluate(second)
        assert model.forward_backward(second) == after != before
    assert before == wanted("llama", [[second]], Recipe()).losses[0]


def test_a_scheduler_gives_the_rate_and_steps(tmp_path: Path, base: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATES[0])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: RATES[min(step, 4)] / RATES[0])
    steps = batches(3, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        losses = []
        for step in steps:
            losses.append(model.forward_backward(step))
            optimizer.step()
            model.step(learning_rate=scheduler)
    assert losses == list(wanted("llama", steps, Recipe(weight_decay=0.0)).losses)


def test_a_loss_that_is_not_finite_ends_the_loop_and_changes_nothing(tmp_path: Path, base: Path) -> None:
    [first], [second] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(first)
        model.step(learning_rate=1e30)
        with pytest.raises(ratel.RatelError, match=r"step 2: .* is .*; step 1 is saved"):
            model.forward_backward(second)
        assert model.num_steps == 1


UNUSABLE: list[tuple[Any, str]] = [
    ({}, "'input_ids' is missing"),
    ({"input_ids": torch.ones(2, 3)}, "must be a dense tensor of integers"),
    ({"input_ids": torch.ones(3, dtype=torch.long)}, r"\[batch, tokens\]"),
    ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "at least one of each"),
    (
        {"input_ids": torch.ones(2, 3).long(), "token_type_ids": torch.ones(2, 3).long()},
        "unknown: 'token_type_ids'",
    ),
    ({"input_ids": TOKENS, "labels": torch.ones(2, 4).long()}, r"'labels' is \[2, 4\], but"),
    ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 1]])}, "pad on the right"),
    ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[2, 1, 1]])}, "must be 1 for tokens"),
    ({"input_ids": torch.ones(1, 3).long(), "labels": torch.full((1, 3), -100)}, "a step needs a label"),
    ({"input_ids": torch.ones(3, 1).long()}, "a step needs a label"),
    ({"input_ids": TOKENS * VOCAB_SIZE}, f"'input_ids' has {VOCAB_SIZE}, but the model's tokens are 0 to"),
    ({"input_ids": -TOKENS}, "'input_ids' has -1, but"),
    ({"input_ids": TOKENS, "labels": -TOKENS}, "'labels' has -1, but"),
    ([], "a list of at least one"),
    (None, "a mapping from names to tensors, not NoneType"),
    ([None], "not NoneType"),
    ("text", "not str"),
    (TOKENS, "not Tensor"),
    (3, "not int"),
    ({"input_ids": None}, "must be a dense tensor of integers"),
    ({"input_ids": [[1, 2]]}, "must be a dense tensor of integers"),
    ({"input_ids": TOKENS.to_sparse()}, "must be a dense tensor of integers"),
    ({"input_ids": TOKENS.to("meta")}, "must be a dense tensor of integers"),
]


def test_a_batch_that_cannot_be_used_is_rejected(tmp_path: Path, base: Path) -> None:
    """And changes nothing."""
    [[batch]] = batches(1, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        for unusable, message in UNUSABLE:
            with pytest.raises(ratel.RatelError, match=message):
                model.forward_backward(unusable)
        assert train(model, [batch]) == list(wanted("llama", [[batch]], Recipe()).losses)


def test_calls_in_a_wrong_order_are_rejected(tmp_path: Path, base: Path) -> None:
    [first], [second] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        with pytest.raises(ratel.RatelError, match="step needs gradients"):
            model.step(learning_rate=1e-3)
        assert math.isnan(model.grad_norm)
        model.forward_backward(first)
        with pytest.raises(ratel.RatelError, match="twice without step"):
            model.forward_backward(second)
        for asked in (lambda: model.evaluate(second), lambda: model.save_pretrained(tmp_path / "out")):
            with pytest.raises(ratel.RatelError, match="between forward_backward and step"):
                asked()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        with pytest.raises(ratel.RatelError, match="needs a metric"):
            model.step(learning_rate=plateau)  # type: ignore[arg-type]
        for rate in (-1.0, float("nan")):
            with pytest.raises(ratel.RatelError, match="from 0 on"):
                model.step(learning_rate=rate)
        model.step(learning_rate=1e-3)
        with pytest.raises(ratel.RatelError, match="step needs gradients"):
            model.step(learning_rate=1e-3)
        with pytest.raises(ratel.RatelError, match="a loss needs a label"):
            model.evaluate({"input_ids": torch.ones(1, 1).long()})
    model.close()
    with pytest.raises(ratel.RatelError, match="the model is closed"):
        model.forward_backward(first)


def test_other_settings_or_another_model_do_not_take_over_a_state(tmp_path: Path, base: Path) -> None:
    storage = [tmp_path / "state"]
    with ratel.open(base, storage=storage, dtype="float32", device="cpu"):
        pass
    before = {path: path.read_bytes() for path in storage[0].iterdir() if path.is_file()}
    with pytest.raises(ratel.RatelError, match="was made with other settings"):
        ratel.open(base, storage=storage, dtype="float32", device="cpu", weight_decay=0.5)
    with pytest.raises(ratel.RatelError, match="was made with another model"):
        ratel.open(saved(tmp_path / "other", "gpt2"), storage=storage, dtype="float32", device="cpu")
    assert before == {path: path.read_bytes() for path in storage[0].iterdir() if path.is_file()}


def test_an_export_replaces_nothing_of_the_users(tmp_path: Path, base: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        with pytest.raises(ratel.RatelError, match="Ratel did not make it"):
            model.save_pretrained(tmp_path / "out")
        assert (tmp_path / "out" / "config.json").read_text() == "mine"
        model.save_pretrained(tmp_path / "out", overwrite=True)
        model.save_pretrained(tmp_path / "out")
        for directory in (base, base / "inside", base.parent):
            with pytest.raises(ratel.RatelError, match="base model"):
                model.save_pretrained(directory, overwrite=True)
    assert exported(tmp_path / "out")
    with ratel.open(base, storage=[tmp_path / "other"], dtype="float32", device="cpu") as model:
        with pytest.raises(ratel.RatelError, match="has the model of"):
            model.save_pretrained(tmp_path / "out")
        model.save_pretrained(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": "state"}, "must be a list of directories"),
        ({"storage": []}, "must be a list of directories"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"dtype": "int8"}, "dtype: "),
        ({"weight_decay": -1.0, "eps": 0.0}, r"eps: .*; weight_decay: |weight_decay: .*; eps: "),
        ({"limits": ratel.Limits(host_memory="many")}, r"limits\.host_memory: "),
        ({"model": "missing/"}, "missing"),
    ],
)
def test_arguments_that_cannot_be_used_are_rejected(
    tmp_path: Path, base: Path, changes: dict[str, object], message: str
) -> None:
    arguments = {"model": base, "storage": [tmp_path / "state"], "dtype": "float32", "device": "cpu", **changes}
    with pytest.raises(ratel.RatelError, match=message):
        ratel.open(**arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "state").exists()


def test_what_never_fits_is_rejected_before_anything_is_written(tmp_path: Path, base: Path) -> None:
    limits = ratel.Limits(host_memory="200MiB")
    with pytest.raises(ratel.RatelError, match=r"RAM: a step needs .* available"):
        ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu", limits=limits)
    assert not (tmp_path / "state").exists()


def test_after_a_batch_that_does_not_fit_smaller_ones_train_on(tmp_path: Path, base: Path) -> None:
    steps, losses = batches(3, 1), []
    limits = ratel.Limits(host_memory=kept_bytes() + GIB)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu", limits=limits) as model:
        for step, rate in zip(steps, RATES, strict=False):
            losses.append(model.forward_backward(step))
            model.step(learning_rate=rate)
            with pytest.raises(ratel.RatelError, match=r"RAM: a step needs .* available"):
                model.forward_backward({"input_ids": torch.zeros(20000, 128, dtype=torch.long)})
    assert losses == list(wanted("llama", steps, Recipe(weight_decay=0.0)).losses)


def large_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 1e4 * cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)


def test_in_fp16_a_step_that_overflows_is_skipped(tmp_path: Path, base: Path) -> None:
    """The first scale is 65536: with gradients that are 10,000 times as large, some steps overflow."""
    steps, losses = batches(20, 1), []
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float16", device="cpu") as model:
        for step in steps:
            losses.append(model.forward_backward(step, loss=large_loss))
            model.step(learning_rate=1e-3)
        assert model.num_steps == 20
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float16", device="cpu") as model:
        assert model.num_steps == 20
        assert model._pending.loss_scale < 65536 and 0 < model._pending.updates < 20


def test_an_interruption_after_the_decision_drops_the_step_alone(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, losses = batches(3, 1), []
    decide = StepEngine._decide

    def interrupted(engine: StepEngine[MicroBatch], loss_total: float) -> object:
        decide(engine, loss_total)
        raise KeyboardInterrupt

    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        for step, rate in zip(steps, RATES, strict=False):
            with monkeypatch.context() as patch:
                patch.setattr(StepEngine, "_decide", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    model.forward_backward(step)
            losses.append(model.forward_backward(step))
            model.step(learning_rate=rate)
        with monkeypatch.context() as patch:
            patch.setattr(StepEngine, "_decide", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.forward_backward(steps[0])
    assert losses == list(wanted("llama", steps, Recipe(weight_decay=0.0)).losses)


def test_random_numbers_of_the_caller_are_not_touched(tmp_path: Path, base: Path) -> None:
    torch.manual_seed(7)
    drawn = torch.rand(4)
    torch.manual_seed(7)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(batches(1, 1)[0])
        first = torch.rand(2)
        model.step(learning_rate=1e-3)
        model.evaluate(batches(1, 1)[0])
        assert torch.equal(torch.cat([first, torch.rand(2)]), drawn)


def test_a_state_that_is_open_is_not_opened_again(tmp_path: Path, base: Path) -> None:
    with (
        ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu"),
        mock.patch.dict(Store.open.__func__.__kwdefaults__, lock_wait_seconds=0.0),  # type: ignore[attr-defined]
        pytest.raises(ratel.RatelError, match=r"in use|another"),
    ):
        ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu")


def test_the_public_names() -> None:
    assert ratel.__all__ == [
        "AdamW", "Hooked", "Limits", "Model", "Optimizer", "RatelError", "explain", "hook", "init",
        "offload_activations", "open",
    ]  # fmt: skip
    assert all(getattr(ratel, name) is not None for name in ratel.__all__)
    with pytest.raises(AttributeError, match="no attribute 'close'"):
        _ = ratel.close  # type: ignore[attr-defined]


def test_a_state_is_verified(tmp_path: Path, base: Path) -> None:
    [[batch]] = batches(1, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(batch)
        with pytest.raises(ratel.RatelError, match="verify was called between"):
            model.verify()
        model.step(learning_rate=1e-3)
        model.verify()


def test_a_state_that_is_deleted_meanwhile_is_told_of(tmp_path: Path, base: Path) -> None:
    """With each commit: that of the next step, and that of what ends the loop."""
    words = r"state/ratel\.store was deleted while it is in use"
    [[first], [second]] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(first)
        model.step(learning_rate=1e-3)
        shutil.rmtree(tmp_path / "state")
        with pytest.warns(UserWarning, match=words):
            model.forward_backward(second)
        model.step(learning_rate=1e-3)
        with pytest.warns(UserWarning, match=words):
            model.close()
    assert model.num_steps == 2


def test_a_plan_is_explained(tmp_path: Path, base: Path) -> None:
    [[batch]] = batches(1, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        with pytest.raises(ratel.RatelError, match="the model has no plan yet"):
            ratel.explain(model)
        model.forward_backward(batch)
        text = ratel.explain(model)
    assert [line.split()[0] for line in text.splitlines()[:7]] == [
        "step", "RAM", "forward", "backward", "predicted", "NVMe", "offloaded",
    ]  # fmt: skip
