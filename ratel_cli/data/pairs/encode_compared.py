"""Joins the samples of answers that are compared.

Invariant: a row has two samples, or none, or a reason why it cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.samples.samples import Encoded, Sample
from ratel_cli.data.text.drafts import Unusable
from ratel_cli.sizes import IGNORED_TARGET


def compared(
    answers: Sequence[Encoded | Unusable], *, is_good: bool | None, is_cut: bool = False, remarks: tuple[Remark, ...]
) -> Encoded | Unusable:
    """The samples of a row whose answers were encoded, each behind its prompt. `is_good`: the verdict on one alone.
    `is_cut`: they are whole texts, whose answers begin where the first of them does."""
    found = []
    for name, answer in zip(("chosen", "rejected") if is_good is None else ("",), answers, strict=True):
        if isinstance(answer, Unusable):
            return Unusable(f"the {name} answer: {answer}") if name else answer
        found.append(answer)
    samples = tuple(sample for each in found for sample in each.samples)
    excess_tokens = max(each.excess_tokens for each in found)
    is_dropped = any(not each.samples for each in found)
    if not is_dropped and is_cut:
        first = min(_first_target(each) for each in samples)
        samples = tuple(_from(each, first) for each in samples)
    if not is_dropped and is_good is not None:
        [sample] = samples
        first = _first_target(sample)
        if not first:
            return Unusable("the answer has no prompt")
        verdict = np.full(first, IGNORED_TARGET, dtype=np.int32)
        verdict[0] = is_good
        samples = (sample, Sample(input_ids=sample.input_ids[:first], labels=verdict))
    return Encoded(
        samples=() if is_dropped else samples,
        excess_tokens=excess_tokens,
        remarks=tuple(dict.fromkeys((*remarks, *(remark for each in found for remark in each.remarks)))),
        skips_header=any(each.skips_header for each in found),
    )


def _first_target(sample: Sample) -> int:
    return int(np.flatnonzero(sample.labels != IGNORED_TARGET)[0])


def _from(sample: Sample, first: int) -> Sample:
    """The sample with all tokens from this one on as targets."""
    labels = sample.input_ids.copy()
    labels[:first] = IGNORED_TARGET
    return Sample(input_ids=sample.input_ids, labels=labels)
