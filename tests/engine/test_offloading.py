"""What is fetched is what was put: from memory, from NVMe, and as slices of a storage; damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.cache.activations import ActivationOffloader
from ratel_cli.engine.cache.units import Unit
from ratel_cli.engine.device.device import DeviceBuffer, Download, HostDevice, Transfer, Upload, UploadLane
from ratel_cli.engine.measure.telemetry import SpanLabel, Timeline
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket
from ratel_cli.io.views import view
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, AfterGradient, Placement, UnitsOnGpu
from ratel_cli.sizes import PAGE_BYTES
from tests.fakes import Fault, FaultyQueue
from tests.planning.shapes import gpt

NUM_UNITS = 2 * SPILL_WINDOW_UNITS + 1
SCRATCH_BYTES = 2 * NUM_UNITS * PAGE_BYTES


def unit_of(number: int) -> Unit:
    """Two outputs share a storage, the second of them from its middle on; one is transposed."""
    values = torch.arange(600, dtype=torch.float32) + 1000 * number
    return Unit(
        leaf=values[:60].clone().view(1, 6, 10),
        offloaded={3: (values[:200].view(20, 10), values[200:600].view(40, 10)), 7: (values.clone().view(30, 20).T,)},
    )


@contextmanager
def offloader(directory: Path, queue: FaultyQueue, *, spilled_units: int) -> Iterator[ActivationOffloader]:
    timeline = Timeline()
    with BufferPool(None) as pool, queue, Scratch([directory], SCRATCH_BYTES, queue) as scratch:
        offloader = ActivationOffloader(
            pool,
            scratch,
            Placement(spilled_units=spilled_units),
            device=HostDevice(timeline),
            timeline=timeline,
        )
        try:
            yield offloader
        finally:
            offloader.reset()
            assert pool.leased_bytes == 0


def fetch_all(offloader: ActivationOffloader) -> None:
    """Backward's order: the last unit first."""
    for number in reversed(range(NUM_UNITS)):
        wanted = unit_of(number)
        with offloader.fetch(number + 1, 0) as found:
            assert found.leaf.is_leaf and not found.leaf.requires_grad
            assert found.offloaded.keys() == wanted.offloaded.keys()
            assert all(torch.equal(a, b) for a, b in zip(found.tensors, wanted.tensors, strict=True))


@pytest.mark.parametrize("spilled_units", [0, 1, SPILL_WINDOW_UNITS, SPILL_WINDOW_UNITS + 1, NUM_UNITS])
def test_what_is_fetched_is_what_was_put(tmp_path: Path, spilled_units: int) -> None:
    with offloader(tmp_path, FaultyQueue(), spilled_units=spilled_units) as activations:
        for number in range(NUM_UNITS):
            activations.put(number + 1, 0, unit_of(number))
        fetch_all(activations)


def test_damage_on_the_drive_is_noticed(tmp_path: Path) -> None:
    """One bit of any unit that is written or read. The last units are still in memory, so they are never read."""
    num_read = NUM_UNITS - SPILL_WINDOW_UNITS
    num_noticed = 0
    for call in range(NUM_UNITS + num_read):
        queue = FaultyQueue({call: Fault(flipped_bit=12_345)})
        with offloader(tmp_path / f"{call}", queue, spilled_units=NUM_UNITS) as activations:
            for number in range(NUM_UNITS):
                activations.put(number + 1, 0, unit_of(number))
            try:
                fetch_all(activations)
            except IntegrityFailure as failure:
                assert "activations of block" in failure.message
                num_noticed += 1
    assert num_noticed == 2 * num_read


@dataclass
class NotedUpload:
    """An upload that is done at once."""

    values: torch.Tensor
    done = True

    def open(self) -> torch.Tensor:
        return self.values

    def wait(self) -> None:
        return

    def give_up(self) -> Transfer:
        return self


class NotingDevice(HostDevice):
    """Copies as a GPU does, at once, and notes what it is asked for."""

    is_host = False

    def __init__(self, events: list[str]) -> None:
        super().__init__(Timeline())
        self._events = events
        self.reserved_bytes = 0
        self.limits: list[int] = []
        """What downloads may still take, whenever more was to be computed."""

    def reserve(self, num_bytes: int) -> DeviceBuffer:
        self.reserved_bytes += num_bytes
        return super().reserve(num_bytes)

    def free_downloads(self, beside_bytes: int = 0) -> None:
        self.limits.append(beside_bytes)

    def upload(
        self,
        memory: memoryview,
        buffer: DeviceBuffer,
        label: SpanLabel,
        *,
        lane: UploadLane = "weights",
        after: Download | None = None,
    ) -> Upload:
        assert lane == "activations", "no unit stands behind weights"
        event = f"up {label.block}"
        if self._events[-1:] != [event]:  # a unit's tensors go up one after another
            self._events.append(event)
        return NotedUpload(view(memory, torch.uint8).clone())


class HeldScratch:
    """Scratch space whose reads end when the test says so."""

    def __init__(self) -> None:
        self.holds = False
        self._contents: dict[int, bytes] = {}
        self._reads: list[tuple[int, memoryview, Ticket]] = []

    def write_sealed(self, offset: int, memory: memoryview) -> Ticket:
        self._contents[offset] = bytes(memory)
        return Ticket(num_parts=0)

    def read_sealed(self, offset: int, memory: memoryview, what: str) -> Ticket:
        ticket = Ticket(num_parts=1)
        self._reads.append((offset, memory, ticket))
        if not self.holds:
            self.end_reads()
        return ticket

    def end_reads(self, failure: IntegrityFailure | None = None) -> None:
        for offset, memory, ticket in self._reads:
            memory[:] = self._contents[offset]
            ticket.finish_part(failure)
        self._reads.clear()


@contextmanager
def noted(
    device: NotingDevice | None = None, units: UnitsOnGpu | None = None
) -> Iterator[tuple[ActivationOffloader, HeldScratch, list[str]]]:
    """An offloader that has put all units, and has spilled them."""
    events: list[str] = []
    scratch, device = HeldScratch(), device or NotingDevice(events)
    with BufferPool(None) as pool:
        activations = ActivationOffloader(
            pool,
            scratch,  # type: ignore[arg-type]
            Placement(spilled_units=NUM_UNITS, gpu_units=units),
            device=device,
            timeline=Timeline(),
        )
        for number in range(NUM_UNITS):
            activations.put(number, 0, unit_of(number))
        yield activations, scratch, events
        activations.reset()
        assert pool.leased_bytes == 0


def use(activations: ActivationOffloader, number: int, events: list[str]) -> None:
    with activations.fetch(number, 0) as found:
        events.append(f"use {number}")
        assert all(torch.equal(a, b) for a, b in zip(found.tensors, unit_of(number).tensors, strict=True))


def test_a_unit_that_was_read_goes_up_before_the_one_before_it_is_used() -> None:
    with noted() as (activations, _, events):
        for number in reversed(range(NUM_UNITS)):
            use(activations, number, events)
    last = NUM_UNITS - 1
    assert events == [
        *(f"up {last}", f"up {last - 1}", f"use {last}"),
        *(event for number in reversed(range(1, last)) for event in (f"up {number - 1}", f"use {number}")),
        "use 0",
    ]


def test_a_unit_goes_up_between_blocks_if_its_read_has_ended_there() -> None:
    with noted() as (activations, scratch, events):
        scratch.holds = True
        for number in reversed(range(NUM_UNITS)):
            use(activations, number, events)
            scratch.end_reads()
            activations.catch_up()
            if number:
                assert f"up {number - 1}" in events, "it waits for nothing but its read"
            activations.catch_up()
    assert len(events) == 2 * NUM_UNITS


def test_a_read_that_failed_is_raised_before_its_bytes_go_up() -> None:
    with noted() as (activations, scratch, events):
        scratch.holds = True
        first_read = NUM_UNITS - 1 - SPILL_WINDOW_UNITS
        for number in reversed(range(first_read + 1, NUM_UNITS)):
            use(activations, number, events)
        scratch.end_reads(IntegrityFailure("a flipped bit"))
        with pytest.raises(IntegrityFailure, match="a flipped bit"):
            activations.catch_up()
        assert f"up {first_read}" not in events


TENSOR_BYTES = 240, 2400, 2400, 2400
"""Of a unit: its input, and its outputs' storages, of which two are one."""
IN_PARTS = UnitsOnGpu(forward_bytes=6000, ahead_bytes=2700)


def test_where_two_units_do_not_fit_the_next_one_goes_up_in_parts() -> None:
    """The largest tensors first, never more than the plan says, and the rest when the unit is fetched."""
    device = NotingDevice([])
    with noted(device, IN_PARTS) as (activations, scratch, _):
        scratch.holds = True
        for number in reversed(range(NUM_UNITS)):
            scratch.end_reads()
            with activations.fetch(number, 0) as found:
                before = device.reserved_bytes
                assert all(torch.equal(a, b) for a, b in zip(found.tensors, unit_of(number).tensors, strict=True))
                assert before == sum(TENSOR_BYTES) * (NUM_UNITS - number) + (2400 + 240 if number else 0)
                activations.prepare_more(2800)
                assert device.reserved_bytes == before, "no tensor more fits"
                activations.prepare_more(5100)
                assert device.reserved_bytes == before + (2400 if number else 0)
        assert device.reserved_bytes == NUM_UNITS * sum(TENSOR_BYTES)


def test_forward_waits_for_memory_for_what_it_makes() -> None:
    """Downloads of the unit before may take what the outputs that were made leave of the plan's bytes."""
    for units, wanted in ((None, []), (IN_PARTS, [4000, 1000, 0, 5999])):
        device = NotingDevice([])
        with noted(device, units) as (activations, _, _):
            activations.reset()
            for num_bytes in (2000, 3000, 2000):
                activations.limit_downloads(num_bytes)
            activations.put(0, 0, unit_of(0))
            activations.limit_downloads(1)
            assert device.limits == wanted


AFTER_A_GRADIENT = UnitsOnGpu(
    forward_bytes=0,
    ahead_bytes=0,
    moments={1: (AfterGradient("qkv", 2400), AfterGradient("of no parameter", 1 << 40))},
)
LAYER = gpt(num_layers=1, hidden_size=8).layers[0]


def backward(activations: ActivationOffloader) -> None:
    """Of a layer whose parameters all get a gradient."""
    parameters = [torch.nn.Parameter(torch.zeros(each.shape)) for each in LAYER.parameters]
    with activations.preparing_more(LAYER, parameters), torch.autograd.set_multithreading_enabled(False):
        torch.stack([parameter.sum() for parameter in parameters]).sum().backward()
    assert all(parameter.grad is not None and not parameter._post_accumulate_grad_hooks for parameter in parameters)


def test_more_of_the_next_unit_goes_up_after_the_gradients_that_the_plan_names() -> None:
    """And after no others: a parameter that the layer does not have gets none."""
    device = NotingDevice([])
    with noted(device, AFTER_A_GRADIENT) as (activations, _, _), activations.fetch(NUM_UNITS - 1, 0):
        before = device.reserved_bytes
        backward(activations)
        assert device.reserved_bytes == before + 2400


def test_a_read_that_failed_is_raised_in_backward_and_the_next_step_works() -> None:
    with noted(NotingDevice([]), AFTER_A_GRADIENT) as (activations, scratch, events):
        scratch.holds = True
        first_read = NUM_UNITS - 1 - SPILL_WINDOW_UNITS
        for number in reversed(range(first_read + 2, NUM_UNITS)):
            use(activations, number, events)
        with activations.fetch(first_read + 1, 0):
            scratch.end_reads(IntegrityFailure("a flipped bit"))
            with pytest.raises(IntegrityFailure, match="a flipped bit"):
                backward(activations)
        activations.reset()
        scratch.holds = False
        for number in range(NUM_UNITS):
            activations.put(number, 0, unit_of(number))
        for number in reversed(range(NUM_UNITS)):
            use(activations, number, events)
