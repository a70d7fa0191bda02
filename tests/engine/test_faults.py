"""Every system call of a run of three steps fails in every way: the bits are right or the run raises; no step is lost.

Threads make the calls in changing order, so that a call's number does not always mean the same call. Every number is
tried with every kind of fault: every seventh call in one case, so that the short tier has a seventh of them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Placement
from ratel_cli.sizes import BLOCK_ALIGNMENT, PAGE_BYTES
from tests.engine.faulty_run import MOST_SECONDS, Bench, Kind, Way
from tests.engine.swaps import EVERYTHING
from tests.fakes import Fault, FaultyBarrier, FaultyQueue, directory_in_memory
from tests.reference import Recipe
from tests.tiers import rotating, sample, thinned

AHEAD = Placement(prefetch_blocks=2, pending_updates=2)
ON_ARRIVAL = Way(options={"placement": replace(AHEAD, adamw_threads=2), "chunk_elements": BLOCK_ALIGNMENT})
"""Groups have many chunks, some for each thread."""
HELD_ON_DISK = Way(
    num_layers=SPILL_WINDOW_UNITS + 1,
    dtype="bfloat16",
    recipe=Recipe(max_grad_norm=1e-3),
    options={
        "held_in_memory_bytes": 0,
        "activation_bytes": 1 << 20,
        "placement": Placement(prefetch_blocks=2, pending_updates=2, swapped=EVERYTHING, spilled_units=99),
    },
)
IN_PLACE = Way(options={"placement": AHEAD, "in_place": True})
HANG_SECONDS = 0.1
EVERY = 23
"""A case takes every 23rd call,"""
EVERY_ON_DISK = 47
"""or every 47th, where a run makes more of them."""

KINDS = {
    "EIO": Kind(fault=Fault(error_number=errno.EIO)),
    "EIO for good": Kind(fault=Fault(error_number=errno.EIO), lasts=True),
    "ENOSPC": Kind(fault=Fault(error_number=errno.ENOSPC), raises=EnvironmentFailure),
    "EAGAIN for good": Kind(fault=Fault(error_number=errno.EAGAIN), lasts=True),
    "short for good": Kind(fault=Fault(short_bytes=PAGE_BYTES), lasts=True, raises=None),
    "nothing": Kind(fault=Fault(short_bytes=0)),
    "hangs": Kind(fault=Fault(hangs=True), timeout_seconds=HANG_SECONDS),
    "hangs for good": Kind(fault=Fault(hangs=True), lasts=True, timeout_seconds=HANG_SECONDS),
    "a bug": Kind(fault=Fault(failure=ValueError("a bug"))),
    "a flipped bit": Kind(fault=Fault(flipped_bit=54321), damages=True),
    "flipped bits": Kind(fault=Fault(flipped_bit=12345), lasts=True, damages=True),
    "misplaced": Kind(fault=Fault(misplaced_bytes=PAGE_BYTES), damages=True),
    "lost": Kind(fault=Fault(dropped=True), damages=True),
}
HARMLESS = (
    Fault(error_number=errno.EAGAIN),
    Fault(error_number=errno.EINTR),
    Fault(short_bytes=PAGE_BYTES),
    Fault(short_bytes=PAGE_BYTES + 1),
    Fault(delay_seconds=0.005),
)
RIGHT = Kind(fault=Fault(), raises=None)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with directory_in_memory(tmp_path) as found:
        yield found


def calls_of(bench: Bench, first: int, *, every: int = EVERY) -> range:
    """The numbers of the calls of a run in which a fault occurs, one call in each run."""
    assert bench.undisturbed.num_calls > 2 * every
    return range(first, bench.undisturbed.num_calls, every)


@pytest.mark.parametrize(("name", "first"), thinned(rotating(list(KINDS), range(EVERY)), every=2))
def test_updated_on_arrival(directory: Path, name: str, first: int) -> None:
    bench = Bench(directory, ON_ARRIVAL)
    for call in calls_of(bench, first):
        bench.check(KINDS[name], KINDS[name].queue(call))


@pytest.mark.full
@pytest.mark.parametrize(("name", "first"), rotating(["EIO", "a flipped bit", "lost"], range(EVERY_ON_DISK)))
def test_gradients_and_activations_on_disk(directory: Path, name: str, first: int) -> None:
    bench = Bench(directory, HELD_ON_DISK)
    for call in calls_of(bench, first, every=EVERY_ON_DISK):
        bench.check(KINDS[name], KINDS[name].queue(call))


@pytest.mark.parametrize("first", sample(range(EVERY), every=EVERY, offset=5))
def test_in_place_a_failed_write_may_lose_the_store(directory: Path, first: int) -> None:
    bench, kind = Bench(directory, IN_PLACE), Kind(fault=Fault(error_number=errno.EIO), damages=True)
    for call in calls_of(bench, first):
        bench.check(kind, kind.queue(call))


@pytest.mark.full
@pytest.mark.parametrize(("way", "first"), rotating(["on arrival", "on disk"], range(EVERY), offset=3))
def test_passing_faults_are_retried(directory: Path, way: str, first: int) -> None:
    """Each call has each passing fault; several occur in one run."""
    bench = Bench(directory, ON_ARRIVAL if way == "on arrival" else HELD_ON_DISK)
    num_calls = bench.undisturbed.num_calls
    for call in calls_of(bench, first):
        places = [(call + number * num_calls // len(HARMLESS)) % num_calls for number in range(len(HARMLESS))]
        bench.check(RIGHT, FaultyQueue(dict(zip(places, HARMLESS, strict=True))))


@pytest.mark.parametrize("way", [ON_ARRIVAL, IN_PLACE], ids=["two slots", "in place"])
def test_a_failed_sync_or_manifest_loses_only_the_step(directory: Path, way: Way) -> None:
    """In place it may lose the store: the bytes being written were not made durable."""
    bench = Bench(directory, way)
    assert bench.undisturbed.num_barriers >= 6
    for call in range(bench.undisturbed.num_barriers):
        kind = Kind(fault=Fault(), damages=way is IN_PLACE)
        bench.check(kind, FaultyQueue(), FaultyBarrier(call))


@pytest.mark.parametrize("seed", range(4))
def test_completions_in_any_order(directory: Path, seed: int) -> None:
    bench = Bench(directory, HELD_ON_DISK if seed % 2 else ON_ARRIVAL)
    bench.check(RIGHT, FaultyQueue(shuffle_seed=seed, depth=4))


@pytest.mark.parametrize("call", [0, 11, 25])
def test_a_hanging_drive_ends_the_run_soon_after_the_timeout(directory: Path, call: int) -> None:
    """Engine, store and queue are closed while the call still hangs."""
    bench = Bench(directory, ON_ARRIVAL)
    queue = KINDS["hangs"].queue(call)
    started = time.monotonic()
    with pytest.raises(IntegrityFailure, match=r"did not complete within 0\.1 seconds") as raised:
        bench.start(queue, FaultyBarrier())
    queue.close()
    assert HANG_SECONDS <= time.monotonic() - started < MOST_SECONDS
    assert raised.value.exit_code == 4
    queue.release()
