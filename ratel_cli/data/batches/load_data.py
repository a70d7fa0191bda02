"""From the config's `datasets` to training data.

This is where `ratel_cli/data` begins for text; latents have data/batches/latents.py. The way of a row:

1. data/text/rows.py and data/files/lines.py read it;
2. data/sources/formats.py checks it and makes a draft;
3. data/sources/encode.py, with data/text/chat_encoder.py, tokenises the draft into samples;
4. data/sources/ingest.py writes the samples into data/samples/token_cache.py, where `load_tokens` finds them again;
5. data/samples/packing.py puts samples into sequences, and sequences into micro-batches;
6. `TrainingData` gives each step its micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ratel_cli.data.batches.dataset import DataSettings, TrainingData
from ratel_cli.data.files.file_names import TEST_REJECTS_NAME
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.data.sources.encode import Encoding
from ratel_cli.data.sources.ingest import Demand
from ratel_cli.data.sources.load_tokens import TokenFiles, load_token_cache
from ratel_cli.data.text.masking import Masking
from ratel_cli.data.text.rows import DatasetSource, RowSource, open_source
from ratel_cli.errors import BadInput, ErrorList
from ratel_cli.progress import OpenBar, no_bar

WINDOW_SAMPLES = 1 << 14
"""Samples of a stream that are packed and mixed together."""


def load_training_data(
    sources: Sequence[DatasetSource],
    settings: DataSettings,
    encoding: Encoding,
    files: TokenFiles,
    *,
    notice: Callable[[str], None],
    test_sources: Sequence[DatasetSource] = (),
    stream_steps: int | None = None,
    window_samples: int = WINDOW_SAMPLES,
    open_bar: OpenBar = no_bar,
    row_multiple: int = 1,
) -> TrainingData:
    """Read all samples, or find them in the cache, hold out the evaluation split, and pack the rest.

    The rejected rows of `test_sources`, whose samples are for evaluation, go to a file next to that of the others.
    `notice` gets remarks for the user. `stream_steps`: the sources are streams; read only as many rows as this many
    steps need, and pack and mix `window_samples` at a time. `open_bar` shows how far reading is. `row_multiple`: as in
    `TrainingData`.
    Raises BadInput if the data cannot be used, EnvironmentFailure if it cannot be read or the cache cannot be written.
    """
    if settings.sequence_len < 2:
        raise BadInput(
            f"sequence_len is {settings.sequence_len}; a sample needs at least 2 tokens", "set a larger sequence_len"
        )

    demand = None
    if stream_steps is not None:
        assert not settings.val_set_size
        demand = Demand(
            num_sequences=stream_steps * settings.micro_batch_size * settings.gradient_accumulation_steps,
            capacity=settings.sequence_len if settings.packing else None,
            window_samples=window_samples,
        )

    def tokenised(
        wanted: Sequence[DatasetSource], files: TokenFiles, key: str, demand: Demand | None = None
    ) -> TokenCache:
        return load_token_cache(
            open_sources(wanted, key_of_sources=key, notice=notice, is_stream=demand is not None, open_bar=open_bar),
            encoding,
            # The content of a stream is not known before it is read.
            files if demand is None else replace(files, shared=None),
            sequence_len=settings.sequence_len,
            notice=notice,
            demand=demand,
            key_of_sources=key,
            open_bar=open_bar,
        )

    masking = _masking(settings, encoding) if settings.task == "masked_lm" else None
    padding_ids = (encoding.tokenizer.pad_token_id, encoding.tokenizer.eos_token_id, 0)
    rejects = files.rejects_path
    test_files = replace(files, rejects_path=None if rejects is None else rejects.with_name(TEST_REJECTS_NAME))
    errors = ErrorList()
    cache = errors.attempt(("datasets",), lambda: tokenised(sources, files, "datasets", demand))
    eval_cache = None
    if test_sources:
        key = "test_datasets"
        eval_cache = errors.attempt((key,), lambda: tokenised(test_sources, test_files, key))
    errors.raise_all()
    assert cache is not None
    return TrainingData(
        cache,
        settings,
        padding_id=next(padding_id for padding_id in padding_ids if padding_id is not None),
        masking=masking,
        weights=[source.weight for source in sources] if demand is None else (),
        window_samples=window_samples if demand is not None else None,
        eval_cache=eval_cache,
        row_multiple=row_multiple,
    )


def _masking(settings: DataSettings, encoding: Encoding) -> Masking:
    """How samples are masked. Raises BadInput."""
    tokenizer = encoding.tokenizer
    if tokenizer.mask_token_id is None:
        raise BadInput("the tokenizer has no mask token", "datasets of type: mlm need the tokenizer of an encoder")
    return Masking(
        probability=settings.mlm_probability,
        mask_id=tokenizer.mask_token_id,
        num_tokens=min(len(tokenizer), encoding.num_embeddings or len(tokenizer)),
        seed=settings.seed,
    )


def open_sources(
    sources: Sequence[DatasetSource],
    *,
    key_of_sources: str,
    notice: Callable[[str], None],
    is_stream: bool,
    open_bar: OpenBar,
) -> list[RowSource]:
    """Find the files of all sources, as `open_source` does. Raises its errors, those of all sources at once."""
    errors = ErrorList()
    opened = [
        errors.attempt(
            (key_of_sources, number, "path"),
            partial(open_source, source, notice=notice, is_stream=is_stream, open_bar=open_bar),
        )
        for number, source in enumerate(sources)
    ]
    errors.raise_all()
    return [each for each in opened if each is not None]
