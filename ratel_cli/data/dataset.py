"""Training data: from `datasets:` to the micro-batches of any step.

The public face of the data modules, for `run.inputs` and `training/loop.py`. The way of a row:
`rows` and `lines` read it, `formats` checks it, `encode` (with `chat`) tokenises it, `ingest` lays it down in
`token_cache`, `packing` puts samples into rows, and `TrainingData` hands out steps. Invariant: `step(k)` is a pure
function of the arguments and k, so a resumed run asks for the next step and gets the very same batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ratel_cli.data.encode import Tokenizer
from ratel_cli.data.ingest import load_token_cache
from ratel_cli.data.packing import Integers, MicroBatch, Rows, assemble, one_per_row, pack, random_order
from ratel_cli.data.rows import DatasetSource, DatasetType, open_source
from ratel_cli.data.token_cache import TokenCache
from ratel_cli.errors import BadInput

__all__ = ["DatasetSource", "DatasetType", "MicroBatch", "Tokenizer", "TrainingData", "load_training_data"]

# Second part of the key of each random order; epochs count up from the last.
_ORDER_OF_SPLIT, _ORDER_OF_TIES, _ORDER_OF_EPOCHS = 0, 1, 2


class TrainingData:
    """All samples of a run, split and packed; built by `load_training_data`.

    Opens the token cache anew for each step, so there is nothing to close.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        train_rows: Rows,
        eval_rows: Rows,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        packed_tokens: int | None,
        shuffle: bool,
        seed: int,
        padding_id: int,
        fingerprint: str,
    ) -> None:
        self._cache = cache
        self._train_rows = train_rows
        self._eval_rows = eval_rows
        self._micro_batch_size = micro_batch_size
        self._rows_per_step = micro_batch_size * gradient_accumulation_steps
        self._packed_tokens = packed_tokens
        self._shuffle = shuffle
        self._seed = seed
        self._padding_id = padding_id
        self._epoch_order: tuple[int, Integers] | None = None  # of the epoch asked for last
        self.fingerprint = fingerprint
        """Changes with the tokens and labels themselves, and with every argument that orders them."""
        self.rejected = cache.summary.num_rejected
        self.num_samples = len(train_rows.samples)
        self.num_eval_samples = len(eval_rows.samples)
        self.num_tokens = int(cache.lengths[train_rows.samples].sum())
        self.steps_per_epoch = -(-len(train_rows) // self._rows_per_step)

    def step(self, step_index: int) -> list[MicroBatch]:
        """The micro-batches of one step, counted from 0 through all epochs.

        The last step of an epoch takes what is left: fewer micro-batches, or fewer rows in its last one.
        """
        assert step_index >= 0
        epoch, within = divmod(step_index, self.steps_per_epoch)
        first = within * self._rows_per_step
        rows = self._order_of(epoch)[first : first + self._rows_per_step]
        return list(self._micro_batches(self._train_rows, rows))

    def eval_batches(self) -> Iterator[MicroBatch]:
        """The held-out samples, the same batches every time."""
        return self._micro_batches(self._eval_rows, np.arange(len(self._eval_rows)))

    def _order_of(self, epoch: int) -> Integers:
        if not self._shuffle:
            return np.arange(len(self._train_rows))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = random_order(len(self._train_rows), self._seed, _ORDER_OF_EPOCHS + epoch)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def _micro_batches(self, rows: Rows, wanted: Integers) -> Iterator[MicroBatch]:
        for first in range(0, len(wanted), self._micro_batch_size):
            chosen = [rows[int(row)] for row in wanted[first : first + self._micro_batch_size]]
            samples = self._cache.read(np.concatenate(chosen))
            yield assemble(chosen, samples, packed_tokens=self._packed_tokens, padding_id=self._padding_id)


def load_training_data(
    sources: Sequence[DatasetSource],
    *,
    tokenizer: Tokenizer,
    sequence_len: int,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    packing: bool,
    shuffle: bool,
    seed: int,
    val_set_size: float,
    train_on_inputs: bool,
    cache_dir: Path,
    rejects_path: Path,
    notice: Callable[[str], None],
) -> TrainingData:
    """Reads (or finds in the cache) all samples, holds out the evaluation split, packs the rest.

    `val_set_size` below 1 is a share of the samples, else their number. Raises BadInput for data that cannot be
    used, EnvironmentFailure when the cache cannot be written.
    """
    if sequence_len < 2:
        raise BadInput(f"sequence_len is {sequence_len}: a sample needs 2 tokens to have a target")
    opened = [open_source(source, notice=notice) for source in sources]
    cache = load_token_cache(
        opened,
        tokenizer=tokenizer,
        sequence_len=sequence_len,
        train_on_inputs=train_on_inputs,
        cache_dir=cache_dir,
        rejects_path=rejects_path,
        notice=notice,
    )
    train_ids, eval_ids = _split(len(cache.lengths), val_set_size, seed)

    def arrange(sample_ids: Integers, *, mixed: bool) -> Rows:
        if not packing:
            return one_per_row(sample_ids)
        count = len(sample_ids)
        order = random_order(count, seed, _ORDER_OF_TIES) if mixed else np.arange(count)
        return pack(sample_ids, cache.lengths[sample_ids], capacity=sequence_len, order=order)

    arguments = {
        "tokens_sha256": cache.summary.tokens_sha256,
        "sequence_len": sequence_len,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "packing": packing,
        "shuffle": shuffle,
        "seed": seed,
        "val_set_size": val_set_size,
    }
    padding_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return TrainingData(
        cache,
        train_rows=arrange(train_ids, mixed=shuffle),
        eval_rows=arrange(eval_ids, mixed=False),
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        packed_tokens=sequence_len if packing else None,
        shuffle=shuffle,
        seed=seed,
        padding_id=next(padding_id for padding_id in padding_ids if padding_id is not None),
        fingerprint=hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest(),
    )


def _split(num_samples: int, val_set_size: float, seed: int) -> tuple[Integers, Integers]:
    """(training, evaluation) sample numbers, each ascending."""
    num_eval = round(val_set_size * num_samples) if 0 < val_set_size < 1 else int(val_set_size)
    if 0 < val_set_size < 1:
        num_eval = max(num_eval, 1)
    if not 0 <= num_eval < num_samples:
        raise BadInput(f"val_set_size {val_set_size:g} leaves nothing to train on: there are {num_samples} samples")
    order = random_order(num_samples, seed, _ORDER_OF_SPLIT)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])
