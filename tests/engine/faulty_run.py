"""A training run of three steps whose I/O fails: model, engine, store and loop are real, the system calls are not.

Invariant: every run starts from the same bytes in the store, so that no case depends on another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.errors import IntegrityFailure, RatelError
from ratel_cli.io.queue import IoQueue
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.sizes import DtypeName
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.training.loop import TrainingLoop
from ratel_cli.training.loop_settings import LoopCallbacks
from ratel_cli.training.schedule import LearningRateSchedule
from tests.engine.architectures import tiny_config
from tests.engine.machine import Machine, initial_weights, machine, random_steps
from tests.fakes import Fault, FaultyBarrier, FaultyQueue
from tests.reference import Recipe
from tests.training.loop_fakes import SETTINGS

NUM_STEPS = 3
MOST_SECONDS = 120.0
"""Longest time for one case, however its I/O fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A model and how its run updates it. `options` are those of `machine`."""

    num_layers: int = 1
    dtype: DtypeName = "float32"
    recipe: Recipe = field(default_factory=Recipe)
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A fault at one call, and what may follow from it."""

    fault: Fault
    lasts: bool = False
    """True if all later calls fail in the same way."""
    raises: type[RatelError] | None = IntegrityFailure
    """None: the run must end as if nothing had happened."""
    damages: bool = False
    """True if the drive may then hold wrong bytes. They are detected when they are read; there may be no others."""
    timeout_seconds: float = 20.0

    def queue(self, call: int) -> FaultyQueue:
        """A queue on which the fault occurs at this call."""
        if self.lasts:
            return FaultyQueue(from_call=call, lasting=self.fault, timeout_seconds=self.timeout_seconds)
        return FaultyQueue({call: self.fault}, timeout_seconds=self.timeout_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of a run: all state in the store, and loss and norm of each step that ran."""

    state: bytes
    curve: dict[int, tuple[float, float]]
    num_calls: int
    """System calls of its steps, without those that read `state`."""
    num_barriers: int
    """Number of syncs and of pages written through."""


class Steps:
    """One micro-batch for each step, the same every time, and one to evaluate."""

    num_eval_samples = 1

    def __init__(self) -> None:
        self._batches = [step[0] for step in random_steps(NUM_STEPS + 1, 1)]

    def step(self, step_index: int) -> list[MicroBatch]:
        return [self._batches[step_index]]

    def eval_batches(self) -> Iterator[MicroBatch]:
        yield self._batches[NUM_STEPS]


class Bench:
    """A store at step 0, and the undisturbed run from it."""

    def __init__(self, directory: Path, way: Way) -> None:
        self._directory = directory
        self._way = way
        self._config = tiny_config("llama", num_hidden_layers=way.num_layers)
        self._steps = Steps()
        self._store = directory / "drive0" / DATA_FILE_NAME
        self._model: DecoderModel | None = None
        with FaultyQueue() as queue, self._machine(queue, FaultyBarrier(), new=True) as ratel:
            self._model = ratel.model
        self._before = self._store.read_bytes()
        with FaultyQueue() as queue:
            self.undisturbed = self._run(queue, FaultyBarrier())
        assert list(self.undisturbed.curve) == [1, 2, 3]

    def check(self, kind: Kind, queue: FaultyQueue, barrier: FaultyBarrier | None = None) -> None:
        """Run on that queue. If the run failed, resume it without faults."""
        started = time.monotonic()
        error = self._error_of_run(queue, barrier or FaultyBarrier())
        assert time.monotonic() - started < MOST_SECONDS
        if error is not None:
            assert kind.raises is not None and isinstance(error, kind.raises), error
        elif not kind.damages:
            assert kind.raises is None, "the fault went unnoticed"
            return
        with FaultyQueue() as sound:
            try:
                resumed = self._run(sound, FaultyBarrier())
            except IntegrityFailure:
                assert kind.damages
                return
        self._check_right(resumed)

    def _error_of_run(self, queue: FaultyQueue, barrier: FaultyBarrier) -> RatelError | None:
        with queue:
            try:
                finished = self.start(queue, barrier)
            except RatelError as error:
                return error
            finally:
                queue.release()
        self._check_right(finished)
        return None

    def start(self, queue: FaultyQueue, barrier: FaultyBarrier) -> Finished:
        """Run all steps from the store at step 0."""
        self._store.write_bytes(self._before)
        return self._run(queue, barrier)

    def _check_right(self, finished: Finished) -> None:
        assert finished.state == self.undisturbed.state
        assert finished.curve == {step: self.undisturbed.curve[step] for step in finished.curve}

    def _run(self, queue: FaultyQueue, barrier: FaultyBarrier) -> Finished:
        """Run as a resumed run does: check the store, then run the remaining steps."""
        with self._machine(queue, barrier) as ratel:
            ratel.store.ensure_whole(ratel.pool, progress=lambda num_bytes: None, notice=lambda text: None)
            loop = TrainingLoop(
                ratel.engine,
                store=ratel.store,
                queue=queue,
                data=self._steps,
                settings=replace(
                    SETTINGS,
                    num_steps=NUM_STEPS,
                    schedule=LearningRateSchedule(
                        scheduler="constant", peak=1e-3, num_warmup_steps=0, num_steps=NUM_STEPS
                    ),
                ),
                timeline=ratel.timeline,
                callbacks=LoopCallbacks(),
            )
            curve = {metrics.step: (metrics.loss, metrics.grad_norm) for metrics in loop.steps()}
            num_calls, num_barriers = len(queue.calls), len(barrier.calls)
            assert ratel.store.progress.step == NUM_STEPS
            return Finished(state=state_of(ratel), curve=curve, num_calls=num_calls, num_barriers=num_barriers)

    def _machine(self, queue: IoQueue, barrier: FaultyBarrier, *, new: bool = False) -> AbstractContextManager[Machine]:
        weights = initial_weights(self._config) if new else None
        return machine(
            self._directory,
            self._config,
            self._way.recipe,
            dtype=self._way.dtype,
            weights=weights,
            queue=queue,
            model=self._model,
            barrier=barrier,
            **self._way.options,  # type: ignore[arg-type]
        )


def state_of(ratel: Machine) -> bytes:
    """The bytes of every field of every block, as the store returns them."""
    parts = []
    for block, num_elements in enumerate(each.num_elements for each in ratel.store.blocks):
        for each in ratel.store.blocks[block].record.fields:
            with ratel.pool.lease(each.num_bytes(num_elements), "test") as lease:
                ratel.store.current().read(block, each.name, 0, num_elements, lease.memory).wait()
                parts.append(bytes(lease.memory))
    return b"".join(parts)
