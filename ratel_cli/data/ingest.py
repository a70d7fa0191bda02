"""Fills the token cache in one pass over the data: read rows, check them, tokenise them, write them.

Invariants: memory holds one small group of rows at a time. Samples are numbered in the order of the rows. Either the
whole cache is written or nothing of it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from ratel_cli.data.encode import Encoded, SampleEncoder, Tokenizer, has_chat_template, tokenizer_hash
from ratel_cli.data.formats import Draft, RowFormat, Unusable, decide_format
from ratel_cli.data.lines import MAX_ROW_BYTES, Reject, Row
from ratel_cli.data.rows import RowSource
from ratel_cli.data.token_cache import FORMAT_VERSION, TokenCache, TokenCacheWriter, copy_rejects
from ratel_cli.errors import BadInput, EnvironmentFailure, printable
from ratel_cli.json_fields import hash_of

_GROUP_ROWS = 256
_GROUP_CHARS = 1 << 20  # a tokenizer takes about 120 bytes of RAM for each
_MAX_REJECTED_SHARE = 0.01
_MAX_SHOWN_REJECTS = 5


def load_token_cache(
    sources: Sequence[RowSource],
    *,
    tokenizer: Tokenizer,
    sequence_len: int,
    train_on_inputs: bool,
    cache_dir: Path,
    rejects_path: Path,
    notice: Callable[[str], None],
) -> TokenCache:
    """The tokenised samples of all sources. They come from the cache if exactly these were tokenised before.

    `notice` gets remarks for the user, `rejects_path` the rejected rows. Raises BadInput if the data cannot be used,
    EnvironmentFailure if it cannot be read or the cache cannot be written.
    """
    key = _cache_key(sources, tokenizer=tokenizer, sequence_len=sequence_len, train_on_inputs=train_on_inputs)
    try:
        cache = TokenCache.open(cache_dir / key, notice=notice)
        if cache is None:
            encoder = SampleEncoder(tokenizer, sequence_len=sequence_len, train_on_inputs=train_on_inputs)
            with encoder, TokenCacheWriter(cache_dir / key) as writer:
                return _Ingestion(encoder, writer, sequence_len, rejects_path, notice).run(
                    sources, has_chat_template=has_chat_template(tokenizer)
                )
        copy_rejects(cache.directory, rejects_path)
    except OSError as error:
        path = printable(str(error.filename or cache_dir))
        is_full = error.errno == errno.ENOSPC
        raise EnvironmentFailure(
            f"{path}: cannot be written{' (no space left)' if is_full else ''}: {error.strerror}",
            hint="free space there, or set another output_dir" if is_full else None,
        ) from error
    for text in cache.summary.notices:
        notice(text)
    return cache


class _Ingestion:
    """One pass over all sources, with its counts."""

    def __init__(
        self,
        encoder: SampleEncoder,
        writer: TokenCacheWriter,
        sequence_len: int,
        rejects_path: Path,
        notice: Callable[[str], None],
    ) -> None:
        self._encoder = encoder
        self._writer = writer
        self._sequence_len = sequence_len
        self._rejects_path = rejects_path
        self._notice = notice
        self._notices: list[str] = []
        self._first_rejects: list[Reject] = []
        self._num_rows = 0
        self._num_truncated = 0
        self._num_split = 0

    def run(self, sources: Sequence[RowSource], *, has_chat_template: bool) -> TokenCache:
        """Read every source to its end or its `max_samples`, and finish the cache. Raises BadInput."""
        for source in sources:
            self._read(source, has_chat_template=has_chat_template)
            source.check_unchanged()
        self._writer.copy_rejects(self._rejects_path)
        self._check_rejects(sources)
        longer = f"longer than sequence_len ({self._sequence_len} tokens)"
        if self._num_split:
            self._note(f"split {self._num_split} of {self._num_rows} texts: {longer}")
        if self._num_truncated:
            self._note(f"truncated {self._num_truncated} of {self._num_rows} samples: {longer}")
        if self._writer.num_rejected:
            self._note(f"rejected {self._writer.num_rejected} of {self._num_rows} rows: see {self._rejects_name}")
        return self._writer.finish(num_rows=self._num_rows, notices=tuple(self._notices))

    @property
    def _rejects_name(self) -> str:
        return printable(str(self._rejects_path))

    def _note(self, text: str) -> None:
        self._notices.append(text)
        self._notice(text)

    def _read(self, source: RowSource, *, has_chat_template: bool) -> None:
        left = source.source.max_samples
        row_format: RowFormat | None = None
        with closing(source.read()) as rows:
            for group in _groups(rows):
                drafts: list[tuple[Row, Draft]] = []
                rejects: dict[int, Reject] = {}
                for index, row in enumerate(group):
                    if isinstance(row, Reject):
                        rejects[index] = row
                        continue
                    if row_format is None:
                        row_format = self._decide(source, row, has_chat_template=has_chat_template)
                    try:
                        drafts.append((row, row_format.draft(row.record)))
                    except Unusable as unusable:
                        rejects[index] = Reject(file=row.file, line=row.line, reason=str(unusable))
                answers = zip(drafts, self._encoder.encode([draft for _, draft in drafts]), strict=True)
                for index in range(len(group)):
                    if left == 0:
                        return
                    reject = rejects.get(index)
                    if reject is None:
                        (row, _), answer = next(answers)
                        if isinstance(answer, Encoded):
                            self._add(answer)
                            left = None if left is None else left - 1
                            continue
                        reject = Reject(file=row.file, line=row.line, reason=str(answer))
                    self._reject(reject)

    def _decide(self, source: RowSource, row: Row, *, has_chat_template: bool) -> RowFormat:
        row_format = decide_format(source.source, row.record, has_chat_template=has_chat_template)
        self._note(f"{printable(source.source.path)}: {row_format.describe()}")
        if row_format.kind in ("completion", "prompt_completion", "alpaca") and not self._encoder.closes_texts:
            self._note("the tokenizer has no EOS token: the model will not learn where a text ends")
        return row_format

    def _add(self, encoded: Encoded) -> None:
        self._num_rows += 1
        self._num_truncated += encoded.truncated
        self._num_split += len(encoded.samples) > 1
        for sample in encoded.samples:
            self._writer.add(sample)

    def _reject(self, reject: Reject) -> None:
        self._num_rows += 1
        self._writer.reject(reject)
        if len(self._first_rejects) < _MAX_SHOWN_REJECTS:
            self._first_rejects.append(reject)

    def _check_rejects(self, sources: Sequence[RowSource]) -> None:
        """Raise BadInput if too many rows are rejected, or if no sample is left."""
        num_rejected = self._writer.num_rejected
        shown = tuple(BadInput(str(reject)) for reject in self._first_rejects)
        if num_rejected > _MAX_REJECTED_SHARE * self._num_rows:
            raise BadInput(
                f"rejected {num_rejected} of {self._num_rows} rows; more than 1 % stops the run",
                hint=f"repair or remove these rows; {self._rejects_name} lists them with the reasons",
                others=shown,
            )
        if self._writer.num_samples == 0:
            paths = ", ".join(printable(source.source.path) for source in sources)
            raise BadInput(f"nothing to train on: {f'no rows in {paths}' if paths else 'no dataset is given'}")


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


def _cache_key(sources: Sequence[RowSource], *, tokenizer: Tokenizer, sequence_len: int, train_on_inputs: bool) -> str:
    """A hash of everything that decides the content of the cache and of its rejects."""
    parts = {
        "format_version": FORMAT_VERSION,
        "sources": [
            {"settings": asdict(source.source), "files": [[str(stamp.path), stamp.sha256] for stamp in source.files]}
            for source in sources
        ],
        "tokenizer": tokenizer_hash(tokenizer),
        "sequence_len": sequence_len,
        "train_on_inputs": train_on_inputs,
    }
    return hash_of(parts)[:32]
