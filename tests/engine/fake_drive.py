"""A drive and a computer that work by a clock of the test's, for the tensor cache: no real time passes.

The drive does one transfer after another, in the order in which they were submitted, each at its direction's rate. Its
bytes arrive at once; only the tickets know when that would have been.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratel_cli.io.scratch import GrowingScratch, Scratch, ScratchPlace
from ratel_cli.io.tickets import Ticket


@dataclass(slots=True)
class FakeClock:
    """Seconds that pass when the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class _TimedTicket(Ticket):
    """Is done when the clock says so. Who waits for it moves the clock on."""

    def __init__(self, clock: FakeClock, began: float, ended: float) -> None:
        super().__init__(num_parts=0)
        self._clock, self._timed_span = clock, (began, ended)

    @property
    def done(self) -> bool:
        return self._clock.now >= self._timed_span[1]

    @property
    def span(self) -> tuple[float, float]:
        return self._timed_span

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._timed_span[1])


class _TimedScratch(Scratch):
    def __init__(self, drive: FakeDrive, num_bytes: int) -> None:
        self._drive, self.num_bytes = drive, num_bytes
        self._content = bytearray(num_bytes)

    def write_sealed(self, offset: int, memory: memoryview) -> Ticket:
        self._content[offset : offset + len(memory)] = memory
        return self._drive.transfer(len(memory), self._drive.write_rate)

    def read_sealed(self, offset: int, memory: memoryview, what: str) -> Ticket:
        memory[:] = self._content[offset : offset + len(memory)]
        return self._drive.transfer(len(memory), self._drive.read_rate)


@dataclass
class FakeDrive(GrowingScratch):
    """Scratch space on one drive, with its rates in bytes per second."""

    clock: FakeClock
    write_rate: float
    read_rate: float
    idle_from: float = 0.0
    """When it has done all that was submitted."""
    given_back: list[ScratchPlace] = field(default_factory=list)

    def transfer(self, num_bytes: int, rate: float) -> Ticket:
        """What is submitted now begins when everything before it has ended."""
        began = max(self.clock.now, self.idle_from)
        self.idle_from = began + num_bytes / rate
        return _TimedTicket(self.clock, began, self.idle_from)

    def take(self, num_bytes: int) -> ScratchPlace:
        """A place of its own for each."""
        return ScratchPlace(_TimedScratch(self, num_bytes), 0, num_bytes)

    def give_back(self, place: ScratchPlace) -> None:
        """The bytes are not needed any more."""
        self.given_back.append(place)

    def close(self) -> None:
        """Nothing is open."""
