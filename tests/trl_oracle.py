"""Preference tuning by TRL's own trainers, in memory, as an oracle."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from tests.reference import Begun
from tests.reference_optimizers import begin_with

NAMES = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
    "nll_loss", "log_odds_ratio", "log_odds_chosen", "kl",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    method: str
    num_steps: int
    micro_batch_size: int
    accumulation: int
    learning_rate: float
    max_length: int
    options: tuple[tuple[str, object], ...] = ()
    """Of the trainer's own config."""
    lora: tuple[tuple[str, object], ...] | None = None
    """Of `peft.LoraConfig`; None: the whole model is trained."""
    seed: int = 42
    begun: Begun | None = field(default=None, hash=False)
    """What training goes on from, with the weights of `begun_weights`; rows of the steps before are still needed."""
    begun_weights: Mapping[str, torch.Tensor] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    losses: list[float]
    norms: list[float]
    figures: list[dict[str, float]]
    """Of each step, by name."""
    weights: dict[str, torch.Tensor]
    """All that are trained, by name."""
    evaluated: dict[str, float]
    """What the trainer's own evaluation gives at the end, by name."""


def tune(
    base: Path, rows: Sequence[Mapping[str, object]], recipe: Recipe, held_out: Sequence[Mapping[str, object]] = ()
) -> Tuned:
    """Train the model of a directory in fp32 on rows in their order."""
    with _quietly(), tempfile.TemporaryDirectory() as directory:
        return _tune(base, rows, recipe, held_out, directory)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings and the words of TRL and transformers."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)


def _tune(
    base: Path,
    rows: Sequence[Mapping[str, object]],
    recipe: Recipe,
    held_out: Sequence[Mapping[str, object]],
    directory: str,
) -> Tuned:
    trainer_class, config_class, options = _trainer_of(recipe.method)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    num_done = 0 if recipe.begun is None else recipe.begun.step
    model.load_state_dict(dict(recipe.begun_weights), strict=False)
    if recipe.lora is not None:
        torch.manual_seed(recipe.seed)
        model = get_peft_model(model, LoraConfig(**dict(recipe.lora)))  # type: ignore[arg-type]
    arguments = config_class(
        output_dir=directory,
        per_device_train_batch_size=recipe.micro_batch_size,
        per_device_eval_batch_size=recipe.micro_batch_size,
        gradient_accumulation_steps=recipe.accumulation,
        max_steps=recipe.num_steps - num_done,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        max_length=recipe.max_length,
        seed=recipe.seed,
        **{**options, **dict(recipe.options)},
    )
    norms: list[float] = []
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(
            [dict(row) for row in rows[num_done * recipe.micro_batch_size * recipe.accumulation :]]
        ),
        eval_dataset=Dataset.from_list([dict(row) for row in held_out]) if held_out else None,
        processing_class=AutoTokenizer.from_pretrained(base),
        callbacks=[_Begins(recipe)],
    )
    trainer.train()
    evaluated = trainer.evaluate() if held_out else {}
    history = [each for each in trainer.state.log_history if "loss" in each and "grad_norm" in each]
    norms = [each["grad_norm"] for each in history]
    trained = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    return Tuned(
        losses=[each["loss"] for each in history],
        norms=norms,
        figures=[{name: each[name] for name in NAMES if name in each} for each in history],
        weights=trained,
        evaluated={key.removeprefix("eval_"): value for key, value in evaluated.items()},
    )


class _Begins(TrainerCallback):
    """Gives the optimizer the moments that training goes on from."""

    def __init__(self, recipe: Recipe) -> None:
        self._begun = recipe.begun

    def on_train_begin(
        self, *_: object, model: PreTrainedModel, optimizer: torch.optim.Optimizer, **__: object
    ) -> None:
        if self._begun is not None:
            parameters = dict(model.named_parameters())
            for name, moments in self._begun.moments.items():
                begin_with([optimizer], parameters[name], moments, num_updates=self._begun.num_updates)


def _trainer_of(method: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
    if method in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer, DPOConfig, {"loss_type": ["sigmoid" if method == "dpo" else "ipo"]}
    if method == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig, {}
    if method == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig, {}
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer, CPOConfig, {"loss_type": "simpo"}


def prepared(
    method: str,
    rows: Sequence[Mapping[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    size: int = 2,
) -> list[dict[str, list[int]]]:
    """The tokens that the trainer of `dpo` or `kto` makes of rows: those of each prompt and of the answers behind it.
    `size`: rows of a micro-batch."""
    trainer_class, config_class, _ = _trainer_of(method)
    with _quietly(), tempfile.TemporaryDirectory() as directory:
        arguments = config_class(
            output_dir=directory, max_length=max_length, per_device_train_batch_size=size, bf16=False, use_cpu=True
        )
        trainer = SimpleNamespace(_tokenizer=tokenizer, calculate_KL=True)
        found = trainer_class._prepare_dataset(
            trainer, Dataset.from_list([dict(row) for row in rows]), tokenizer, arguments, "test"
        )
        return [dict(row) for row in found]
