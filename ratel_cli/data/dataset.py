"""Training data: from the config's `datasets` to the micro-batches of any step.

This is the interface of the folder. The way of a row:

1. `rows` and `lines` read it;
2. `formats` checks it and makes a draft;
3. `encode`, with `chat`, tokenises the draft into samples;
4. `ingest` writes the samples into `token_cache`;
5. `packing` puts samples into sequences, and sequences into micro-batches;
6. `TrainingData` gives each step its micro-batches.

Invariant: `step(k)` is a pure function of the samples, the settings and k, so a resumed run gets exactly the batches
that an uninterrupted run would get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ratel_cli.data.encode import Tokenizer
from ratel_cli.data.ingest import load_token_cache
from ratel_cli.data.packing import Integers, MicroBatch, Sequences, assemble, one_per_sequence, pack, random_order
from ratel_cli.data.rows import DatasetSource, open_source
from ratel_cli.data.token_cache import TokenCache
from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of
from ratel_cli.units import counted

# The second part of each random order's key. The orders of epochs count up from the last.
_ORDER_OF_SPLIT, _ORDER_OF_TIES, _ORDER_OF_EPOCHS = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """The settings that decide, together with the samples, which samples each step gets."""

    sequence_len: int
    """The most tokens of a sample, and with `packing` the tokens of each sequence."""
    micro_batch_size: int
    """Sequences of a micro-batch."""
    gradient_accumulation_steps: int
    """Micro-batches of a step."""
    packing: bool
    """Several samples may share a sequence."""
    shuffle: bool
    """Each epoch has its own random order."""
    seed: int
    val_set_size: float
    """Samples held out for evaluation: a share of them if it is below 1, else their number."""


class TrainingData:
    """All samples of a run, split and packed. `load_training_data` makes it.

    It opens the token cache for each step, so there is nothing to close.
    """

    def __init__(self, cache: TokenCache, settings: DataSettings, *, padding_id: int) -> None:
        """Raises BadInput if `val_set_size` leaves nothing to train on."""
        train_ids, eval_ids = _split(len(cache.lengths), settings.val_set_size, settings.seed)
        self._cache = cache
        self._settings = settings
        self._padding_id = padding_id
        self._train_sequences = self._arrange(train_ids, mixed=settings.shuffle)
        self._eval_sequences = self._arrange(eval_ids, mixed=False)
        self._sequences_per_step = settings.micro_batch_size * settings.gradient_accumulation_steps
        self._epoch_order: tuple[int, Integers] | None = None  # of the last requested epoch
        self.fingerprint = hash_of({"tokens_sha256": cache.summary.tokens_sha256, **asdict(settings)})
        """A hash of all tokens and labels, and of every setting that decides their order."""
        self.rejected = cache.summary.num_rejected
        """Number of rejected rows."""
        self.num_samples = len(train_ids)
        self.num_eval_samples = len(eval_ids)
        self.num_tokens = int(cache.lengths[train_ids].sum())
        """Tokens of one epoch, without padding."""
        self.steps_per_epoch = -(-len(self._train_sequences) // self._sequences_per_step)

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

    def _arrange(self, sample_ids: Integers, *, mixed: bool) -> Sequences:
        """The samples in sequences; `mixed` packs samples of one length in a random order."""
        if not self._settings.packing:
            return one_per_sequence(sample_ids)
        count, lengths = len(sample_ids), self._cache.lengths[sample_ids]
        order = random_order(count, self._settings.seed, _ORDER_OF_TIES) if mixed else np.arange(count)
        return pack(sample_ids, lengths, capacity=self._settings.sequence_len, order=order)

    def _order_of(self, epoch: int) -> Integers:
        if not self._settings.shuffle:
            return np.arange(len(self._train_sequences))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = random_order(len(self._train_sequences), self._settings.seed, _ORDER_OF_EPOCHS + epoch)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def _micro_batches(self, sequences: Sequences, wanted: Integers) -> Iterator[MicroBatch]:
        size = self._settings.micro_batch_size
        packed_tokens = self._settings.sequence_len if self._settings.packing else None
        for first in range(0, len(wanted), size):
            chosen = [sequences[int(index)] for index in wanted[first : first + size]]
            samples = self._cache.read(np.concatenate(chosen))
            yield assemble(chosen, samples, packed_tokens=packed_tokens, padding_id=self._padding_id)


def load_training_data(
    sources: Sequence[DatasetSource],
    settings: DataSettings,
    *,
    tokenizer: Tokenizer,
    train_on_inputs: bool,
    cache_dir: Path,
    rejects_path: Path,
    notice: Callable[[str], None],
) -> TrainingData:
    """Read all samples, or find them in the cache, hold out the evaluation split, and pack the rest.

    `rejects_path` gets the rejected rows, `notice` remarks for the user. Raises BadInput if the data cannot be used,
    EnvironmentFailure if it cannot be read or the cache cannot be written.
    """
    if settings.sequence_len < 2:
        raise BadInput(
            f"sequence_len is {settings.sequence_len}; a sample needs at least 2 tokens", "set a larger sequence_len"
        )
    cache = load_token_cache(
        [open_source(source, notice=notice) for source in sources],
        tokenizer=tokenizer,
        sequence_len=settings.sequence_len,
        train_on_inputs=train_on_inputs,
        cache_dir=cache_dir,
        rejects_path=rejects_path,
        notice=notice,
    )
    padding_ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return TrainingData(
        cache, settings, padding_id=next(padding_id for padding_id in padding_ids if padding_id is not None)
    )


def _split(num_samples: int, val_set_size: float, seed: int) -> tuple[Integers, Integers]:
    """The numbers of the training samples and of the evaluation samples, each ascending. Raises BadInput."""
    num_eval = round(val_set_size * num_samples) if 0 < val_set_size < 1 else int(val_set_size)
    if 0 < val_set_size < 1:
        num_eval = max(num_eval, 1)
    if not 0 <= num_eval < num_samples:
        raise BadInput(
            f"val_set_size is {val_set_size:g} and leaves nothing to train on: "
            f"the data has only {counted(num_samples, 'sample')}",
            "set a smaller val_set_size",
        )
    order = random_order(num_samples, seed, _ORDER_OF_SPLIT)
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])
