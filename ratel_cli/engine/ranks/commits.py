"""Commits of all ranks: a step counts when every rank has it.

    1. commit   each rank makes its slices durable, and its current generation
    2. meet     all have; from here on the generation before may be overwritten

A rank that ends before the meeting leaves the others with both generations, so all resume from the older one. That
is why no rank asks the others before it commits: what it has too much costs nothing.

Invariant: after any crash of any ranks at any moment, each rank has the newest step that all had committed, current or
as the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import IntegrityFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.store.open import START_OVER
from ratel_cli.store.store import Progress, Store

_NONE = -1


def commit_together(store: Store, ranks: Ranks, progress: Progress, timeline: Timeline | None = None) -> None:
    """Commit a step in all ranks; `timeline`: of the thread that waits. Raises as `Store.commit` and `Channel.swap`."""
    timeline = timeline or Timeline()
    with timeline.stalled_on("nvme write"):
        store.commit(progress)
    with timeline.stalled_on("network"):
        _meet(ranks, progress.step)


def commit_progress_together(store: Store, ranks: Ranks, progress: Progress) -> None:
    """Commit a step that was not applied in all ranks. Raises as `Store.commit_progress` and `Channel.swap`."""
    store.commit_progress(progress, may_fall_back=ranks.size > 1)
    _meet(ranks, progress.step)


def resume_together(
    store: Store, ranks: Ranks, pool: BufferPool, *, notice: Callable[[str], None] = lambda text: None
) -> None:
    """Let all ranks resume from the newest step that each of them has. Their stores must be whole.

    Raises IntegrityFailure if there is none, and as `Store.fall_back`.
    """
    before = _NONE if store.step_before is None else store.step_before
    known = ranks.gathered([store.progress.step, before])
    newest = newest_common([{int(step) for step in steps} - {_NONE} for steps in known])
    if newest is None:
        steps = ", ".join(f"{current:.0f}" for current, _ in known)
        raise _of_all(
            f"the stores of the ranks have no step in common; they are at steps {steps}",
            "go back to a saved step with --resume STEP, or start over with --resume no",
        )
    if newest != store.progress.step:
        notice(f"step {store.progress.step} was not committed by all ranks; all resume from step {newest}")
        store.fall_back(pool)
    _meet(ranks, newest)


def newest_common(steps: Sequence[set[int]]) -> int | None:
    """The newest step that every rank has; None if there is none. `steps`: of each rank."""
    return max(set.intersection(*steps), default=None)


def _meet(ranks: Ranks, step: int) -> None:
    """Return when all ranks have come here, with the same step."""
    steps = [int(found) for (found,) in ranks.gathered([step])]
    if len(set(steps)) > 1:
        raise _of_all(f"the ranks are at different steps: {', '.join(map(str, steps))}", START_OVER)


def _of_all(message: str, hint: str) -> IntegrityFailure:
    failure = IntegrityFailure(message, hint)
    failure.reported_by = 0
    return failure
