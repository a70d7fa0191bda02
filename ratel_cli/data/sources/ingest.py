"""Fills the token cache in one pass over the data: read rows, check them, tokenise them, write them.

Invariants: memory holds one small group of rows at a time. Samples are numbered in the order of the rows. Either the
whole cache is written or nothing of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from operator import sub
from pathlib import Path
from typing import TypeVar

from ratel_cli.data.files.lines import MAX_ROW_BYTES, Reject, Row
from ratel_cli.data.files.remarks import Remark, sentences
from ratel_cli.data.samples.samples import Encoded
from ratel_cli.data.samples.token_cache import SourceCounts, TokenCache, TokenCacheWriter
from ratel_cli.data.sources.encode import Begun, SampleEncoder
from ratel_cli.data.sources.formats import RowFormat, decide_format
from ratel_cli.data.text.drafts import Draft, Unusable, unless_unusable
from ratel_cli.data.text.rows import RowSource
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer, has_chat_template
from ratel_cli.errors import BadInput, ErrorList, RatelError, printable
from ratel_cli.progress import Advance, OpenBar

T = TypeVar("T")

_GROUP_ROWS = 256
_GROUP_CHARS = 1 << 20  # a tokenizer takes about 120 bytes of RAM for each
_MAX_REJECTED_SHARE = 0.01
MAX_SHOWN_REJECTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much a run needs of its streams."""

    num_sequences: int
    """Sequences of the whole run."""
    capacity: int | None
    """Tokens of a sequence; None: a sequence is one sample."""
    window_samples: int
    """Samples that are packed and mixed together. The last window that a run needs is read to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Rows that are encoded together."""

    rows: list[Row | Reject]
    drafts: list[Draft | Reject]
    """What becomes of each row."""
    begun: Begun
    """The drafts that are no rejects."""
    share: float
    """How much of its source is read."""


class Ingestion:
    """One pass over all sources, with its counts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: SampleEncoder,
        writer: TokenCacheWriter,
        sequence_len: int,
        rejects_path: Path | None,
        rejects_shown_by: str | None,
        notice: Callable[[str], None],
        key_of_sources: str,
        *,
        raises_for_length: bool,
    ) -> None:
        self._key_of_sources = key_of_sources
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._writer = writer
        self._sequence_len = sequence_len
        self._rejects_path = rejects_path
        self._rejects_shown_by = rejects_shown_by
        self._notice = notice
        self._notices: list[str] = []
        self._sources: list[SourceCounts] = []
        self._first_rejects: list[Reject] = []
        self._num_rows = 0
        self._raises_for_length = raises_for_length
        self._num_truncated = 0
        self._num_dropped = 0
        self._num_split = 0
        self._remarks: Counter[Remark] = Counter()
        self._skips_header = False
        self._cached_per_sample = 1
        """2 where answers are compared."""

    def run(self, sources: Sequence[RowSource], demand: Demand | None, open_bar: OpenBar) -> TokenCache:
        """Read every source to its end or its `max_samples`, or until the demand is met. Raises BadInput."""
        self._cached_per_sample = 2 if any(source.source.compares is not None for source in sources) else 1
        total = sum(source.num_bytes for source in sources) if demand is None else 1
        what = f"reading the {'test data' if self._key_of_sources == 'test_datasets' else 'data'}"
        with open_bar(what, total, items="rows") as advance:
            if demand is None:
                self._read_all(sources, advance)
            else:
                self._read_streams(sources, demand, advance)
        for source in sources:
            source.check_unchanged()
        if self._rejects_path is not None:
            self._writer.copy_rejects(self._rejects_path)
        self._check_rejects(sources)
        longer = f"longer than sequence_len ({self._sequence_len} tokens)"
        if self._num_split:
            self._note(f"split {self._num_split} of {self._num_rows} texts: {longer}")
        if self._num_dropped:
            self._note(f"dropped {self._num_dropped} of {self._num_rows} samples: {longer}")
        if self._num_truncated:
            self._note(f"truncated {self._num_truncated} of {self._num_rows} samples: {longer}")
        for remark in sentences(self._remarks, self._num_rows):
            self._note(remark)
        if self._skips_header:
            self._note(
                "the chat template has no generation prompt: loss begins at the first word of an assistant turn, after "
                "its header"
            )
        if self._writer.num_rejected:
            see = "" if self._rejects_shown_by is None else f": see {self._rejects_shown_by}"
            self._note(f"rejected {self._writer.num_rejected} of {self._num_rows} rows{see}")
        marks = {what for kind, what in self._remarks if kind == "ends"}
        ids = self._tokenizer.get_vocab() if marks else {}
        return self._writer.finish(
            num_rows=self._num_rows,
            notices=tuple(self._notices),
            sources=tuple(self._sources),
            end_ids=tuple(sorted(ids[mark] for mark in marks)),
        )

    def _note(self, text: str) -> None:
        self._notices.append(text)
        self._notice(text)

    def _counts(self) -> tuple[int, int, int, int, int]:
        writer = self._writer
        num_samples = writer.num_samples // self._cached_per_sample
        return self._num_rows, writer.num_rejected, self._num_truncated, num_samples, self._num_dropped

    def _read_all(self, sources: Sequence[RowSource], advance: Advance) -> None:
        """Read one source after another, to its end or its `max_samples`. After an error, only the first rows."""
        errors = ErrorList()

        def read(source: RowSource) -> None:
            shown = 0.0
            with closing(self._read(source)) as groups:
                for num_rows, share in groups:
                    advance(source.num_bytes * (share - shown), num_rows)
                    shown = share
                    if errors:
                        return
            advance(source.num_bytes * (1 - shown))

        for number, source in enumerate(sources):
            before = self._counts()
            errors.attempt((self._key_of_sources, number, "path"), partial(read, source))
            self._sources.append(SourceCounts(*map(sub, self._counts(), before)))
        errors.raise_all()

    def _read_streams(self, sources: Sequence[RowSource], demand: Demand, advance: Advance) -> None:
        """Read groups of rows of all streams in turn, in the proportion of their weights, until the demand is met."""
        taken = dict.fromkeys(range(len(sources)), 0)
        supply, shown = _Supply(demand), 0.0
        with ExitStack() as streams:
            reading = [streams.enter_context(closing(self._read(source))) for source in sources]
            while taken and not supply.is_enough(self._writer.lengths):
                number = min(taken, key=lambda each: taken[each] / sources[each].source.weight)
                before = self._writer.num_samples
                group = next(reading[number], None)
                if group is None:
                    del taken[number]
                    continue
                taken[number] += self._writer.num_samples - before
                share = supply.share(self._writer.lengths)
                advance(share - shown, group[0])
                shown = share
        if len(sources) == 1:
            self._sources.append(SourceCounts(*self._counts()))

    def _read(self, source: RowSource) -> Generator[tuple[int, float], None, None]:
        """Read one source; yields after each group its rows, and the share of the source that is read."""
        most = left = source.source.max_samples
        with closing(self._drafted(source)) as groups:
            for group in ahead(groups, self._encoder.num_ahead):
                answers = iter(self._encoder.finish(group.begun))
                for row, draft in zip(group.rows, group.drafts, strict=True):
                    if left == 0:
                        return
                    answer = draft if isinstance(draft, Reject) else next(answers)
                    if isinstance(answer, Encoded):
                        self._add(row, answer)
                        left = None if left is None else left - bool(answer.samples)
                    else:
                        self._reject(answer if isinstance(answer, Reject) else _rejected(row, answer))
                share = group.share if most is None or left is None else max(group.share, 1 - left / most)
                yield len(group.rows), min(1.0, share)

    def _drafted(self, source: RowSource) -> Generator[_Group, None, None]:
        """The rows of one source in groups, checked by its format, and their conversations being rendered."""
        num_bytes = 0

        def progress(amount: float) -> None:
            nonlocal num_bytes
            num_bytes += int(amount)

        row_format: RowFormat | None = None
        with closing(source.read(progress)) as rows:
            for group in _groups(rows):
                drafts: list[Draft | Reject] = []
                for row in group:
                    if isinstance(row, Reject):
                        drafts.append(row)
                        continue
                    if row_format is None:
                        row_format = self._decide(source, row)
                    if row.note is not None:
                        self._note(row.note)
                    draft = unless_unusable(partial(row_format.draft, row.record))
                    drafts.append(_rejected(row, draft) if isinstance(draft, Unusable) else draft)
                begun = self._encoder.begin([draft for draft in drafts if not isinstance(draft, Reject)])
                share = num_bytes / source.num_bytes if source.num_bytes else 0.0
                yield _Group(rows=group, drafts=drafts, begun=begun, share=share)

    def _decide(self, source: RowSource, row: Row) -> RowFormat:
        missing = self._tokenizer if isinstance(self._tokenizer, NoTokenizer) else None
        has_template = missing is not None or has_chat_template(self._tokenizer)
        row_format = decide_format(source.source, row.record, has_chat_template=has_template)
        if missing is not None and row_format.kind != "tokens":
            raise missing.missing()
        what = row_format.describe(train_on_inputs=self._encoder.train_on_inputs)
        self._note(f"{printable(source.source.path)}: {what}")
        is_text = row_format.kind in ("completion", "prompt_completion", "alpaca", "compared")
        if is_text and not row_format.is_chat and not self._encoder.closes_texts:
            self._note("the tokenizer has no EOS token: the model will not learn where a text ends")
        return row_format

    def _add(self, row: Row | Reject, encoded: Encoded) -> None:
        """Write the samples of a row. Raises BadInput if it is too long, and the user wants to know it."""
        is_excess = encoded.excess_tokens > 0
        if is_excess and self._raises_for_length:
            num_tokens = self._sequence_len + encoded.excess_tokens
            raise BadInput(
                f"{row.file}:{row.line}: the sample has {num_tokens} tokens, and sequence_len is {self._sequence_len}",
                hint="set a larger sequence_len, or excess_length_strategy: drop or truncate",
            )
        self._num_rows += 1
        self._num_truncated += is_excess and bool(encoded.samples)
        self._num_dropped += not encoded.samples
        self._num_split += len(encoded.samples) > self._cached_per_sample
        self._remarks.update(encoded.remarks)
        self._skips_header |= encoded.skips_header
        for sample in encoded.samples:
            self._writer.add(sample)

    def _reject(self, reject: Reject) -> None:
        self._num_rows += 1
        self._writer.reject(reject)
        if len(self._first_rejects) < MAX_SHOWN_REJECTS:
            self._first_rejects.append(reject)

    def _check_rejects(self, sources: Sequence[RowSource]) -> None:
        """Raise BadInput if too many rows are rejected, or if no sample is left."""
        reject_too_many(self._writer.num_rejected, self._num_rows, self._first_rejects, shown_by=self._rejects_shown_by)
        if self._num_dropped and self._writer.num_samples == 0:
            raise BadInput(
                f"no samples are left: all {self._num_dropped} are longer than sequence_len ({self._sequence_len})",
                hint="set a larger sequence_len, or excess_length_strategy: truncate",
            )
        if self._writer.num_samples == 0:
            paths = ", ".join(printable(source.source.path) for source in sources)
            raise BadInput(f"no samples: {f'no rows were read from {paths}' if paths else 'no dataset is given'}")


def _rejected(row: Row | Reject, why: Unusable) -> Reject:
    return Reject(file=row.file, line=row.line, reason=str(why))


def reject_too_many(num_rejected: int, num_rows: int, first: Sequence[Reject], *, shown_by: str | None) -> None:
    """Raise BadInput, with the `first` of the rejected rows, if these are too many. `shown_by`: what shows them all."""
    if num_rejected > _MAX_REJECTED_SHARE * num_rows:
        more = f" and {num_rejected - len(first)} more" if num_rejected > len(first) else ""
        mend = f"repair or remove these rows{more}"
        if num_rejected == num_rows > 1 and len({each.reason for each in first}) == 1:
            mend = "no row is as the dataset's `type` and columns say; set those that the rows have"
        hint = mend + (f"; {shown_by} lists them with the reasons" if shown_by else "")
        others = (*map(BadInput, map(str, first[:-1])), BadInput(str(first[-1]), hint))
        raise BadInput(f"rejected {num_rejected} of {num_rows} rows; at most 1 % may be bad", others=others)


class _Supply:
    """Counts what was read of streams against the demand, one window after another."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self._counted = 0
        self._num_sequences = 0
        self._shown = (0, 0)

    def is_enough(self, lengths: Sequence[int]) -> bool:
        """Whether whole windows of these samples hold the sequences that are needed, however well they pack."""
        window, capacity = self._demand.window_samples, self._demand.capacity
        while self._counted + window <= len(lengths):
            tokens = sum(lengths[self._counted : self._counted + window])
            self._num_sequences += window if capacity is None else -(-tokens // capacity)
            self._counted += window
        return self._num_sequences >= self._demand.num_sequences

    def share(self, lengths: Sequence[int]) -> float:
        """About how much of the demand these samples meet."""
        counted, num_tokens = self._shown
        self._shown = len(lengths), num_tokens + sum(lengths[counted:])
        capacity = self._demand.capacity
        num_sequences = len(lengths) if capacity is None else self._shown[1] / capacity
        return min(1.0, num_sequences / max(1, self._demand.num_sequences))


def ahead(groups: Iterator[T], number: int) -> Iterator[T]:
    """The groups, each after `number` further ones have begun. An error comes in its place."""
    begun = deque[T]()
    failure: RatelError | None = None
    is_ended = False
    while True:
        while not is_ended and len(begun) <= number:
            try:
                begun.append(next(groups))
            except StopIteration:
                is_ended = True
            except RatelError as error:
                is_ended, failure = True, error
        if not begun:
            break
        yield begun.popleft()
    if failure is not None:
        raise failure


def _groups(rows: Iterator[Row | Reject]) -> Iterator[list[Row | Reject]]:
    """Rows in groups that are small in number and in text."""
    group: list[Row | Reject] = []
    num_chars = 0
    for row in rows:
        num_row_chars = _size(row.record) if isinstance(row, Row) else 0
        if num_row_chars > MAX_ROW_BYTES:  # rows of parquet files and the hub have no line that was bounded
            reason = f"the row has more than {MAX_ROW_BYTES} characters"
            group.append(Reject(file=row.file, line=row.line, reason=reason))
        else:
            group.append(row)
            num_chars += num_row_chars
        if len(group) >= _GROUP_ROWS or num_chars >= _GROUP_CHARS:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


def _size(value: object) -> int:
    """About how many characters a JSON value has."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    if isinstance(value, list):
        return sum(_size(item) for item in value) if value and not isinstance(value[0], int) else 4 * len(value)
    return 8
