"""Which tokens of a sample are masked, for models that learn to predict masked tokens (BERT, section 3.1).

Of the tokens that may be masked, each one is with a given probability. Of those chosen 80 % become the mask token, 10 %
a random token, and 10 % stay; all of them have loss.

Invariant: what is chosen is a function of the seed, the epoch and the sample's number alone, so that a run that resumes
masks what the undisturbed one does. A sample with tokens that may be masked has at least one that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ratel_cli.data.samples.samples import Sample
from ratel_cli.sizes import IGNORED_TARGET

_MASKED, _REPLACED = 0.8, 0.9
"""Below the first a chosen token becomes the mask token, below the second a random one."""
_DRAWS = 1 << 20
"""The second part of each key, so that no order of the data is drawn from the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """How samples are masked."""

    probability: float
    """Probability that a token is chosen, above 0 and below 1."""
    mask_id: int
    num_tokens: int
    """Tokens of the vocabulary, of which a random one is drawn."""
    seed: int

    def masked(self, sample: Sample, number: int, epoch: int) -> Sample:
        """A sample whose labels are those of chosen tokens alone, and -100 elsewhere.

        The labels of `sample` are its tokens where they may be masked. `number`: the sample's. `epoch`: counted from 0;
        -1 for evaluation.
        """
        may = np.flatnonzero(sample.labels != IGNORED_TARGET)
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, _DRAWS, epoch + 1, number]))
        draws = bits.random_raw(3 * len(may)).astype(np.float64).reshape(3, len(may)) / 2.0**64
        is_chosen = draws[0] < self.probability
        if len(may) and not is_chosen.any():
            is_chosen[np.argmin(draws[0])] = True
        input_ids, labels = sample.input_ids.copy(), np.full_like(sample.labels, IGNORED_TARGET)
        chosen = may[is_chosen]
        labels[chosen] = sample.labels[chosen]
        becomes = draws[1][is_chosen]
        random_ids = np.minimum(draws[2][is_chosen] * self.num_tokens, self.num_tokens - 1).astype(np.int32)
        input_ids[chosen] = np.where(
            becomes < _MASKED, self.mask_id, np.where(becomes < _REPLACED, random_ids, input_ids[chosen])
        )
        return replace(sample, input_ids=input_ids, labels=labels)
