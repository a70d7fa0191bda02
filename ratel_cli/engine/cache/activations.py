"""Offloads what backward needs of forward: every layer's input (A16), and the operator outputs that the plan swaps.

Forward puts one unit for each layer and micro-batch, and backward fetches each once, in the opposite order. The
placement says how many units, the first of the step, are spilled to NVMe, and from which one on they stay in GPU
memory; the others stay in host memory. The last layer's units, which backward needs at once, are never spilled. A
unit that stays in the memory where it was computed is not moved. Every other unit is (engine/cache/offloader.py), in
the order of the step:

    1. put        the unit leaves
    2. write      a spilled unit begins once its download has ended, at the latest when the next unit is put
    3. window     the last few spilled units stay in their buffers; for each new one the oldest buffer is released,
                  after its write has ended
    4. read       in backward the reads of the next units run ahead by the same window; units still in it are not read
    5. prepare    before a unit is used: reserve device buffers of the next one, and start their upload if it is in host
                  memory: still, or again because its read has ended
    6. catch up   between two blocks: start that upload if the read has ended since
    7. fetch      wait for the read; upload what has not begun; give out the uploaded tensors; release the buffer

Where two whole units do not fit on the device, the plan says what they may take (`UnitsOnGpu`). Then forward waits for
downloads before it makes more outputs. And the next unit is prepared in parts: some tensors at once, others when
backward has made a certain gradient, the rest when it is fetched.

(SSDTrain section III-C forwards what is still being stored, too; here it never depends on timing.)

Invariants: what is fetched are the bytes that were put, or IntegrityFailure is raised; which bytes move depends on the
order of units alone; spilled units never lease more buffers than the window holds, whatever the number of layers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from ratel_cli.engine.cache.offloader import Offloader
from ratel_cli.engine.cache.units import WINDOW_PURPOSE, PackedUnit, Unit
from ratel_cli.engine.device.device import Device
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.io.scratch import Scratch, ScratchPlace
from ratel_cli.model.values.spec import name_in_layer
from ratel_cli.planning.profile.placement import SPILL_WINDOW_UNITS, Placement
from ratel_cli.schedule.segments import Segment


class ActivationOffloader:
    """Holds the units of one step at a time. All methods are for the compute thread."""

    def __init__(
        self,
        pool: BufferPool,
        scratch: Scratch | None,
        placement: Placement,
        *,
        device: Device,
        timeline: Timeline,
        micro_batch_elements: int | None = None,
    ) -> None:
        """`micro_batch_elements`: the most elements of a layer's input, which the plan counts; None if it is not
        known."""
        assert scratch is not None or not placement.spilled_units
        self._pool = pool
        self._scratch = scratch
        self._spilled_units = placement.spilled_units
        self._stays_from = placement.spilled_units if device.is_host else placement.gpu_units_from
        """Units from this one on stay where they were computed; None: no unit does."""
        self._units = None if device.is_host else placement.gpu_units
        self._made_bytes = 0
        """Outputs of the unit that forward makes."""
        self._device = device
        self._offloader = Offloader(device, timeline)
        self._micro_batch_elements = micro_batch_elements
        self._order: list[tuple[int, int]] = []
        """Keys (block, micro-batch) of the units that were put and not fetched yet. Backward fetches the last first."""
        self._staying: dict[tuple[int, int], Unit] = {}
        self._packed: dict[tuple[int, int], PackedUnit] = {}
        self._window: deque[PackedUnit] = deque()
        """Spilled units that are in a buffer, in the order in which they got it."""
        self._to_read: list[PackedUnit] = []
        """Spilled units that are in no buffer. Backward reads the last first."""
        self._num_skipped = 0
        """Units of layers that backward does not reach: the plan counts them, and they take nothing."""
        self._end = 0
        """Bytes of the scratch file in use."""
        self.put_bytes = 0
        """Packed size of all units that were put in this step."""

    def begin_unit(self) -> None:
        """Forward begins to make a unit, perhaps anew."""
        self._made_bytes = 0

    def limit_downloads(self, num_bytes: int) -> None:
        """Forward has made an output of the next unit, of `num_bytes`. Where the plan says so, what is computed from
        now on waits for downloads of the unit before, until both take no more than they may."""
        self._made_bytes += num_bytes
        if self._units is not None:
            self._device.free_downloads(max(0, self._units.forward_bytes - self._made_bytes))

    def skip(self, number: int) -> None:
        """Pass over `number` units, before any is put: backward does not reach their layer, which puts none."""
        assert not self._order
        self._num_skipped += number

    def put(self, block: int, micro_batch: int, unit: Unit) -> None:
        """Offload a unit until it is fetched. Its tensors must not be changed afterwards."""
        key = block, micro_batch
        number = self._num_skipped + len(self._order)
        self._order.append(key)
        self.put_bytes += unit.num_bytes
        self._made_bytes = 0
        self._start_writing()
        if self._stays_from is not None and number >= self._stays_from:
            self._staying[key] = Unit(leaf=unit.leaf.detach(), offloaded=unit.offloaded)
            return
        packed = self._packed[key] = PackedUnit(block, unit)
        if number < self._spilled_units:
            assert self._scratch is not None
            packed.place = ScratchPlace(self._scratch, self._end, packed.buffer_bytes)
            self._end += packed.buffer_bytes
            self._shrink_window()
        self._offloader.leave(packed, unit.tensors, self._lease(packed))
        assert packed.download is not None
        if packed.download.done:
            self._start_writing()

    @contextlib.contextmanager
    def fetch(self, block: int, micro_batch: int) -> Iterator[Unit]:
        """Give out the unit on the compute device, inside the `with` statement only.

        Its `leaf` is a new one. Raises RatelError if the read failed, IntegrityFailure if
        the bytes are not those that were put.
        """
        key = block, micro_batch
        assert self._order.pop() == key, "units are fetched in the opposite order of `put`"
        self._start_writing()
        unit = self._staying.pop(key, None)
        if unit is not None:
            self._read_ahead()
            self._prepare()
            yield unit
            return
        packed = self._packed[key]
        if packed.lease is None:
            self._shrink_window()
            self._read(self._to_read.pop())
        self._read_ahead()
        self._offloader.reserve(packed)
        self._offloader.upload(packed)  # before the next unit's, which runs on the same stream
        self._prepare()
        yield packed.unit_in(self._offloader.open(packed))
        self._release(packed)
        del self._packed[key]

    @contextlib.contextmanager
    def preparing_more(self, layer: Segment, parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
        """While the backward of a layer runs inside: prepare more of the next unit at the moments that the plan names.

        `parameters`: the trained ones of the layer, in the order of its blocks.
        """
        moments = () if self._units is None else self._units.moments.get(layer.index, ())
        most_bytes = {moment.parameter: moment.num_bytes for moment in moments}

        def prepare_more(name: str, _: torch.Tensor) -> None:
            self.prepare_more(most_bytes[name])

        names = [name_in_layer(each.name) for block in layer.trained for each in block.parameters]
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(prepare_more, name))
            for name, parameter in zip(names, parameters, strict=True)
            if name in most_bytes
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def prepare_more(self, most_bytes: int | None) -> None:
        """Reserve device buffers for more tensors of the unit that is fetched next, which may take `most_bytes` in all,
        or as many as they are, and start their upload if the unit is in host memory. Raises as `catch_up`."""
        coming = self._coming
        if coming is not None:
            self._offloader.reserve(coming, most_bytes)
            self.catch_up()

    def catch_up(self) -> None:
        """Start the upload of the unit that is fetched next, if it is in host memory now and has device buffers.

        Raises RatelError if its read failed, IntegrityFailure if the bytes are not those that were put.
        """
        coming = self._coming
        if coming is not None and coming.buffers and coming.is_in_memory:
            self._offloader.upload(coming)

    def reset(self) -> None:
        """Forget all units: the step is over, however it ended."""
        for packed in self._packed.values():
            self._offloader.drop(packed)
        self._made_bytes = 0
        self._order.clear()
        self._staying.clear()
        self._packed.clear()
        self._window.clear()
        self._to_read.clear()
        self._end = self.put_bytes = self._num_skipped = 0

    def _start_writing(self) -> None:
        """Phase 2, for the unit that was put last, if it is spilled."""
        for packed in self._window:
            if packed.download is not None:
                self._offloader.write(packed)

    def _prepare(self) -> None:
        """Phase 5, on a GPU."""
        if not self._device.is_host:
            self.prepare_more(None if self._units is None else self._units.ahead_bytes)

    @property
    def _coming(self) -> PackedUnit | None:
        """The unit that is fetched next; None if there is none, or if it stays where it was computed."""
        return self._packed.get(self._order[-1]) if self._order else None

    def _read_ahead(self) -> None:
        while self._to_read and len(self._window) < SPILL_WINDOW_UNITS:
            self._read(self._to_read.pop())

    def _read(self, packed: PackedUnit) -> None:
        self._offloader.read(packed, self._lease(packed))

    def _lease(self, packed: PackedUnit) -> Lease:
        # Buffers of the window serve any block. The others are leased all at once, each size once for each layer.
        purpose = packed.what if packed.place is None else WINDOW_PURPOSE
        num_bytes = at_most_bytes = packed.buffer_bytes
        if self._micro_batch_elements is not None:
            at_most_bytes = -(-num_bytes * self._micro_batch_elements // packed.num_elements)
        lease = self._pool.lease(num_bytes, purpose, at_most_bytes=at_most_bytes)
        if packed.place is not None:
            self._window.append(packed)
        return lease

    def _shrink_window(self) -> None:
        """Release the oldest buffer of a full window."""
        if len(self._window) == SPILL_WINDOW_UNITS:
            oldest = self._window[0]
            self._release(oldest)
            self._to_read.append(oldest)

    def _release(self, packed: PackedUnit) -> None:
        if packed.place is not None:
            self._window.remove(packed)
        self._offloader.release(packed)
