"""Samples that are longer than `sequence_len`: truncated, dropped, or an error, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.config.load import load_config
from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.sources.statistics import statistics_of
from ratel_cli.data.text.rows import DatasetSource
from ratel_cli.errors import BadInput
from tests.config.config_loading import imported
from tests.data.conftest import Load
from tests.data.test_forms import rows, samples_of

LENGTHS = (7, 8, 9, 20)
"""Tokens of the rows; 8 is `sequence_len`."""
LONGER = "longer than sequence_len (8 tokens)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rows of tokens."""
    path = tmp_path / "rows.jsonl"
    path.write_text(rows(*({"input_ids": [5, *range(6, 5 + length)], "labels": [7] * length} for length in LENGTHS)))
    return path


def lengths(data: TrainingData) -> list[int]:
    return [len(ids) for ids, _ in samples_of(data)]


@pytest.mark.parametrize(
    ("strategy", "done", "expected", "counts"),
    [("truncate", "truncated", [7, 8, 8, 8], (4, 2, 0, 0)), ("drop", "dropped", [7, 8], (4, 0, 2, 0))],
)
def test_long_samples_are_truncated_or_dropped(
    load: Load, path: Path, notices: list[str], strategy: str, done: str, expected: list[int], counts: tuple[int, ...]
) -> None:
    for _ in range(2):  # the second time from the cache
        notices.clear()
        data = load(path, sequence_len=8, excess_length_strategy=strategy)
        assert lengths(data) == expected
        assert notices[1:] == [f"{done} 2 of 4 samples: {LONGER}"]
        (found,) = statistics_of(data.cache, ["rows"])
        assert (found.num_rows, found.num_truncated, found.num_dropped, found.num_rejected) == counts
        assert found.num_samples == len(expected)


def test_a_long_sample_may_be_an_error(load: Load, path: Path) -> None:
    with pytest.raises(BadInput, match=r"rows\.jsonl:3: the sample has 9 tokens, and sequence_len is 8") as caught:
        load(path, sequence_len=8, excess_length_strategy="raise")
    assert caught.value.hint == "set a larger sequence_len, or excess_length_strategy: drop or truncate"
    assert lengths(load(path, sequence_len=20, excess_length_strategy="raise")) == [7, 8, 9, 20]


def test_nothing_is_left(load: Load, path: Path) -> None:
    with pytest.raises(BadInput, match=r"no samples are left: all 4 are longer than sequence_len \(6\)") as caught:
        load(path, sequence_len=6, excess_length_strategy="drop")
    assert caught.value.hint == "set a larger sequence_len, or excess_length_strategy: truncate"


def test_dropped_samples_do_not_count_as_used(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(rows(*({"input_ids": [5] * length} for length in (9, 4, 9, 5, 6))))
    data = load(DatasetSource(path=str(path), max_samples=2), sequence_len=8, excess_length_strategy="drop")
    assert lengths(data) == [4, 5]


@pytest.mark.parametrize("strategy", ["truncate", "drop", "raise"])
def test_plain_text_is_split_whatever_becomes_of_other_samples(load: Load, tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(rows({"text": "the quick brown fox jumps over the lazy dog and goes on and on"}))
    split = lengths(load(path, sequence_len=8, excess_length_strategy=strategy))
    assert len(split) > 1 and max(split) <= 8


AXOLOTL = "base_model: m\nstrict: false\ndatasets: [{path: a, type: alpaca}]\n"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        (AXOLOTL, "drop"),
        (f"{AXOLOTL}excess_length_strategy:\n", "drop"),
        (f"{AXOLOTL}excess_length_strategy: truncate\n", "truncate"),
        ("model_name_or_path: m\ndataset_name: a\n", "truncate"),
        ("base_model: m\ndataset: a\nstage: sft\n", "truncate"),
    ],
)
def test_imports_have_the_default_of_their_tool(tmp_path: Path, text: str, strategy: str) -> None:
    assert imported(tmp_path, text)[1].excess_length_strategy == strategy


def test_a_config_of_axolotl_that_does_not_say_it_has_a_notice(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for line, number in (("", 1), ("excess_length_strategy: drop\n", 0)):
        path.write_text(AXOLOTL + line)
        found = [each for each in load_config(path).notices if "longer than `sequence_len`, axolotl drops them" in each]
        assert len(found) == number
