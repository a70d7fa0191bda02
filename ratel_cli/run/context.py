"""What a command has open while it works on a run, as one value: config, log, signals, I/O queue and host memory.

`open_context` is the only place that opens these. Functions of `run` take the context; what lies below `run` takes
plain values and callables.

Invariant: whatever `resources` holds is closed before the queue and the memory that it uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.launched import num_local_ranks
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.hardware.host import default_limit_bytes, kept_bytes
from ratel_cli.hardware.shares import ONE_RANK, RankLayout
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.io.queue import IoQueue, depth_for, open_queue
from ratel_cli.progress import Advance, OpenBar
from ratel_cli.store.fill import StateSource, fill
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.stopping import StopRequest

CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What a run has open. Made by `open_context`, which closes it."""

    config: RunConfig
    log: RunLog
    stop: StopRequest
    """Receives no signal before `listen` is called."""
    device: torch.device
    """The device that computes."""
    queue: IoQueue
    pool: BufferPool
    host_limit_bytes: int
    """Host memory that the run may take: `limits.host_memory`, or what was free when the run began."""
    ranks: Ranks
    """This process among those that train together."""
    layout: RankLayout = ONE_RANK
    """Where they are; until they have asked each other, as if this one were alone."""
    resources: ExitStack
    """Closes what is opened later, last opened first."""

    def listen(self) -> None:
        """From here on SIGINT and SIGTERM end the run at its next safe place, not at once."""
        self.resources.enter_context(self.stop)

    def open_queue(self) -> IoQueue:
        """A further queue, which the context closes. A device that hangs breaks only its own queue."""
        return self.resources.enter_context(_open_queue(self.config, self.log))

    def open_store(
        self,
        paths: Sequence[Path],
        *,
        identity: StoreIdentity | None = None,
        queue: IoQueue | None = None,
        read_only: bool = False,
        shared: bool = False,
    ) -> Store:
        """`Store.open`, by the context's own queue if no other is given. The context closes the store."""
        store = Store.open(
            paths,
            queue=queue or self.queue,
            identity=identity,
            notice=self.log.notice,
            read_only=read_only,
            shared=shared,
        )
        return self.resources.enter_context(store)

    def bar(self, what: str, total: float) -> AbstractContextManager[Advance]:
        """`stoppable_bar` with the run's log and signals."""
        return stoppable_bar(self.log, self.stop, what, total)

    def fill(self, store: Store, source: StateSource, what: str) -> None:
        """Write `source` as the store's next generation, and commit it; `what` is the bar's text. See `store.fill`."""
        with self.bar(what, store.generation_bytes) as advance:
            fill(store, source, self.pool, progress=advance)
        self.pool.trim()


@contextmanager
def open_context(
    config: RunConfig, log: RunLog, *, device: torch.device = CPU, ranks: Ranks = ALONE
) -> Iterator[RunContext]:
    """Open the queue and the memory of a run that computes on `device`, together with other ranks.

    Raises EnvironmentFailure where the I/O engine that the config names cannot be used.
    """
    with ExitStack() as opened:
        queue = opened.enter_context(_open_queue(config, log))
        # Ranks of one machine share what is free; a limit that the config sets is for each of them.
        limit_bytes = config.limits.host_memory or default_limit_bytes() // num_local_ranks()
        pool = BufferPool(limit_bytes)
        if device.type != "cpu":
            # Pinned, so that copies to and from the GPU overlap with work. Pinned memory is not given back before the
            # end, so the limit is less by what the process has already.
            pool = BufferPool(max(0, limit_bytes - kept_bytes()), pin=GpuPinning(device, log.notice))
        opened.enter_context(pool)
        yield RunContext(
            config=config,
            log=log,
            stop=StopRequest(),
            device=device,
            queue=queue,
            pool=pool,
            host_limit_bytes=limit_bytes,
            ranks=ranks,
            resources=opened.enter_context(ExitStack()),
        )


def bars_of(log: RunLog) -> OpenBar:
    """Opens progress bars of a log, for work that any signal ends at once."""

    @contextmanager
    def open_bar(what: str, total: float, *, items: str = "") -> Iterator[Advance]:
        with log.bar(what, total, items=items) as bar:
            yield bar.advance

    return open_bar


@contextmanager
def stoppable_bar(log: RunLog, stop: StopRequest, what: str, total: float) -> Iterator[Advance]:
    """A progress bar over long work. Yields the callback for each part of the work that is done.

    The callback raises Interrupted if a signal asked the command to stop; otherwise it advances the bar.
    """
    with log.bar(what, total) as bar:

        def advance(amount: float, items: int = 0) -> None:
            stop.check()
            bar.advance(amount, items)

        yield advance


def _open_queue(config: RunConfig, log: RunLog) -> IoQueue:
    storage = config.storage
    return open_queue(storage.engine, notice=log.notice, depth=depth_for(len(storage.paths)))
