"""The last step that `storage.max_tb_written` allows, against a count of what is written step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.training.wear_limit import WearLimit


def counted_last_step(limit: WearLimit) -> int:
    """By writing: the whole store, the import, then step after step while the next one fits."""
    written, step = limit.store_bytes + limit.slot_bytes, limit.first_step
    while written + limit.slot_bytes <= limit.max_bytes:
        written += limit.slot_bytes
        step += 1
        assert limit.written_bytes(step) == written
    return step


@pytest.mark.parametrize("first_step", [0, 1, 40])
@pytest.mark.parametrize("max_bytes", [2400, 3599, 3600, 3601, 4799, 4800, 12_345])
def test_the_last_step(max_bytes: int, first_step: int) -> None:
    limit = WearLimit(max_bytes=max_bytes, store_bytes=2400, slot_bytes=1200, first_step=first_step)
    last = counted_last_step(limit)
    assert max(limit.last_step, first_step) == last
    assert limit.warning(last) is None or last == first_step
    warning = limit.warning(last + 1)
    assert warning is not None and "storage.max_tb_written" in warning


def test_the_words() -> None:
    limit = WearLimit(max_bytes=10**13, store_bytes=2 * 10**11, slot_bytes=10**11, first_step=0)
    assert limit.last_step == 97
    assert limit.warning(97) is None
    words = "storage.max_tb_written (10.0 TB) ends the run after step 97 of 1000: making the store writes 300 GB "
    assert limit.warning(1000) == words + "and each of the 1000 steps 100 GB, 100 TB in all"
    none = WearLimit(max_bytes=10**11, store_bytes=2 * 10**11, slot_bytes=10**11, first_step=5)
    assert none.warning(6) == (
        "storage.max_tb_written (100 GB) allows not even one step: "
        "making the store writes 300 GB and the step 100 GB, 400 GB in all"
    )
    shared = replace(limit, num_sharing=2).warning(1000)
    assert (
        shared
        == words.replace("10.0 TB", "10.0 TB for each of 2 ranks") + "and each of the 1000 steps 100 GB, 100 TB in all"
    )
    begun = limit.warning(1000, done=97)
    assert begun is not None and "allows no step after step 97 of 1000: making the store" in begun
