"""A process for tests to kill: makes or opens a store, runs steps, and writes each committed step to a file.

Arguments: that file, what to do (steps, endless, pins, in_place, overwrite, hold), the directories.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.store.store import Store
from tests.store.stores import create_store, import_all, open_store, run_step

NUM_STEPS = 3


def main(acknowledged: Path, work: str, paths: list[Path]) -> None:
    with open_queue("auto", notice=print, depth=2) as queue, _store(work, paths, queue) as store:
        _acknowledge(acknowledged, store)
        if work == "hold":
            sys.stdin.read(1)
        while work == "endless" or store.progress.step < NUM_STEPS:
            run_step(store)
            _acknowledge(acknowledged, store)
            if work == "pins":
                for step in store.pinned_steps:
                    store.unpin(step)
                store.pin()
                _acknowledge(acknowledged, store)


def _store(work: str, paths: list[Path], queue: IoQueue) -> Store:
    if work != "overwrite" and Store.exists(paths):
        return open_store(paths, queue, lock_wait_seconds=10)
    num_slots = 4 if work == "pins" else 2
    overwrite, in_place = work == "overwrite", work == "in_place"
    return import_all(create_store(paths, queue, num_slots=num_slots, overwrite=overwrite, in_place=in_place))


def _acknowledge(path: Path, store: Store) -> None:
    path.write_text(str(store.progress.step))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(path) for path in sys.argv[3:]])
