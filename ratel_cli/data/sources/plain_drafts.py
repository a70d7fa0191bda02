"""Drafts of rows that are no conversations: texts with a class or a target, Alpaca's columns, and token ids.

Invariant: a row becomes exactly one draft or raises `Unusable` with the reason.
"""

from __future__ import annotations

from ratel_cli.data.text.conversations import (
    TurnOptions,
    further_input,
    text_in,
)
from ratel_cli.data.text.drafts import (
    PairDraft,
    RowDraft,
    TextDraft,
    TokensDraft,
    Unusable,
    of_type,
)
from ratel_cli.errors import printable
from ratel_cli.sizes import IGNORED_TARGET

_INT32_MAX = 2**31 - 1


# The prompts of Stanford Alpaca. Models that were tuned on them expect exactly these words.
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)


_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def row_draft(
    kind: str, record: dict[str, object], columns: tuple[str, ...], labels: tuple[str, ...]
) -> RowDraft | PairDraft:
    """Make the draft of a text and, if there is a second column, of its class or of what is written to it. Raises
    Unusable."""
    texts = [text_in(record, column) for column in columns if kind != "classification" or column == columns[0]]
    if not all(text.strip() for text in texts):
        raise Unusable("the text to train on is empty")
    if kind == "seq2seq":
        return PairDraft(source=texts[0], target=texts[1])
    return RowDraft(text=texts[0], label=None if kind == "mlm" else _class_of(record, columns[1], labels))


def _class_of(record: dict[str, object], column: str, labels: tuple[str, ...]) -> int:
    """The number of a row's class. Without `labels` every whole number and every text may be one. Raises Unusable."""
    value = record.get(column)
    if isinstance(value, str) and value in labels:
        return labels.index(value)
    if isinstance(value, str) and value.strip().isdigit():  # from a CSV file
        value = int(value)
    if not labels and isinstance(value, str | int) and not isinstance(value, bool):
        return 0
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(labels):
        return value
    if value is None:
        raise Unusable(f"{column!r} is missing")
    raise Unusable(f"{column!r} is {printable(str(value))}; it must be one of the classes, or 0 to {len(labels) - 1}")


def alpaca(record: dict[str, object], columns: tuple[str, ...], options: TurnOptions) -> TextDraft:
    asked, answer = text_in(record, columns[0]), text_in(record, columns[2])
    context = further_input(record, columns)
    form = _ALPACA_WITH_INPUT if context.strip() else _ALPACA
    system, prompt = options.system, options.system_prompt or ""
    if not prompt and system is not None and record.get(system) is not None:
        prompt = text_in(record, system)
    if prompt.strip():
        form = prompt.replace("{", "{{").replace("}", "}}") + form[form.index("\n\n") :]
    return TextDraft(prompt=form.format(instruction=asked, input=context), answer=answer)


def tokens_of_row(record: dict[str, object]) -> TokensDraft:
    input_ids = _integers(record, "input_ids")
    labels = input_ids if record.get("labels") is None else _integers(record, "labels")
    masks = {name: _integers(record, name) for name in _MASKS if record.get(name) is not None}
    for name, values in {"labels": labels, **masks}.items():
        if len(values) != len(input_ids):
            raise Unusable(f"{name!r} and 'input_ids' have different lengths, {len(values)} and {len(input_ids)}")
    if record.get("labels") is None:
        for name in _LOSS_MASKS & masks.keys():
            labels = [label if flag else IGNORED_TARGET for label, flag in zip(labels, masks[name], strict=True)]
    if "attention_mask" in masks:  # what it hides is padding
        kept = [index for index, flag in enumerate(masks["attention_mask"]) if flag]
        input_ids, labels = ([values[index] for index in kept] for values in (input_ids, labels))
    lengths, positions = record.get("seq_lengths"), record.get("position_ids")
    restarts = isinstance(positions, list) and any(position == 0 for position in positions[1:])
    if restarts or (isinstance(lengths, list) and len(lengths) > 1):  # they would see each other
        raise Unusable("the row has several packed samples; write one sample in each row, and Ratel packs them")
    return TokensDraft(input_ids=input_ids, labels=labels)


_LOSS_MASKS = frozenset({"completion_mask", "assistant_masks", "loss_mask"})
"""Columns of TRL and others with a 1 for each token that has loss."""


_MASKS = ("attention_mask", *sorted(_LOSS_MASKS))


def _integers(record: dict[str, object], column: str) -> list[int]:
    if column not in record:
        raise Unusable(f"the field {column!r} is missing")
    values = of_type(record[column], list, f"{column!r} must be an array of token ids")
    if not set(map(type, values)) <= {int}:
        raise Unusable(f"{column!r} must contain only whole numbers")
    if values and (min(values) < -100 or max(values) > _INT32_MAX):
        raise Unusable(f"{column!r} contains a number that cannot be a token id")
    return values
