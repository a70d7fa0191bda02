"""One pass over the data: rows are read, checked, tokenised and laid down in the token cache.

For `data/dataset.py`. Invariant: memory holds one small batch of rows at a time; sample numbers follow the order
of the rows; either the whole cache comes into being or none of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
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

_BATCH_ROWS = 256
_BATCH_CHARS = 1 << 20  # a tokenizer takes some 120 bytes for each while it works
_REJECT_SHARE = 0.01
_SHOWN_REJECTS = 5


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
    """The tokenised samples of all sources, from the cache when the very same work was done before."""
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
        full = " (no space left)" if error.errno == errno.ENOSPC else ""
        raise EnvironmentFailure(
            f"{printable(str(error.filename or cache_dir))}: cannot be written{full}: {error.strerror}"
        ) from error
    for words in cache.summary.notices:
        notice(words)
    return cache


class _Ingestion:
    """One run over all sources, and what is counted on the way."""

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
        """Reads every source to its end (or its max_samples) and finishes the cache. Raises BadInput."""
        for source in sources:
            self._read(source, has_chat_template=has_chat_template)
            source.check_unchanged()
        self._writer.copy_rejects(self._rejects_path)
        self._judge(sources)
        longer = f"longer than sequence_len {self._sequence_len} tokens"
        if self._num_split:
            self._say(f"{self._num_split} of {self._num_rows} texts are {longer} and were split")
        if self._num_truncated:
            self._say(f"{self._num_truncated} of {self._num_rows} samples are {longer} and were cut")
        if self._writer.num_rejected:
            self._say(f"{self._writer.num_rejected} of {self._num_rows} rows rejected: see {self._rejects_name}")
        return self._writer.finish(num_rows=self._num_rows, notices=tuple(self._notices))

    @property
    def _rejects_name(self) -> str:
        return printable(str(self._rejects_path))

    def _say(self, words: str) -> None:
        self._notices.append(words)
        self._notice(words)

    def _read(self, source: RowSource, *, has_chat_template: bool) -> None:
        left = source.source.max_samples
        row_format: RowFormat | None = None
        with closing(source.read()) as rows:
            for batch in _batches(rows):
                drafts: list[tuple[Row, Draft]] = []
                rejects: dict[int, Reject] = {}
                for index, row in enumerate(batch):
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
                for index in range(len(batch)):
                    if left == 0:
                        return
                    reject = rejects.get(index)
                    if reject is None:
                        (row, _), answer = next(answers)
                        if isinstance(answer, Encoded):
                            self._keep(answer)
                            left = None if left is None else left - 1
                            continue
                        reject = Reject(file=row.file, line=row.line, reason=str(answer))
                    self._reject(reject)

    def _decide(self, source: RowSource, row: Row, *, has_chat_template: bool) -> RowFormat:
        row_format = decide_format(source.source, row.record, has_chat_template=has_chat_template)
        self._say(f"{printable(source.source.path)}: {row_format.describe()}")
        if row_format.kind in ("completion", "prompt_completion", "alpaca") and not self._encoder.closes_texts:
            self._say("the tokenizer has no EOS token: the model will not learn where a text ends")
        return row_format

    def _keep(self, encoded: Encoded) -> None:
        self._num_rows += 1
        self._num_truncated += encoded.truncated
        self._num_split += len(encoded.samples) > 1
        for sample in encoded.samples:
            self._writer.add(sample)

    def _reject(self, reject: Reject) -> None:
        self._num_rows += 1
        self._writer.reject(reject)
        if len(self._first_rejects) < _SHOWN_REJECTS:
            self._first_rejects.append(reject)

    def _judge(self, sources: Sequence[RowSource]) -> None:
        """Too many rejects, or nothing left, ends the run before anything is trained."""
        num_rejected = self._writer.num_rejected
        shown = tuple(BadInput(str(reject)) for reject in self._first_rejects)
        if num_rejected > _REJECT_SHARE * self._num_rows:
            raise BadInput(
                f"{num_rejected} of {self._num_rows} rows are unusable, and more than 1 % ends the run",
                hint=f"all of them, with reasons: {self._rejects_name}",
                others=shown,
            )
        if self._writer.num_samples == 0:
            paths = ", ".join(printable(source.source.path) for source in sources) or "no dataset is given"
            raise BadInput(f"nothing to train on: no rows in {paths}")


def _batches(rows: Iterator[Row | Reject]) -> Iterator[list[Row | Reject]]:
    """Rows in groups that are small in number and in text."""
    batch: list[Row | Reject] = []
    num_chars = 0
    for row in rows:
        num_row_chars = _size(row.record) if isinstance(row, Row) else 0
        if num_row_chars > MAX_ROW_BYTES:  # parquet and the hub have no lines to bound
            reason = f"the row holds more than {MAX_ROW_BYTES} characters"
            batch.append(Reject(file=row.file, line=row.line, reason=reason))
        else:
            batch.append(row)
            num_chars += num_row_chars
        if len(batch) >= _BATCH_ROWS or num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _size(value: object) -> int:
    """SpanLabel how many characters a JSON value holds."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(item) for item in value.values())
    if isinstance(value, list):
        return sum(_size(item) for item in value) if value and not isinstance(value[0], int) else 4 * len(value)
    return 8


def _cache_key(sources: Sequence[RowSource], *, tokenizer: Tokenizer, sequence_len: int, train_on_inputs: bool) -> str:
    """Everything that decides the cache's content and the names in its rejects."""
    parts = {
        "format_version": FORMAT_VERSION,
        "sources": [
            {
                "settings": asdict(source.source),
                "files": [[str(stamp.path), stamp.sha256] for stamp in source.files],
            }
            for source in sources
        ],
        "tokenizer": tokenizer_hash(tokenizer),
        "sequence_len": sequence_len,
        "train_on_inputs": train_on_inputs,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
