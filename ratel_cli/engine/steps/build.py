"""Opens the device that computes, and puts the parts of the engine together: updates, the optimizer thread, the weight
reader and the steps above them.

Invariant: however the run ends, threads are joined and memory is given back, the parts opened last first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic

import torch

from ratel_cli.closing import Closing
from ratel_cli.engine.cache.activations import ActivationOffloader
from ratel_cli.engine.device.device import Device, HostDevice
from ratel_cli.engine.device.gpu import GpuDevice
from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.optimizer.gradient_sums import GradientSums
from ratel_cli.engine.optimizer.gradients import one_part
from ratel_cli.engine.optimizer.group_update import GroupUpdater
from ratel_cli.engine.optimizer.groups import GroupWork
from ratel_cli.engine.optimizer.host_sums import SumThread
from ratel_cli.engine.optimizer.pipeline import GroupOrder, UpdatePipeline
from ratel_cli.engine.optimizer.update import Updates
from ratel_cli.engine.ranks.exchange import GradientExchange
from ratel_cli.engine.ranks.gathered import WeightGathers
from ratel_cli.engine.ranks.norms import norms_of_all
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.engine.reading.host_weights import HostWeights, ResidentWeights
from ratel_cli.engine.reading.program import AnyBatch, BoundModel, Program
from ratel_cli.engine.reading.weights import WeightReader
from ratel_cli.engine.steps.following import EngineSettings, Following
from ratel_cli.engine.steps.state import StepServices
from ratel_cli.engine.steps.step import StepEngine
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import IoQueue
from ratel_cli.io.scratch import Scratch
from ratel_cli.planning.profile.activations import tokens_per_chunk
from ratel_cli.schedule.blocks import BlockSpec
from ratel_cli.schedule.slices import GATHERED_AHEAD, range_in, slice_of, sliced_segments
from ratel_cli.schedule.uses import Stage
from ratel_cli.store.store import Store


@contextmanager
def open_device(device: torch.device, timeline: Timeline | None, *, limit_bytes: int | None = None) -> Iterator[Device]:
    """Open the device for an engine. `timeline` None: nothing is recorded. `limit_bytes`: the most that torch may
    allocate on a GPU; None sets no limit."""
    if device.type == "cpu":
        yield HostDevice(timeline)
        return
    with GpuDevice(device, timeline, limit_bytes=limit_bytes) as opened:
        yield opened


class UpdatingParts(Closing):
    """What any engine is made of, whatever plan it follows: weights that are read ahead, and updates. Use as a context
    manager.

    One engine may follow another on the same parts: it takes over what is resident, and what is left to do of the step
    that is decided.
    """

    def __init__(
        self,
        model: BoundModel,
        store: Store,
        *,
        queue: IoQueue,
        pool: BufferPool,
        device: Device,
        timeline: Timeline,
        paths: Sequence[Path],
        drive_shares: Sequence[int] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Parts on an open store, which has this rank's slices, and an open device; scratch files will lie in `paths`.
        `drive_shares`: the paths' shares of these files; None: equal shares."""
        self._store = store
        self._queue = queue
        self._pool = pool
        self._device = device
        self._timeline = timeline
        self._paths = paths
        self._drive_shares = drive_shares
        self._ranks = ranks
        self._model = model
        self._resident = ResidentWeights(frozenset())
        self._resources = ExitStack()
        self._sums = self._resources.enter_context(SumThread(timeline))
        self._gathers = self._resources.enter_context(WeightGathers(ranks, timeline))
        self._exchange: GradientExchange | None = None
        self._updates: Updates | None = None
        self._gradients: Scratch | None = None
        model.move_to(device.torch_device)

    def follow(self, settings: EngineSettings) -> Following:
        """What follows these settings. What followed others must not be used any more.

        The optimizer's settings and threads are those of the first call. Raises EnvironmentFailure if there is no space
        for scratch files.
        """
        placement = settings.placement
        if self._ranks.size > 1:
            # What is in memory of other ranks' slices is old after each step. And how far blocks are gathered ahead
            # decides how often: that must be the same in all ranks, whose plans may differ.
            placement = replace(placement, resident_weights=frozenset(), prefetch_blocks=GATHERED_AHEAD)
        if self._gradients is None or self._gradients.num_bytes < settings.gradient_scratch_bytes:
            self._gradients = self._scratch(settings.gradient_scratch_bytes)  # the old one may have deferred gradients
        if self._updates is None:
            self._updates = self._open_updates(settings)
            self._exchange = GradientExchange(self._ranks, self._updates, self._pool, self._timeline)
        assert self._exchange is not None
        self._updates.follow(settings.updates, placement, self._gradients)
        reader = WeightReader(
            self._model,
            partial(self._read, self._updates),
            self._pool,
            self._updates,
            self._resident,
            placement=placement,
            device=self._device,
            timeline=self._timeline,
        )
        dtype = None if self._ranks.size == 1 else torch.float32
        sums = GradientSums(self._pool, self._device, self._sums, placement, dtype=dtype)
        return Following(
            updates=self._updates, exchange=self._exchange, reader=reader, gradient_sums=sums, resident=self._resident
        )

    def close(self) -> None:
        """End all threads and give all memory back; a step that is not settled is lost. Idempotent."""
        if self._exchange is not None:
            self._exchange.close()
        if self._updates is not None:
            self._updates.close()
        self._resources.close()

    def _open_updates(self, settings: EngineSettings) -> Updates:
        updates, placement, store = settings.updates, settings.placement, self._store
        trained = [block for block in self._model.spec.blocks if block.is_trained]
        updater = self._resources.enter_context(
            GroupUpdater(
                settings.optimizer, seed=settings.seed, num_threads=placement.adamw_threads, device=self._device
            )
        )
        work = GroupWork(updater, store, self._pool, timeline=self._timeline)
        order: GroupOrder = "naive" if updates.overlap == "naive" else "optimized"
        pipeline = self._resources.enter_context(UpdatePipeline(work, order=order, groups=placement.groups))
        return Updates(
            updates,
            placement,
            sliced_segments(self._model.spec.segments, self._ranks.slice),
            store,
            pipeline,
            self._resident,
            self._gradients,
            timeline=self._timeline,
            parts_of=one_part if self._ranks.size == 1 else partial(norms_of_all, self._ranks, trained),
        )

    def _read(self, updates: Updates, block: BlockSpec, stage: Stage) -> HostWeights:
        """Begin to read what this rank has of a block, to update it if that is deferred, and to gather the rest."""
        field, own = block.record.compute_field, slice_of(block, self._gathers.slice)
        lease = self._pool.lease(block.compute_bytes, f"weights of {block.name}")
        in_shadow = updates.is_in_shadow(block)
        newest = self._store.shadow().generation if in_shadow else self._store.current()
        start_bytes = range_in(block, self._gathers.slice)[0] * block.dtype_bytes
        memory = lease.memory[start_bytes:][: own.compute_bytes]
        try:
            read = newest.read(block.index, field.name, 0, own.num_elements, memory)
        except BaseException:
            lease.release()
            raise
        weights = HostWeights(own, lease, read, start_bytes=start_bytes)
        updates.start_deferred(weights)
        return self._gathers.gather(block, lease, weights, stage, updates.waiting_for(block))

    def _scratch(self, num_bytes: int) -> Scratch | None:
        if not num_bytes:
            return None
        return self._resources.enter_context(Scratch(self._paths, num_bytes, self._queue, shares=self._drive_shares))


class EngineParts(UpdatingParts, Generic[AnyBatch]):
    """What makes step engines: the parts of any engine, and where activations are offloaded."""

    def __init__(
        self,
        program: Program[AnyBatch],
        store: Store,
        *,
        queue: IoQueue,
        pool: BufferPool,
        device: Device,
        timeline: Timeline,
        paths: Sequence[Path],
        drive_shares: Sequence[int] | None = None,
        ranks: Ranks = ALONE,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """See `UpdatingParts`. `check_stop` is called between blocks; what it raises abandons the step."""
        super().__init__(
            program,
            store,
            queue=queue,
            pool=pool,
            device=device,
            timeline=timeline,
            paths=paths,
            drive_shares=drive_shares,
            ranks=ranks,
        )
        self._program = program
        self._check_stop = check_stop
        self._activations: Scratch | None = None

    def engine(self, settings: EngineSettings) -> StepEngine[AnyBatch]:
        """The engine that follows these settings. Engines that were made before it must not be used any more.

        Raises as `follow`.
        """
        program, placement = self._program, settings.placement
        if self._activations is not None:
            self._activations.close()
        self._activations = self._scratch(settings.activation_scratch_bytes)
        following = self.follow(settings)
        device, tokens = self._device, settings.micro_batch_tokens
        elements = None if tokens is None else tokens * program.spec.hidden_size
        activations = ActivationOffloader(
            self._pool,
            self._activations,
            placement,
            device=device,
            timeline=self._timeline,
            micro_batch_elements=elements,
        )
        services = StepServices(
            pool=self._pool,
            device=device,
            gradient_sums=following.gradient_sums,
            activations=activations,
            swapped=placement.swapped,
            chunk_tokens=settings.chunk_tokens or tokens_per_chunk(program.spec.vocab_size),
            substitutes=program.spec.substitutes,
        )
        return StepEngine(program, following, services, settings, ranks=self._ranks, check_stop=self._check_stop)
