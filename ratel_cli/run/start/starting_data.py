"""What a dataset looks like, from its first rows: its type, and how long its samples are. For `ratel init`.

Invariant: the type is the one that `type: auto` would decide on, and lengths are those that a run would see.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

from ratel_cli.data.drafts import Draft, Unusable
from ratel_cli.data.encode import SampleEncoder
from ratel_cli.data.formats import Kind, RowFormat, decide_format
from ratel_cli.data.lines import Reject, Row
from ratel_cli.data.rows import DatasetSource, DatasetType, open_source
from ratel_cli.data.samples import Encoded
from ratel_cli.data.tokenizer import NoTokenizer, Tokenizer, has_chat_template
from ratel_cli.errors import BadInput, printable

_TOKENISED_ROWS = 256
_COUNTED_ROWS = 20_000
_MOST_TOKENS = 1 << 24
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

    path: str
    type: DatasetType
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


def needs_template(path: str, tokenizer: Tokenizer) -> bool:
    """Whether the rows are conversations and the tokenizer has no chat template. Raises BadInput."""
    if has_chat_template(tokenizer) or isinstance(tokenizer, NoTokenizer):
        return False
    source, row = DatasetSource(path=path), _first_row(path)
    try:
        decide_format(source, row.record, has_chat_template=False)
    except BadInput:
        decide_format(source, row.record, has_chat_template=True)
        return True
    return False


def sketch_data(path: str, tokenizer: Tokenizer, *, notice: Callable[[str], None]) -> DataSketch:
    """Look at the first rows of a dataset. Raises BadInput if no row can be used, EnvironmentFailure."""
    opened = open_source(DatasetSource(path=path), notice=notice, is_stream=True)
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
    lengths = _lengths(drafts, tokenizer)
    if row_format is None or not lengths:
        raise BadInput(f"{printable(path)}: no row can be used" + (f": {reject}" if reject is not None else ""))
    return DataSketch(
        path=path,
        type=_explicit_type(opened.source, _first_row(path), row_format, tokenizer),
        described=row_format.describe(),
        is_text=row_format.kind == "completion",
        lengths=lengths,
        num_rows=num_rows,
        is_whole=is_whole,
    )


def _first_row(path: str) -> Row:
    opened = open_source(DatasetSource(path=path), notice=lambda text: None, is_stream=True)
    with closing(opened.read()) as rows:
        for row in rows:
            if isinstance(row, Row):
                return row
    raise BadInput(f"{printable(path)}: there is no row that can be read")


def _format(source: DatasetSource, row: Row, tokenizer: Tokenizer) -> RowFormat:
    is_missing = isinstance(tokenizer, NoTokenizer)
    found = decide_format(source, row.record, has_chat_template=is_missing or has_chat_template(tokenizer))
    if isinstance(tokenizer, NoTokenizer) and found.kind != "tokens":
        raise tokenizer.missing()
    return found


def _explicit_type(source: DatasetSource, row: Row, found: RowFormat, tokenizer: Tokenizer) -> DatasetType:
    """The type that reads the rows in the same way; `auto` if only that does."""
    wanted = _TYPES[found.kind]
    try:
        same = _format(replace(source, type=wanted), row, tokenizer)
    except BadInput:
        return "auto"
    return wanted if same == found else "auto"


def _lengths(drafts: list[Draft], tokenizer: Tokenizer) -> tuple[int, ...]:
    with SampleEncoder(tokenizer, sequence_len=_MOST_TOKENS, train_on_inputs=False) as encoder:
        answers = encoder.encode(drafts)
    return tuple(
        sorted(len(sample.input_ids) for each in answers if isinstance(each, Encoded) for sample in each.samples)
    )
