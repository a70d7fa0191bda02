"""A cluster whose ranks train a GPT, event by event: what each of them waits for, as docs/architecture.md has it.

Nothing here knows the planner. Sizes come from a GPT's closed form, rates from whoever asks. Each rank has a GPU, a
link with two directions, drives that do one thing at a time, an optimizer, and threads that gather and exchange; all of
them have one network. A swap begins when every rank has come to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

Process = Generator["Event", None, None]
NUM_STEPS = 4
GATHERED_AHEAD, EXCHANGED_BEHIND = 2, 2


class Event:
    """Happens once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.has_happened = False
        self._waiting: list[Process] = []

    def happen(self) -> None:
        self.has_happened = True
        for process in self._waiting:
            self._world.at(0.0, process)
        self._waiting.clear()

    def wake(self, process: Process) -> None:
        if self.has_happened:
            self._world.at(0.0, process)
        else:
            self._waiting.append(process)


class World:
    """A clock, and processes that wait for events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Process]] = []
        self._number = 0

    def at(self, seconds: float, process: Process) -> None:
        self._number += 1
        heappush(self._queue, (self.now + seconds, self._number, process))

    def begin(self, process: Process) -> Event:
        """An event that happens when the process has ended."""
        ended = Event(self)

        def run() -> Process:
            yield from process
            ended.happen()

        self.at(0.0, run())
        return ended

    def sleep(self, seconds: float) -> Event:
        over = Event(self)

        def run() -> Process:
            over.happen()
            yield from ()

        self.at(seconds, run())
        return over

    def run(self) -> None:
        while self._queue:
            self.now, _, process = heappop(self._queue)
            event = next(process, None)
            if event is not None:
                event.wake(process)


class Resource:
    """Serves one after another."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_busy = False
        self._waiting: deque[Event] = deque()

    def use(self, seconds: float) -> Process:
        yield from self.enter()
        yield self._world.sleep(seconds)
        self.leave()

    def enter(self) -> Process:
        if self._is_busy:
            turn = Event(self._world)
            self._waiting.append(turn)
            yield turn
        self._is_busy = True

    def leave(self) -> None:
        self._is_busy = False
        if self._waiting:
            self._is_busy = True
            self._waiting.popleft().happen()


class Meeting:
    """All ranks come to each of its swaps; then it takes the network."""

    def __init__(self, world: World, network: Resource, num_ranks: int) -> None:
        self._world, self._network, self._num_ranks = world, network, num_ranks
        self._come: dict[object, int] = {}
        self._over: dict[object, Event] = {}

    def swap(self, key: object, seconds: float) -> Process:
        over = self._over.setdefault(key, Event(self._world))
        self._come[key] = self._come.get(key, 0) + 1
        if self._come[key] == self._num_ranks:
            yield from self._network.use(seconds)
            over.happen()
        else:
            yield over


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Bytes and parameters per second, of one rank; of the network, of one machine in each direction."""

    num_ranks: int
    on_machine: int
    flops: float
    link: float
    read: float
    written: float
    updated: float
    network: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A GPT in bf16 that is not tied, and the step of one rank. Layers recompute all but their inputs."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    rows: int
    sequence_len: int
    num_micro_batches: int = 1

    @property
    def parameters(self) -> list[int]:
        h = self.hidden_size
        return [self.vocab_size * h, *[12 * h * h] * self.num_layers, self.vocab_size * h]

    def backward_flops(self, block: int) -> float:
        """Of a block in backward; the head runs forward, too, and a layer once more, but for its last product."""
        is_layer = 0 < block <= self.num_layers
        tokens = self.num_micro_batches * self.rows * self.sequence_len
        return 3 * self.flops(block) - is_layer * 8 * tokens * self.hidden_size**2

    def flops(self, block: int) -> float:
        """Of one forward, of all micro-batches."""
        tokens, h = self.num_micro_batches * self.rows * self.sequence_len, self.hidden_size
        if block == 0:
            return 0.0
        if block <= self.num_layers:
            return 24 * tokens * h * h + 4 * tokens * self.sequence_len * h
        return 2 * tokens * h * self.vocab_size

    @property
    def input_bytes(self) -> int:
        return 2 * self.num_micro_batches * self.rows * self.sequence_len * self.hidden_size


class Rank:
    """One rank's threads."""

    def __init__(
        self, world: World, cluster: Cluster, gpt: Gpt, meetings: dict[str, Meeting], *, holds: bool, pending: int
    ) -> None:
        """`holds`: blocks are updated in the next forward. `pending`: blocks whose updates may wait to be written."""
        self.world, self.cluster, self.gpt, self.meetings = world, cluster, gpt, meetings
        self.holds, self.pending = holds, pending
        self.gpu, self.up, self.down, self.drive, self.cpu, self.gathering, self.exchanging = (
            Resource(world) for _ in range(7)
        )
        self.blocks = len(gpt.parameters)
        last = self.blocks - 1
        self.order = [*range(last), last, *reversed(range(last))]
        self.updated: dict[int, Event] = {}
        """By block, of its newest gradient: the weights are new. Where updates are deferred, this needs a use."""
        self.written: dict[int, Event] = {}
        self.issued: dict[tuple[int, int], Event] = {}
        """By step and use: the weights are in host memory. So for those on the GPU, and for inputs."""
        self.uploads: dict[tuple[int, int], Event] = {}
        self.fetched: dict[tuple[int, int], Event] = {}
        self.ends: list[float] = []

    def own(self, block: int) -> float:
        return self.gpt.parameters[block] / self.cluster.num_ranks

    def swap_seconds(self, block: int, bytes_per_parameter: int) -> float:
        """Each machine sends what its ranks have to those of others."""
        here, everywhere = self.cluster.on_machine, self.cluster.num_ranks
        crossing = here * (everywhere - here) * self.own(block) * bytes_per_parameter
        return crossing / self.cluster.network

    def read(self, num_bytes: float) -> Process:
        return self.drive.use(num_bytes / self.cluster.read)

    def write(self, num_bytes: float) -> Process:
        return self.drive.use(num_bytes / self.cluster.written)

    def update(self, block: int, updated: Event, written: Event, *, reads_weights: bool = False) -> Process:
        """In pieces, of which one is read while another is updated or written."""
        pieces, ends = 8, []
        for _ in range(pieces):
            share = self.own(block) / pieces
            yield from self.read((10 + 2 * reads_weights) * share)
            ends.append(self.world.begin(self._rest_of_update(share)))
        yield from ends
        updated.happen()
        written.happen()

    def _rest_of_update(self, share: float) -> Process:
        yield from self.cpu.use(share / self.cluster.updated)
        yield from self.write(12 * share)

    def weights(self, key: tuple[int, int]) -> Process:
        """Bring a use's weights to host memory: from the drive, updated, and of all ranks."""
        block = self.order[key[1]]
        is_deferred = self.holds and key[1] < self.blocks and key[0] > 0
        if block in self.written and not is_deferred:
            yield self.written[block]
        yield from self.read(2 * self.own(block))
        if is_deferred:
            updated, written = Event(self.world), Event(self.world)
            self.written[block] = written
            self.world.begin(self.update(block, updated, written))
            yield updated
        yield from self.gathering.enter()
        yield from self.meetings["weights"].swap(key, self.swap_seconds(block, 2))
        self.gathering.leave()

    def go_up(self, key: tuple[int, int]) -> Process:
        yield self.issued[key]
        block = self.order[key[1]]
        if block:  # of the embedding only rows are used
            yield from self.up.use(2 * self.gpt.parameters[block] / self.cluster.link)

    def leave(self, block: int, key: tuple[int, int], done: Event) -> Process:
        """A gradient: down, exchanged."""
        yield from self.down.use(4 * (self.gpt.parameters[block] if block else 0) / self.cluster.link)
        yield from self.exchanging.enter()
        yield from self.meetings["gradients"].swap(key, self.swap_seconds(block, 4))
        self.exchanging.leave()
        done.happen()

    def run(self) -> Process:
        last = self.blocks - 1
        for step in range(NUM_STEPS):
            exchanged: deque[tuple[int, Event]] = deque()
            pending: deque[Event] = deque()
            for position, block in enumerate(self.order):
                key = (step, position)
                yield from self.open(key)
                flops = self.gpt.flops(block) if position < last else self.gpt.backward_flops(block)
                yield from self.gpu.use(flops / self.cluster.flops)
                if position >= last:
                    done = Event(self.world)
                    self.world.begin(self.leave(block, key, done))
                    exchanged.append((block, done))
                    yield from self.hand_over(exchanged, pending, at_most=EXCHANGED_BEHIND)
                elif block:
                    self.world.begin(self.down.use(self.gpt.input_bytes / self.cluster.link))
            yield from self.hand_over(exchanged, pending, at_most=0)
            yield from self.meetings["control"].swap(("norm", step), 0.0)
            self.ends.append(self.world.now)

    def open(self, key: tuple[int, int]) -> Process:
        """Wait for a use's weights and inputs; let those of the next uses come."""
        step, position = key
        self.issue(key)
        yield self.issued[key]
        if key not in self.uploads:
            self.uploads[key] = self.world.begin(self.go_up(key))
        for ahead in range(position + 1, min(len(self.order), position + 1 + GATHERED_AHEAD)):
            self.issue((step, ahead))
        if position + 1 < len(self.order):
            coming = (step, position + 1)
            self.uploads[coming] = self.world.begin(self.go_up(coming))
            if self.blocks - 1 <= position < len(self.order) - 2:
                self.fetched[coming] = self.world.begin(self.up.use(self.gpt.input_bytes / self.cluster.link))
        yield self.uploads[key]
        if key in self.fetched:
            yield self.fetched[key]

    def issue(self, key: tuple[int, int]) -> None:
        """Let a use's weights come, unless they are there for the use before."""
        if key not in self.issued:
            step, position = key
            before = (step, 2 * (self.blocks - 1) - position)
            stays = 0 < position - before[1] <= GATHERED_AHEAD
            self.issued[key] = self.issued[before] if stays else self.world.begin(self.weights(key))

    def hand_over(self, exchanged: deque[tuple[int, Event]], pending: deque[Event], *, at_most: int) -> Process:
        """Let what is exchanged be updated; wait if too much is under way."""
        while exchanged and (len(exchanged) > at_most or exchanged[0][1].has_happened):
            block, done = exchanged.popleft()
            yield done
            if self.holds:
                continue
            while len(pending) > self.pending:
                yield pending.popleft()
            updated, written = Event(self.world), Event(self.world)
            self.updated[block], self.written[block] = updated, written
            self.world.begin(self.update(block, updated, written))
            pending.append(written)


def step_seconds(cluster: Cluster, gpt: Gpt, *, holds: bool, pending: int) -> float:
    """Of a step in the middle of a run."""
    world = World()
    network = Resource(world)
    meetings = {name: Meeting(world, network, cluster.num_ranks) for name in ("weights", "gradients", "control")}
    ranks = [Rank(world, cluster, gpt, meetings, holds=holds, pending=pending) for _ in range(cluster.num_ranks)]
    ended: list[Any] = [world.begin(rank.run()) for rank in ranks]
    world.run()
    assert all(each.has_happened for each in ended), "the ranks wait for each other"
    ends = ranks[0].ends
    return (ends[-1] - ends[0]) / (len(ends) - 1)
