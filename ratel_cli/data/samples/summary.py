"""What training data consists of, as values. Invariant: nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.data.files.lines import Reject


@dataclass(frozen=True, slots=True, kw_only=True)
class SetStatistics:
    """One dataset."""

    name: str
    num_rows: int
    num_rejected: int
    num_truncated: int
    num_dropped: int
    """Samples that are too long."""
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    lengths: tuple[int, int, int, int]
    """Tokens of a sample: the least, the median, the 95th percentile, the most. Zeros if there are no samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One sample, to be looked at."""

    dataset: str
    number: int
    """Its number in the dataset, from 1."""
    parts: tuple[tuple[str, bool], ...]
    """Its text in parts, each with whether it has loss."""
    input_ids: tuple[int, ...]
    has_loss: tuple[bool, ...]
    """For each token whether it has loss; where tokens are masked, whether it may be masked."""
    label: str | None = None
    """Its class; None: it has none."""
    may_be_masked: bool = False
    """Whether loss is on tokens that are masked."""
    answer: str | None = None
    """What it is among answers that are compared, such as `chosen`; None: none are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What a run would train on."""

    sets: list[SetStatistics]
    test_sets: list[SetStatistics]
    num_samples: int
    """Samples of one epoch. `num_tokens` and `num_sequences` are those of one epoch, too."""
    num_tokens: int
    num_sequences: int
    num_held_out: int
    steps_per_epoch: int
    packing_efficiency: float
    """Tokens of samples as a share of all tokens that are computed, padding included."""
    is_packed: bool
    """Samples share sequences. Else each has its own, and a micro-batch is as wide as its longest."""
    samples: list[ShownSample]
    rejects: list[Reject]
    """The first rejected rows."""
