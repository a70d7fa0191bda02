"""The rows of `ratel eval`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.report.words.evaluation import EvaluationReport, evaluation_rows

FOUND = EvaluationReport(
    model="run, step 4",
    data="rows.jsonl",
    loss=1.0,
    accuracy=None,
    perplexity=2.72,
    num_samples=8,
    num_rejected=0,
    num_tokens=80,
    num_loss_tokens=40,
    num_sequences=2,
    sequence_len=64,
    is_packed=True,
    dtype="float32",
    seconds=2.0,
    bytes_read=1 << 20,
)


@pytest.mark.parametrize(
    ("perplexity", "words"),
    [(1.0, "1"), (46.0187, "46.02"), (999.94, "999.9"), (1000.0, "1,000"), (11213.4, "11,213"), (2e12, "2.000e+12")],
)
def test_perplexities_are_written_out(perplexity: float, words: str) -> None:
    assert dict(evaluation_rows(replace(FOUND, perplexity=perplexity)))["perplexity"] == words


def test_a_classifier_has_an_accuracy_in_place_of_a_perplexity() -> None:
    rows = dict(evaluation_rows(replace(FOUND, accuracy=0.9375)))
    assert rows["accuracy"] == "93.75 % of the rows"
    assert "perplexity" not in rows
