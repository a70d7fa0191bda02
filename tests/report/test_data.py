"""What `ratel data` says about an epoch."""

from __future__ import annotations

import pytest

from ratel_cli.data.samples.summary import DataReport
from ratel_cli.report.words.data import summary_rows


@pytest.mark.parametrize(
    ("is_packed", "expected"),
    [
        (True, ("packing", "9 sequences, 87.5 % full")),
        (False, ("padding", "9 sequences of one sample; 12.5 % of the tokens that are computed is padding")),
    ],
)
def test_only_packed_sequences_are_full(is_packed: bool, expected: tuple[str, str]) -> None:
    report = DataReport(
        sets=[],
        test_sets=[],
        num_samples=9,
        num_tokens=700,
        num_sequences=9,
        num_held_out=0,
        steps_per_epoch=3,
        packing_efficiency=0.875,
        is_packed=is_packed,
        samples=[],
        rejects=[],
    )
    assert summary_rows(report) == [("epoch", "9 samples, 700 tokens, 3 steps"), expected]
