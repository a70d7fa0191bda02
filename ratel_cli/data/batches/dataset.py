"""Training data: the samples of a run as the micro-batches of any step.

Invariant: `step(k)` is a pure function of the samples, the settings and k, so a resumed run gets exactly the batches
that an uninterrupted run would get.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace

import numpy as np

from ratel_cli.data.pairs.compared_samples import ComparedSamples, in_groups
from ratel_cli.data.pairs.reference import LogProbabilities, Reference
from ratel_cli.data.samples.packing import (
    Integers,
    MicroBatch,
    Sequences,
    assemble,
    one_per_sequence,
    pack,
    random_order,
)
from ratel_cli.data.samples.samples import Sample
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.data.text.masking import Masking
from ratel_cli.data.text.rows import Compares
from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of
from ratel_cli.sizes import Filling, Task
from ratel_cli.units import counted

_STEPS_COUNTED = 16
"""Steps that are read to estimate the padding of both texts of an encoder-decoder."""
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
    task: Task = "causal_lm"
    """What the model learns to predict."""
    mlm_probability: float = 0.15
    """Probability that a token is masked, if the model learns to predict masked tokens."""
    compares: Compares | None = None
    """What the model learns from: pairs of answers, or answers with a verdict; None: from answers that it imitates."""
    trains_prompts: bool = False
    """Where pairs are compared: whether the prompts of chosen answers are targets, too."""

    @property
    def num_mixed(self) -> int:
        """Where answers have verdicts: among how many samples the answers are mixed that estimate the KL divergence:
        those of a micro-batch, or of a step if a micro-batch has one."""
        if self.micro_batch_size > 1:
            return self.micro_batch_size
        return max(2, self.gradient_accumulation_steps)

    def described(self) -> dict[str, object]:
        """What decides the batches, for a hash: what belongs to a task counts only in that task."""
        values, is_causal = asdict(self), self.task == "causal_lm"
        left_out = {*(["task"] if is_causal else []), *([] if self.task == "masked_lm" else ["mlm_probability"])}
        left_out |= {"compares", "trains_prompts"} if self.compares is None else set()
        return {key: value for key, value in values.items() if key not in left_out}


class TrainingData:
    """All samples of a run, split and packed. `load_training_data` makes it.

    It opens the token cache for each step, so there is nothing to close.
    """

    def __init__(
        self,
        cache: TokenCache,
        settings: DataSettings,
        *,
        padding_id: int,
        masking: Masking | None = None,
        weights: Sequence[float] = (),
        eval_cache: TokenCache | None = None,
        window_samples: int | None = None,
        row_multiple: int = 1,
    ) -> None:
        """`masking`: how samples are masked; None: they are not. `weights`: of each dataset; empty: all are 1.
        `eval_cache`: the samples for evaluation; None: held-out ones. `window_samples`: not None for a stream: the
        number of samples that are packed and mixed together, so that more samples change nothing about the first.
        `row_multiple`: rows that are not packed are padded to a multiple of it.

        Raises BadInput if `val_set_size` or the weights leave nothing to train on.
        """
        per_sample = 1 if settings.compares is None else 2
        train_ids, eval_ids = split_samples(len(cache.lengths) // per_sample, settings.val_set_size, settings.seed)
        self._weights = tuple(weights) if any(weight != 1 for weight in weights) else ()
        if self._weights:
            counts = [each.num_samples for each in cache.summary.sources]
            train_ids = _weighted(train_ids, counts, self._weights, settings.seed)
        if eval_cache is not None:
            assert not len(eval_ids)
            eval_ids = np.arange(len(eval_cache.lengths) // per_sample)
        self.cache = cache
        """The samples of all datasets, those for evaluation by `val_set_size` too."""
        self.eval_cache = cache if eval_cache is None else eval_cache
        """The samples for evaluation, among others if they are held out."""
        self._settings = settings
        self._padding_id = padding_id
        self._masking = masking
        self._row_multiple = row_multiple
        self._compared, self._eval_compared = (
            self._compared_of(each, np.unique(ids))
            for each, ids in ((self.cache, train_ids), (self.eval_cache, eval_ids))
        )
        self._window_samples = window_samples
        if window_samples is not None:
            self._train_sequences = self._arrange_windows(train_ids, window_samples)
        else:
            self._train_sequences = self._arrange(cache, train_ids, mixed=settings.shuffle)
        self._eval_sequences = self._arrange(self.eval_cache, eval_ids, mixed=False)
        self._sequences_per_step = settings.micro_batch_size * settings.gradient_accumulation_steps
        self._epoch_order: tuple[int, Integers] | None = None  # of the last requested epoch
        self.rejected = cache.summary.num_rejected
        """Number of rejected rows."""
        self.num_samples = len(train_ids)
        """Samples of one epoch; a sample of a dataset with a weight counts as often as it comes."""
        self.num_eval_samples = len(eval_ids)
        lengths = cache.lengths if self._compared is None else self._compared.num_tokens
        self.num_tokens = int(lengths[train_ids].sum())
        """Tokens of one epoch, without padding."""
        self.steps_per_epoch = -(-len(self._train_sequences) // self._sequences_per_step)

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return len(self._train_sequences)

    @property
    def packing_efficiency(self) -> float:
        """Tokens of samples as a share of all tokens that an epoch computes."""
        return self.num_tokens / self.num_computed_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the first epoch with their padding: packed sequences are padded to `sequence_len`, others to the
        longest of their micro-batch, in whole chunks. Of two texts each has its longest: what some steps have of both
        stands for all.
        """
        if self._settings.packing:
            return self.num_sequences * self._settings.sequence_len
        if self._settings.task == "seq2seq":
            number = min(_STEPS_COUNTED, self.steps_per_epoch)
            steps = [self.step(at * self.steps_per_epoch // number) for at in range(number)]
            return round(
                sum(batch.num_computed_tokens for step in steps for batch in step) / number * self.steps_per_epoch
            )
        widths, rows = (self.cache.lengths, 1) if self._compared is None else (self._compared.widths, 2)
        lengths = widths[self._train_sequences.samples[self._order_of(0)]]
        firsts = np.arange(0, len(lengths), self._settings.micro_batch_size)
        sizes = np.diff(np.append(firsts, len(lengths)))
        chunks = -(-np.maximum.reduceat(lengths, firsts) // self._row_multiple)
        return int((chunks * self._row_multiple * sizes * rows).sum())

    @property
    def filling(self) -> Filling | None:
        """How much of a full step those of the first epoch have; None: samples are packed."""
        if self.is_packed:
            return None
        settings, rows = self._settings, 1 if self._compared is None else 2
        num_micro_batches = -(-self.num_sequences // settings.micro_batch_size)
        full_tokens = self.steps_per_epoch * self._sequences_per_step * rows * settings.sequence_len
        return Filling(
            micro_batches=num_micro_batches / (self.steps_per_epoch * settings.gradient_accumulation_steps),
            computed=self.num_computed_tokens / full_tokens,
            tokens=self.num_tokens / full_tokens,
        )

    @property
    def is_packed(self) -> bool:
        """Whether samples may share a sequence."""
        return self._settings.packing

    @property
    def loss_share(self) -> float | None:
        """Tokens with loss as a share of all tokens, held-out samples included; where tokens are masked, the share that
        is expected. None if there are no tokens, or rows have loss."""
        num_tokens = int(self.cache.lengths.sum())
        if not num_tokens or self._settings.task == "classification":
            return None
        share = self.cache.summary.num_loss_tokens / num_tokens
        return share if self._masking is None else share * self._masking.probability

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and labels, and of every setting that decides their order."""
        sources = [each.num_samples for each in self.cache.summary.sources]
        mixture = {"weights": self._weights, "samples": sources} if self._weights else {}
        window = self._window_samples
        tokens = self.cache.summary.tokens_sha256 if window is None else self._stream_hash(window)
        return hash_of({"tokens_sha256": tokens, **self._settings.described(), **mixture})

    def _stream_hash(self, window: int) -> str:
        """A hash of a stream's first window. A longer run reads more of it."""
        first = self.cache.read(np.arange(min(window, len(self.cache.lengths))))
        digest = hashlib.sha256(f"stream {window}".encode())
        for sample in first:
            digest.update(len(sample.input_ids).to_bytes(4, "little"))
            digest.update(np.concatenate((sample.input_ids, sample.labels)).astype("<i4").tobytes())
        return digest.hexdigest()

    def split_by(self, micro_batch_size: int) -> TrainingData:
        """Return the data with each step in micro-batches of this many sequences, which must divide the sequences of a
        step."""
        number, rest = divmod(self._sequences_per_step, micro_batch_size)
        assert not rest
        split = copy(self)
        split._settings = replace(self._settings, micro_batch_size=micro_batch_size, gradient_accumulation_steps=number)
        return split

    def step(self, step_index: int) -> list[MicroBatch]:
        """The micro-batches of one step. Steps are counted from 0 through all epochs. Raises EnvironmentFailure.

        The last step of an epoch takes what is left: it may have fewer micro-batches, and fewer sequences in the last.
        """
        assert step_index >= 0
        epoch, wanted = self._of_step(step_index)
        return list(self._micro_batches(self.cache, self._compared, self._train_sequences, wanted, epoch))

    def _of_step(self, step_index: int) -> tuple[int, Integers]:
        """The epoch of a step, and the sequences that it has."""
        epoch, within = divmod(step_index, self.steps_per_epoch)
        first = within * self._sequences_per_step
        return epoch, self._order_of(epoch)[first : first + self._sequences_per_step]

    def compared_numbers(self, num_steps: int) -> tuple[list[Integers], list[Integers]]:
        """Where answers are compared: the samples of each micro-batch of the first steps, and of evaluations."""
        size = self._settings.micro_batch_size

        def cut(sequences: Sequences, wanted: Integers) -> list[Integers]:
            return [sequences.samples[wanted[first : first + size]] for first in range(0, len(wanted), size)]

        of_steps = (cut(self._train_sequences, self._of_step(step)[1]) for step in range(num_steps))
        evaluated = cut(self._eval_sequences, np.arange(len(self._eval_sequences)))
        return [each for of_step in of_steps for each in of_step], evaluated

    def eval_batches(self) -> Iterator[MicroBatch]:
        """The samples for evaluation, in the same batches every time. Raises EnvironmentFailure."""
        order = np.arange(len(self._eval_sequences))
        return self._micro_batches(self.eval_cache, self._eval_compared, self._eval_sequences, order, -1)

    @property
    def compared(self) -> tuple[ComparedSamples, ComparedSamples] | None:
        """The samples for training and for evaluation; None if no answers are compared."""
        if self._compared is None or self._eval_compared is None:
            return None
        return self._compared, self._eval_compared

    def _compared_of(self, cache: TokenCache, used: Integers) -> ComparedSamples | None:
        """The samples of a cache where answers are compared. `used`: those that are trained, or evaluated, together."""
        settings = self._settings
        if settings.compares is None:
            return None
        return ComparedSamples(
            cache=cache,
            compares=settings.compares,
            trains_prompts=settings.trains_prompts,
            used=used,
            others=in_groups(len(cache.lengths) // 2, used, settings.num_mixed),
            sequence_len=settings.sequence_len,
            padding_id=self._padding_id,
            multiple=self._row_multiple,
        )

    def referring_to(self, train: LogProbabilities, evaluation: LogProbabilities) -> TrainingData:
        """Return the data with the log-probabilities of the reference model, for the samples that training and
        evaluation use."""
        assert self._compared is not None and self._eval_compared is not None
        found = copy(self)
        found._compared = replace(self._compared, reference=Reference(train))
        found._eval_compared = replace(self._eval_compared, reference=Reference(evaluation))
        return found

    def _arrange(self, cache: TokenCache, sample_ids: Integers, *, mixed: bool) -> Sequences:
        """The samples in sequences; `mixed` packs samples of one length in a random order."""
        if not self._settings.packing:
            return one_per_sequence(sample_ids)
        count, lengths = len(sample_ids), cache.lengths[sample_ids]
        order = random_order(count, self._settings.seed, _ORDER_OF_TIES) if mixed else np.arange(count)
        return pack(sample_ids, lengths, capacity=self._settings.sequence_len, order=order)

    def _arrange_windows(self, sample_ids: Integers, window: int) -> Sequences:
        """The sequences of a stream in the order of their use: those of each window are packed and mixed together."""
        parts: list[Integers] = []
        for number, first in enumerate(range(0, len(sample_ids), window)):
            part = self._arrange(self.cache, sample_ids[first : first + window], mixed=self._settings.shuffle)
            mixed = random_order(len(part), self._settings.seed, _ORDER_OF_EPOCHS, number)
            parts.extend(part[int(index)] for index in (mixed if self._settings.shuffle else range(len(part))))
        starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
        return Sequences(samples=np.concatenate(parts), starts=starts)

    def _order_of(self, epoch: int) -> Integers:
        if self._window_samples is not None or not self._settings.shuffle:
            return np.arange(len(self._train_sequences))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = random_order(len(self._train_sequences), self._settings.seed, _ORDER_OF_EPOCHS + epoch)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]

    def _micro_batches(
        self,
        cache: TokenCache,
        compared: ComparedSamples | None,
        sequences: Sequences,
        wanted: Integers,
        epoch: int,
    ) -> Iterator[MicroBatch]:
        size = self._settings.micro_batch_size
        packed_tokens = self._settings.sequence_len if self._settings.packing else None
        for first in range(0, len(wanted), size):
            chosen = [sequences[int(index)] for index in wanted[first : first + size]]
            numbers = np.concatenate(chosen)
            if compared is not None:
                yield compared.batch(numbers)
                continue
            samples: Sequence[Sample] = cache.read(numbers)
            if self._masking is not None:
                masked = self._masking.masked
                samples = [masked(each, int(number), epoch) for each, number in zip(samples, numbers, strict=True)]
            yield assemble(
                chosen,
                samples,
                packed_tokens=packed_tokens,
                padding_id=self._padding_id,
                multiple=self._row_multiple,
                task=self._settings.task,
            )


def _weighted(sample_ids: Integers, counts: Sequence[int], weights: Sequence[float], seed: int) -> Integers:
    """The samples of an epoch `[samples]`, ascending, with repetitions: each dataset's as often as its weight says.

    `sample_ids`: `[samples]`, ascending. `counts`: the samples of each dataset. Of a weight like 2.3 the 0.3 is a
    random part of the dataset, the same in each epoch. Raises BadInput if nothing is left.
    """
    parts = []
    end = 0
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        ids = sample_ids[np.searchsorted(sample_ids, end) : np.searchsorted(sample_ids, end + count)]
        end += count
        whole, rest = divmod(weight, 1)
        chosen = random_order(len(ids), seed, _ORDER_OF_TIES, number)[: round(rest * len(ids))]
        parts.append(np.sort(np.concatenate((np.repeat(ids, int(whole)), ids[chosen]))))
    weighted = np.concatenate(parts)
    if not len(weighted):
        raise BadInput("the weights of the datasets leave nothing to train on", "set larger weights")
    return weighted


def split_samples(num_samples: int, val_set_size: float, seed: int) -> tuple[Integers, Integers]:
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
