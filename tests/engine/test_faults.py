"""Every call to the kernel in a run of three steps fails in every way: right bits or the error told, and no step lost.

The order of calls is that of threads, so that a number stands for another call from time to time; each number and
each kind has its turn.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure, IntegrityFailure
from ratel_cli.planning.placement import Placement
from ratel_cli.sizes import BLOCK_ALIGNMENT, PAGE_BYTES
from tests.engine.faulty_run import Bench, Kind, Way
from tests.engine.swaps import EVERYTHING
from tests.fakes import Fault, FaultyBarrier, FaultyQueue, directory_in_memory
from tests.reference import Recipe

AHEAD = Placement(prefetch_blocks=2, pending_updates=2)
ON_ARRIVAL = Way(options={"placement": replace(AHEAD, adamw_threads=2), "chunk_elements": BLOCK_ALIGNMENT})
"""With many chunks in a group, some for each thread."""
HELD_ON_DISK = Way(
    num_layers=2,
    dtype="bfloat16",
    recipe=Recipe(max_grad_norm=1e-3),
    options={
        "held_in_memory_bytes": 0,
        "activation_bytes": 1 << 20,
        "placement": Placement(prefetch_blocks=2, pending_updates=2, swapped=EVERYTHING, spilled_units=1),
    },
)
IN_PLACE = Way(options={"placement": AHEAD, "in_place": True})
HANG_SECONDS = 0.1

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


def check_every_call(bench: Bench, kind: Kind) -> None:
    assert bench.undisturbed.num_calls > 30
    for call in range(bench.undisturbed.num_calls):
        bench.check(kind, kind.queue(call))


@pytest.mark.parametrize("name", KINDS)
def test_updated_on_arrival(directory: Path, name: str) -> None:
    check_every_call(Bench(directory, ON_ARRIVAL), KINDS[name])


@pytest.mark.parametrize("name", ["EIO", "a flipped bit", "lost"])
def test_gradients_and_activations_on_disk(directory: Path, name: str) -> None:
    check_every_call(Bench(directory, HELD_ON_DISK), KINDS[name])


def test_in_place_what_was_being_written_may_be_lost(directory: Path) -> None:
    check_every_call(Bench(directory, IN_PLACE), Kind(fault=Fault(error_number=errno.EIO), damages=True))


@pytest.mark.parametrize("way", [ON_ARRIVAL, HELD_ON_DISK], ids=["on arrival", "on disk"])
def test_what_passes_is_passed_over(directory: Path, way: Way) -> None:
    """Each call meets each of them, several in a run."""
    bench = Bench(directory, way)
    num_calls = bench.undisturbed.num_calls
    for call in range(num_calls):
        places = [(call + number * num_calls // len(HARMLESS)) % num_calls for number in range(len(HARMLESS))]
        bench.check(RIGHT, FaultyQueue(dict(zip(places, HARMLESS, strict=True))))


@pytest.mark.parametrize("way", [ON_ARRIVAL, IN_PLACE], ids=["two slots", "in place"])
def test_a_failed_sync_or_manifest_costs_the_step_alone(directory: Path, way: Way) -> None:
    """In place it may cost the store: what was being written was not made durable."""
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
def test_a_drive_that_hangs_ends_the_run_soon_after_the_timeout(directory: Path, call: int) -> None:
    """Engine, store and queue are closed while the call still hangs."""
    bench = Bench(directory, ON_ARRIVAL)
    queue = KINDS["hangs"].queue(call)
    started = time.monotonic()
    with pytest.raises(IntegrityFailure, match=r"did not complete within 0\.1 seconds") as raised:
        bench.start(queue, FaultyBarrier())
    queue.close()
    assert HANG_SECONDS <= time.monotonic() - started < 5
    assert raised.value.exit_code == 4
    queue.release()
