"""Finds the tokens of sources where they were kept, or makes them.

Invariant: kept tokens are used only if exactly these rows were tokenised with exactly these settings. Of conversations,
those that an earlier version ended elsewhere are used on by the run that has them, and by no other.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ratel_cli.data.samples.token_cache import FORMAT_VERSION, TokenCache, TokenCacheWriter, copy_rejects
from ratel_cli.data.sources.encode import Encoding, SampleEncoder
from ratel_cli.data.sources.ingest import Demand, Ingestion
from ratel_cli.data.text.rows import RowSource
from ratel_cli.data.text.shared_tokens import SharedTokens
from ratel_cli.data.text.tokenizer import num_ids, tokenizer_hash
from ratel_cli.errors import EnvironmentFailure, printable
from ratel_cli.json_fields import hash_of
from ratel_cli.progress import OpenBar, no_bar

_RULE_OF_TURNS = 2
"""Whoever changes which tokens of a conversation have loss counts it up, so that no cache of the earlier rule is used
for a new run."""
_OF_EARLIER_RULE = (
    "this run keeps the tokens of an earlier version of Ratel, which ended turns elsewhere; a new output_dir gets new "
    "tokens"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """Where tokens, and the rows that are rejected, are kept."""

    cache_dir: Path
    shared: SharedTokens | None = None
    """Tokens of other commands, which are used as well and get those that are new; None: no others are."""
    rejects_path: Path | None
    """The file for the rejected rows; None: they are not written."""
    rejects_shown_by: str | None = None
    """What shows the rejected rows to the user; None: this file, if there is one."""

    @property
    def shown_by(self) -> str | None:
        """What shows the rejected rows to the user; None if nothing does."""
        return self.rejects_shown_by or (None if self.rejects_path is None else printable(str(self.rejects_path)))


def load_token_cache(
    sources: Sequence[RowSource],
    encoding: Encoding,
    files: TokenFiles,
    *,
    sequence_len: int,
    notice: Callable[[str], None],
    demand: Demand | None = None,
    key_of_sources: str = "datasets",
    open_bar: OpenBar = no_bar,
) -> TokenCache:
    """The tokenised samples of all sources. They come from the cache if exactly these were tokenised before.

    `demand`: the sources are streams, and only as much of them is read; None: all of them is. `open_bar` shows how far
    reading is. `notice` gets remarks for the user. `key_of_sources` is their key in the config, for errors.
    Raises BadInput if the data cannot be used, EnvironmentFailure if it cannot be read or the cache cannot be written.
    The error has those of all sources, as far as their first rows show them.
    """
    parts = _described(sources, encoding, sequence_len, demand)
    earlier_key = hash_of(parts)[:32]
    key = hash_of({**parts, "turns": _RULE_OF_TURNS, "stop_ids": sorted(encoding.stop_ids)})[:32]
    # Others' tokens are to be those that this command would make today: a template may write the date.
    writes_date = "strftime_now" in str(encoding.tokenizer.chat_template)
    shared_key = f"{key} {datetime.now().astimezone().date()}" if writes_date else key
    cache_dir, shared = files.cache_dir, files.shared
    try:
        cache = TokenCache.open(cache_dir / key, notice=notice, open_bar=open_bar)
        if cache is None:
            cache = TokenCache.open(cache_dir / earlier_key, notice=notice, open_bar=open_bar)
            if cache is not None:
                notice(f"{printable(str(cache.directory))}: {_OF_EARLIER_RULE}")
        if cache is None and shared is not None:
            cache = shared.find(shared_key, cache_dir / key, open_bar=open_bar)
        if cache is None:
            encoder = SampleEncoder(
                encoding.tokenizer,
                num_embeddings=encoding.num_embeddings,
                sequence_len=sequence_len,
                train_on_inputs=encoding.train_on_inputs,
                truncates=encoding.excess_length_strategy == "truncate",
                notice=notice,
                stop_ids=encoding.stop_ids,
            )
            with encoder, TokenCacheWriter(cache_dir / key) as writer:
                ingestion = Ingestion(
                    encoding.tokenizer, encoder, writer, sequence_len, files.rejects_path, files.shown_by, notice,
                    key_of_sources, raises_for_length=encoding.excess_length_strategy == "raise",
                )  # fmt: skip
                cache = ingestion.run(sources, demand, open_bar)
            if shared is not None:
                shared.add(shared_key, cache)
            return cache
        if files.rejects_path is not None:
            copy_rejects(cache.directory, files.rejects_path)
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


def _described(
    sources: Sequence[RowSource], encoding: Encoding, sequence_len: int, demand: Demand | None
) -> dict[str, object]:
    """Everything that decides the content of the cache and of its rejects, but what a turn is."""
    most, strategy = num_ids(encoding.tokenizer), encoding.excess_length_strategy
    return {
        "format_version": FORMAT_VERSION,
        "sources": [
            {
                "settings": source.source.described(),
                "files": [[str(stamp.path), stamp.sha256] for stamp in source.files],
                **({} if source.part is None else {"part": source.part.written}),
            }
            for source in sources
        ],
        "tokenizer": tokenizer_hash(encoding.tokenizer),
        "sequence_len": sequence_len,
        "train_on_inputs": encoding.train_on_inputs,
        **({} if strategy == "truncate" else {"excess_length_strategy": strategy}),
        **({} if demand is None else {"demand": asdict(demand)}),
        **({"num_embeddings": encoding.num_embeddings} if (encoding.num_embeddings or most) < most else {}),
    }
