"""What a dataset looks like, from its first rows: its type, and how long its samples are. For `ratel init`.

Invariant: rows are read under the keys that the config has. The type is the one that `type: auto` would decide on, or
follows from what the model was made for, and lengths are those that a run would see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from ratel_cli.data.files.lines import Reject, Row
from ratel_cli.data.files.media import has_media_parts, media_column
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.sources.encode import SampleEncoder
from ratel_cli.data.sources.formats import Kind, RowFormat, decide_format
from ratel_cli.data.text.drafts import Draft, Unusable
from ratel_cli.data.text.rows import DatasetSource, DatasetType, open_source
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer, has_chat_template
from ratel_cli.errors import BadInput, printable
from ratel_cli.sizes import Task

_TOKENISED_ROWS = 256
_COUNTED_ROWS = 20_000
_MOST_TOKENS = 1 << 24
_MOST_CLASSES = 1000
_TYPES: dict[Kind, DatasetType] = {
    "completion": "completion",
    "prompt_completion": "completion",
    "alpaca": "alpaca",
    "messages": "chat_template",
    "chat_completion": "chat_template",
    "instruction": "chat_template",
    "question_answer": "chat_template",
    "tokens": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSketch:
    """A dataset by its first rows."""

    source: DatasetSource
    """The dataset with its type."""
    described: str
    """What is read from which columns, and what has loss."""
    is_text: bool
    """Whether its samples are plain texts, which are split and not truncated."""
    lengths: tuple[int, ...]
    """Tokens of each sample that was looked at, ascending."""
    num_rows: int
    """Rows that were counted."""
    is_whole: bool
    """Whether these are all rows."""

    @property
    def num_tokens(self) -> int:
        """About how many tokens the counted rows have."""
        return round(sum(self.lengths) / len(self.lengths) * self.num_rows)


def has_pairs(source: DatasetSource) -> bool:
    """Whether the rows have a chosen and a rejected answer, and no key says to read only one. Raises BadInput."""
    read = (source.field, source.field_completion, source.field_messages)
    is_open = source.type == "auto" and source.field_chosen not in read
    return is_open and {source.field_chosen, source.field_rejected} <= _first_row(source).record.keys()


def for_task(source: DatasetSource, task: Task) -> DatasetSource:
    """The dataset with what follows from its rows and from the task that the model was made for, unless it is set: its
    type, its classes, and that images are ignored. Raises BadInput."""
    record = _first_row(source).record
    if media_column(record) is not None or has_media_parts(record):
        source = replace(source, media="ignore")
    if source.compares is not None or source.type not in ("auto", "classification"):
        return source
    names, is_classified = record.keys(), {source.field, source.field_label} <= record.keys()
    if task == "seq2seq" and source.type == "auto" and {source.field_prompt, source.field_completion} <= names:
        return replace(source, type="seq2seq")
    if task == "masked_lm" and source.type == "auto" and source.field in names and not is_classified:
        return replace(source, type="mlm")
    if is_classified and (source.type == "classification" or task in ("masked_lm", "classification")):
        labels = source.labels if source.labels or task == "classification" else _classes(source)
        return replace(source, type="classification", labels=labels)
    return source


def _classes(source: DatasetSource) -> tuple[str, ...] | None:
    """The names of the classes in the first rows, as many as their numbers need; None if these are no classes."""
    opened = open_source(source, notice=lambda text: None, is_stream=True)
    with closing(opened.read()) as rows:
        seen = {row.record.get(source.field_label) for row in islice(rows, _COUNTED_ROWS) if isinstance(row, Row)}
    names = {str(each).strip() for each in seen if each is not None}
    if all(name.isdigit() for name in names) and names:
        names = set(map(str, range(max(map(int, names)) + 1))) if max(map(int, names)) < _MOST_CLASSES else set()
    if not 2 <= len(names) <= _MOST_CLASSES:
        return None
    return tuple(sorted(names, key=lambda name: (name.isdigit() and int(name), name)))


def needs_template(source: DatasetSource, tokenizer: Tokenizer) -> bool:
    """Whether the rows are conversations and the tokenizer has no chat template. Raises BadInput."""
    if has_chat_template(tokenizer) or isinstance(tokenizer, NoTokenizer):
        return False
    row = _first_row(source)
    try:
        decide_format(source, row.record, has_chat_template=False)
    except BadInput:
        decide_format(source, row.record, has_chat_template=True)
        return True
    return False


def sketch_data(source: DatasetSource, tokenizer: Tokenizer, *, notice: Callable[[str], None]) -> DataSketch:
    """Look at the first rows of a dataset. Raises BadInput if no row can be used, EnvironmentFailure."""
    opened = open_source(source, notice=notice, is_stream=True)
    row_format: RowFormat | None = None
    drafts: list[Draft] = []
    reject: Reject | None = None
    num_rows = 0
    with closing(opened.read()) as rows:
        for row in islice(rows, _COUNTED_ROWS):
            num_rows += 1
            if isinstance(row, Reject):
                reject = reject or row
            elif len(drafts) < _TOKENISED_ROWS:
                row_format = row_format or _format(opened.source, row, tokenizer)
                try:
                    drafts.append(row_format.draft(row.record))
                except Unusable as unusable:
                    reject = reject or Reject(file=row.file, line=row.line, reason=str(unusable))
        is_whole = next(rows, None) is None
    with SampleEncoder(tokenizer, sequence_len=_MOST_TOKENS, train_on_inputs=False) as encoder:
        answers = encoder.encode(drafts)
    encoded = [each for each in answers if isinstance(each, Encoded)]
    lengths = tuple(sorted(len(sample.input_ids) for each in encoded for sample in each.samples))
    if row_format is None or not lengths:
        why = reject or next((each for each in answers if isinstance(each, Unusable)), None)
        raise BadInput(f"{printable(source.path)}: no row can be used" + (f": {why}" if why is not None else ""))
    return DataSketch(
        source=replace(source, type=_explicit_type(opened.source, _first_row(source), row_format, tokenizer)),
        described=row_format.describe(),
        is_text=row_format.kind == "completion",
        lengths=lengths,
        num_rows=num_rows,
        is_whole=is_whole,
    )


def _first_row(source: DatasetSource) -> Row:
    opened = open_source(source, notice=lambda text: None, is_stream=True)
    with closing(opened.read()) as rows:
        for row in rows:
            if isinstance(row, Row):
                return row
    raise BadInput(f"{printable(source.path)}: there is no row that can be read")


def _format(source: DatasetSource, row: Row, tokenizer: Tokenizer) -> RowFormat:
    is_missing = isinstance(tokenizer, NoTokenizer)
    found = decide_format(source, row.record, has_chat_template=is_missing or has_chat_template(tokenizer))
    if isinstance(tokenizer, NoTokenizer) and found.kind != "tokens":
        raise tokenizer.missing()
    return found


def _explicit_type(source: DatasetSource, row: Row, found: RowFormat, tokenizer: Tokenizer) -> DatasetType:
    """The type that reads the rows in the same way; `auto` if only that does."""
    if source.type != "auto" or found.kind not in _TYPES:
        return source.type
    wanted = _TYPES[found.kind]
    try:
        same = _format(replace(source, type=wanted), row, tokenizer)
    except BadInput:
        return "auto"
    return wanted if same == found else "auto"
