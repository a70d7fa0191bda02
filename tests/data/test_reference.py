"""The file of the reference model's log-probabilities: each set of samples is kept, damaged and replaced by itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ratel_cli.data.pairs.reference import ReferenceOfSet, read_reference, write_reference

TRAIN = ReferenceOfSet(key="train", values=np.array([[1, 2], [np.nan, np.nan], [5, 6]], dtype=np.float32))
EVALUATION = ReferenceOfSet(key="evaluation", values=np.array([[7, 8]], dtype=np.float32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_reference(tmp_path / "reference.bin", "abc", [TRAIN, EVALUATION])
    return tmp_path / "reference.bin"


def test_it_is_read_as_it_was_written(path: Path) -> None:
    found = read_reference(path)
    assert found is not None and found.weights == "abc"
    for each in (TRAIN, EVALUATION):
        values = found.values_of(each.key, len(each.values))
        assert values is not None and values.tobytes() == each.values.tobytes()
    assert found.values_of("train", 2) is None and found.values_of("test", 3) is None


@pytest.mark.parametrize(("at", "left"), [(-1, "train"), (-9, "evaluation")])
def test_damage_takes_one_set(path: Path, at: int, left: str) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    found = read_reference(path)
    assert found is not None and [each.key for each in found.sets] == [left]


def test_a_file_that_ends_early_keeps_what_is_whole(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    found = read_reference(path)
    assert found is not None and [each.key for each in found.sets] == ["train"]


def test_an_empty_set(tmp_path: Path) -> None:
    empty = ReferenceOfSet(key="none", values=np.empty((0, 2), dtype=np.float32))
    write_reference(tmp_path / "r", None, [empty])
    found = read_reference(tmp_path / "r")
    assert found is not None and found.weights is None and len(found.sets[0].values) == 0


@pytest.mark.parametrize(
    "facts",
    [
        None, [], {}, {"format_version": 2, "weights": None, "sets": []}, {"format_version": 1, "weights": None},
        {"format_version": 1, "weights": 1, "sets": []}, {"format_version": 1, "weights": None, "sets": [1]},
        {"format_version": 1, "weights": None, "sets": [{"key": "k", "samples": "1", "sha256": ""}]},
    ],
)  # fmt: skip
def test_what_is_no_such_file(tmp_path: Path, facts: object) -> None:
    path = tmp_path / "r"
    assert read_reference(path) is None
    path.write_bytes(json.dumps(facts).encode())
    assert read_reference(path) is None
