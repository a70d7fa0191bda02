"""The model card: README.md of an export, in the form that the Hugging Face hub reads.

It says what the model was made from, with which settings, and how its loss went. The model's author adds the rest.
Invariant: it names no path of the machine that it was made on, and nothing in it depends on when it was made. So a step
that is exported twice has the same card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from ratel_cli.errors import printable
from ratel_cli.model.files.denoiser_config import CLASS_NAME
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.sizes import DtypeName, Task
from ratel_cli.units import counted, format_count

CARD_NAME: Final = "README.md"
PICTURE_NAME: Final = "curves.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Data that a model was trained on, or evaluated on."""

    name: str
    """The id of a dataset on the hub; otherwise the name of the file or directory, without its place."""
    is_on_hub: bool
    details: tuple[str, ...] = ()
    """What else is known about it, such as its split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """The losses of a stretch of steps."""

    step: int
    """The last of the steps."""
    loss: float | None
    """The mean over the steps since the row before; None if none of them has a finite loss."""
    eval_loss: float | None
    """Loss of the evaluation after `step`; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a run knows about its model, for the card."""

    name: str
    """The name of the model."""
    repository: str | None
    """The repository of the hub that the model is uploaded to; None: it is not uploaded."""
    base_model: str | None
    """The hub id of the base model; None if it is a directory of this machine."""
    is_random: bool
    """Whether the weights were drawn instead of read from the base model."""
    origin: str | None
    """The step of another run that this one started from, in words; None if there is none."""
    datasets: tuple[DataSource, ...]
    test_datasets: tuple[DataSource, ...]
    settings: Mapping[str, object]
    """Keys of the config that decide the result."""
    losses: tuple[LossRow, ...]
    software: str
    """What trained the model, with versions, separated by commas."""
    picture: bytes | None
    """The curves as a PNG file; None if they are not drawn."""
    task: Task = "causal_lm"
    """What the model has learned."""
    is_adapter: bool = False
    """Whether this is an adapter alone, without its base."""


_LOADED_BY: Mapping[Task, tuple[str, str | None, str]] = {
    "causal_lm": ("transformers", "text-generation", "AutoModelForCausalLM"),
    "masked_lm": ("transformers", "fill-mask", "AutoModelForMaskedLM"),
    "classification": ("transformers", "text-classification", "AutoModelForSequenceClassification"),
    "seq2seq": ("transformers", "text2text-generation", "AutoModelForSeq2SeqLM"),
    "denoising": ("diffusers", None, CLASS_NAME),
}
"""The library that loads a model of a task, what the hub calls the task, and the class."""


_PEFT_CLASSES: Mapping[Task, str] = {
    "causal_lm": "AutoPeftModelForCausalLM",
    "seq2seq": "AutoPeftModelForSeq2SeqLM",
}
"""PEFT's classes that load an adapter with its base; `AutoPeftModel` for other tasks."""


def card_text(card: Card, spec: ModelSpec, *, dtype: DtypeName, num_updates: int) -> str:
    """The card as Markdown, with the front matter that the hub reads."""
    sources = [f"* {_source(each)}" for each in card.datasets]
    sources += [f"* {_source(each)}, for evaluation" for each in card.test_datasets]
    sections = [
        _front_matter(card),
        f"# {printable(card.name)}\n\n{_summary(card, spec, dtype, num_updates)}\n",
        _usage(card.repository or ".", card),
        _section("Data", "\n".join(sources)),
        _section("Settings", f"```yaml\n{_yaml(card.settings)}```" if card.settings else ""),
        _losses(card),
        _section("Software", "\n".join(f"* {printable(part)}" for part in card.software.split(", ") if part)),
    ]
    return "\n".join(section for section in sections if section)


def plain_card(spec: ModelSpec) -> Card:
    """The card of a model of which nothing else is known."""
    return Card(
        name=Path(spec.name).name,
        repository=None,
        base_model=None,
        is_random=False,
        origin=None,
        datasets=(),
        test_datasets=(),
        settings={},
        losses=(),
        software="",
        picture=None,
    )


def _front_matter(card: Card) -> str:
    library, tag, _ = _LOADED_BY[card.task]
    library = "peft" if card.is_adapter else library
    fields: dict[str, object] = {"library_name": library, **({} if tag is None else {"pipeline_tag": tag})}
    if card.base_model is not None:
        fields["base_model"] = card.base_model
        if not card.is_random:
            fields["base_model_relation"] = "adapter" if card.is_adapter else "finetune"
    on_hub = dict.fromkeys(each.name for each in card.datasets if each.is_on_hub)
    if on_hub:
        fields["datasets"] = list(on_hub)
    fields["tags"] = ["ratel"]
    return f"---\n{_yaml(fields)}---\n"


def _summary(card: Card, spec: ModelSpec, dtype: DtypeName, num_updates: int) -> str:
    base = _code(Path(spec.name).name)
    if card.base_model is not None:
        base = f"[{card.base_model}](https://huggingface.co/{card.base_model})"
    made = f"fine-tuned from {base}"
    if card.is_random:
        made = f"trained from random weights in the shape of {base}"
    if card.is_adapter:
        size = format_count(spec.num_trained)
        text = f"A LoRA adapter of {size} parameters for {base}, trained with Ratel: {counted(num_updates, 'update')}."
        return text if card.origin is None else f"{text} The run started from {printable(card.origin)}."
    is_whole = spec.num_trained == spec.num_parameters
    trained = "all parameters" if is_whole else f"{format_count(spec.num_trained)} of them"
    text = (
        f"{spec.architecture} with {format_count(spec.num_parameters)} parameters in {dtype}, {made} with Ratel: "
        f"{trained}, {counted(num_updates, 'optimizer update')}."
    )
    return text if card.origin is None else f"{text} The run started from {printable(card.origin)}."


def _usage(place: str, card: Card) -> str:
    library, _, name = _LOADED_BY[card.task]
    classes = {"model": name, **({"tokenizer": "AutoTokenizer"} if library == "transformers" else {})}
    imports = f"from {library} import {', '.join(classes.values())}\n"
    if card.is_adapter:
        classes["model"] = _PEFT_CLASSES.get(card.task, "AutoPeftModel")
        imports = f"from peft import {classes['model']}\nfrom transformers import AutoTokenizer\n"
    lines = [f'{what} = {each}.from_pretrained("{place}")\n' for what, each in classes.items()]
    return f"```python\n{imports}\n{''.join(lines)}```\n"


def _source(source: DataSource) -> str:
    name = _code(source.name)
    if source.is_on_hub:
        name = f"[{source.name}](https://huggingface.co/datasets/{source.name})"
    return ", ".join([name, *map(printable, source.details)])


def _losses(card: Card) -> str:
    if not card.losses:
        return ""
    evaluated = any(row.eval_loss is not None for row in card.losses)
    head = ["Step", "Training loss", *(["Evaluation loss"] if evaluated else [])]
    rows = [[str(row.step), _number(row.loss), *([_number(row.eval_loss)] if evaluated else [])] for row in card.losses]
    table = [_row(head), _row(["---:"] * len(head)), *map(_row, rows)]
    text = "A training loss is the mean over the steps since the row above.\n\n" + "\n".join(table)
    if card.picture is not None:
        text += f"\n\n![Loss, learning rate and gradient norm of each step]({PICTURE_NAME})"
    return _section("Losses", text)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}\n" if text else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _code(text: str) -> str:
    """The text as code, whatever is in it."""
    shown = printable(text)
    return f"`{shown}`" if "`" not in shown else f"`` {shown} ``"


def _yaml(values: Mapping[str, object]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
