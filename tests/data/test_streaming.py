"""Streams: only what a run needs is read, a longer run begins with the same steps, and several streams take turns."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ratel_cli.data.text.rows import DatasetSource
from tests.data.conftest import Load, read_rejects, same_batches

WINDOW = 300


def _write(path: Path, count: int, *, first: int = 5, ids: int = 200, bad_from: int | None = None) -> Path:
    rows = [{"input_ids": [first + n % ids] * (3 + n * 7 % 11)} for n in range(count)]
    lines = [json.dumps(row) for row in rows]
    if bad_from is not None:
        lines[bad_from:] = ["this would be rejected"] * (count - bad_from)
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_longer_run_begins_with_the_same_steps(load: Load, tmp_path: Path, packing: bool, shuffle: bool) -> None:
    path = _write(tmp_path / "rows.jsonl", 3000)
    settings = {"packing": packing, "shuffle": shuffle, "sequence_len": 16, "micro_batch_size": 4}
    short, again, long = (load(path, stream_steps=steps, window_samples=WINDOW, **settings) for steps in (20, 20, 90))
    assert len(short.cache.lengths) < len(long.cache.lengths) <= 3000
    for step in range(20):
        assert same_batches(short.step(step), again.step(step))
        assert same_batches(short.step(step), long.step(step))
    seen = Counter(sample for step in range(90) for batch in long.step(step) for sample in batch.sample_ids)
    assert set(seen.values()) == {1}, "no sample comes twice before the stream ends"
    assert short.fingerprint == long.fingerprint
    assert short.fingerprint != load(path, **settings).fingerprint
    order = [sample for batch in short.step(0) for sample in batch.sample_ids]
    assert packing or (order == list(range(4))) == (not shuffle)


def test_nothing_is_read_beyond_the_demand(load: Load, tmp_path: Path) -> None:
    """Rows that could not be used begin behind the second window."""
    path = _write(tmp_path / "rows.jsonl", 3000, bad_from=3 * WINDOW)
    data = load(path, stream_steps=WINDOW + 1, window_samples=WINDOW)
    assert 2 * WINDOW <= len(data.cache.lengths) <= 3 * WINDOW
    assert data.rejected == 0


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, WINDOW + 1])
def test_a_stream_that_ends_begins_again(load: Load, tmp_path: Path, count: int) -> None:
    data = load(_write(tmp_path / "rows.jsonl", count), stream_steps=2 * count, window_samples=WINDOW, shuffle=True)
    assert (data.num_samples, data.steps_per_epoch) == (count, count)
    assert same_batches(data.step(0), data.step(count))


def test_streams_take_turns_by_their_weights(load: Load, tmp_path: Path) -> None:
    three, one = (
        DatasetSource(
            path=str(_write(tmp_path / f"{number}.jsonl", 9000, first=5 + 20 * number, ids=20)), weight=weight
        )
        for number, weight in ((0, 3.0), (1, 1.0))
    )
    data = load(three, one, stream_steps=4000, window_samples=WINDOW)
    ids = [sample.input_ids[0] for sample in data.cache.read(np.arange(4000))]
    share = sum(first < 25 for first in ids) / len(ids)
    assert 0.7 < share < 0.8
    small = DatasetSource(path=str(_write(tmp_path / "small.jsonl", 10)), weight=50)
    mixed = load(one, small, stream_steps=1000, window_samples=WINDOW)
    assert mixed.cache.summary.num_rows > 1000, "the other goes on when one has ended"


def test_bad_rows_of_a_stream(load: Load, tmp_path: Path) -> None:
    path = _write(tmp_path / "rows.jsonl", 1000)
    path.write_text("not JSON\n" + path.read_text())
    load(path, stream_steps=10, window_samples=WINDOW)
    assert read_rejects(tmp_path)[0][1] == 1
