"""Training data: from the config's `datasets` to the micro-batches of any step.

This is the interface of the folder. The way of a row:

1. `rows` and `lines` read it;
2. `formats` checks it and makes a draft;
3. `encode`, with `chat`, tokenises the draft into samples;
4. `ingest` writes the samples into `token_cache`;
5. `packing` puts samples into sequences, and sequences into micro-batches;
6. `TrainingData` gives each step its micro-batches.

Invariant: `step(k)` is a pure function of the arguments and k, so a resumed run gets exactly the batches that an
uninterrupted run would get.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ratel_cli.data.encode import Tokenizer
from ratel_cli.data.ingest import load_token_cache
from ratel_cli.data.packing import Integers, MicroBatch, Sequences, assemble, one_per_sequence, pack, random_order
from ratel_cli.data.rows import DatasetSource, DatasetType, open_source
from ratel_cli.data.token_cache import TokenCache
from ratel_cli.errors import BadInput

__all__ = ["DatasetSource", "DatasetType", "MicroBatch", "Tokenizer", "TrainingData", "load_training_data"]

# The second part of each random order's key. The orders of epochs count up from the last.
_ORDER_OF_SPLIT, _ORDER_OF_TIES, _ORDER_OF_EPOCHS = 0, 1, 2


class TrainingData:
    """All samples of a run, split and packed. `load_training_data` makes it.

    It opens the token cache for each step, so there is nothing to close.
    """

    def __init__(
        self,
        cache: TokenCache,
        *,
        train_sequences: Sequences,
        eval_sequences: Sequences,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        packed_tokens: int | None,
        shuffle: bool,
        seed: int,
        padding_id: int,
        fingerprint: str,
    ) -> None:
        self._cache = cache
        self._train_sequences = train_sequences
        self._eval_sequences = eval_sequences
        self._micro_batch_size = micro_batch_size
        self._sequences_per_step = micro_batch_size * gradient_accumulation_steps
        self._packed_tokens = packed_tokens
        self._shuffle = shuffle
        self._seed = seed
        self._padding_id = padding_id
        self._epoch_order: tuple[int, Integers] | None = None  # of the last requested epoch
        self.fingerprint = fingerprint
        """A hash of all tokens and labels, and of every argument that decides their order."""
        self.rejected = cache.summary.num_rejected
        """Number of rejected rows."""
        self.num_samples = len(train_sequences.samples)
        self.num_eval_samples = len(eval_sequences.samples)
        self.num_tokens = int(cache.lengths[train_sequences.samples].sum())
        """Of one epoch, padding not counted."""
        self.steps_per_epoch = -(-len(train_sequences) // self._sequences_per_step)

    def step(self, step_index: int) -> list[MicroBatch]:
        """The micro-batches of one step. Steps are counted from 0 through all epochs. Raises EnvironmentFailure.

        The last step of an epoch takes what is left: it may have fewer micro-batches, and fewer sequences in the last.
        """
        assert step_index >= 0
        epoch, within = divmod(step_index, self.steps_per_epoch)
        first = within * self._sequences_per_step
        wanted = self._order_of(epoch)[first : first + self._sequences_per_step]
        return list(self._micro_batches(self._train_sequences, wanted))

    def eval_batches(self) -> Iterator[MicroBatch]:
        """The held-out samples, in the same batches every time. Raises EnvironmentFailure."""
        return self._micro_batches(self._eval_sequences, np.arange(len(self._eval_sequences)))

    def _order_of(self, epoch: int) -> Integers:
        if not self._shuffle:
            return np.arange(len(self._train_sequences))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = random_order(len(self._train_sequences), self._seed, _ORDER_OF_EPOCHS + epoch)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def _micro_batches(self, sequences: Sequences, wanted: Integers) -> Iterator[MicroBatch]:
        for first in range(0, len(wanted), self._micro_batch_size):
            chosen = [sequences[int(index)] for index in wanted[first : first + self._micro_batch_size]]
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
    """Read all samples, or find them in the cache, hold out the evaluation split, and pack the rest.

    `val_set_size` is a share of the samples if it is below 1, else their number. `rejects_path` gets the rejected rows,
    `notice` remarks for the user. Raises BadInput if the data cannot be used, EnvironmentFailure if it cannot be read
    or the cache cannot be written.
    """
    if sequence_len < 2:
        raise BadInput(f"sequence_len is {sequence_len}; a sample needs at least 2 tokens", "set a larger sequence_len")
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

    def arrange(sample_ids: Integers, *, mixed: bool) -> Sequences:
        if not packing:
            return one_per_sequence(sample_ids)
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
        train_sequences=arrange(train_ids, mixed=shuffle),
        eval_sequences=arrange(eval_ids, mixed=False),
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        packed_tokens=sequence_len if packing else None,
        shuffle=shuffle,
        seed=seed,
        padding_id=next(padding_id for padding_id in padding_ids if padding_id is not None),
        fingerprint=hashlib.sha256(json.dumps(arguments, sort_keys=True).encode()).hexdigest(),
    )


def _split(num_samples: int, val_set_size: float, seed: int) -> tuple[Integers, Integers]:
    """The numbers of the training samples and of the evaluation samples, each ascending. Raises BadInput."""
    num_eval = round(val_set_size * num_samples) if 0 < val_set_size < 1 else int(val_set_size)
    if 0 < val_set_size < 1:
        num_eval = max(num_eval, 1)
    if not 0 <= num_eval < num_samples:
        raise BadInput(
            f"val_set_size is {val_set_size:g} and leaves nothing to train on: there are only {num_samples} samples",
            "set a smaller val_set_size",
        )
    order = random_order(num_samples, seed, _ORDER_OF_SPLIT)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])
