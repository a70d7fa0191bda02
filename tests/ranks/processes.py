"""Processes that are the ranks of one group of torch.distributed, started once and used again."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ratel_cli.closing import Closing
from ratel_cli.engine.ranks.processes import ranks_of
from ratel_cli.engine.ranks.ranks import Ranks

_TIMEOUT = timedelta(seconds=60)


class Processes(Closing):
    """`size` processes, of which any number does a task together."""

    def __init__(self, size: int) -> None:
        self._directory = ExitStack()
        meeting = Path(self._directory.enter_context(tempfile.TemporaryDirectory())) / "meeting"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ratel_cli.engine.ranks.processes", "tests.engine.machine"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, meeting), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, task: Callable[..., Any], *arguments: object) -> list[Any]:
        """What `task(ranks, *arguments)` returns in each of the first `size` processes. Raises what one of them has
        raised, as a RuntimeError with its traceback."""
        for pipe in self._pipes:
            pipe.send((size, task, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        if failures := [failure for _, failure in answers if failure is not None]:
            raise RuntimeError("\n".join(failures))
        return [found for found, _ in answers[:size]]

    def close(self) -> None:
        """End them. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
        self._directory.close()


def _serve(pipe: Connection, rank: int, size: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=_TIMEOUT)
    groups: dict[int, Ranks] = {}
    while True:
        try:
            number, task, arguments = pipe.recv()
        except EOFError:
            return
        if number not in groups:
            groups[number] = ranks_of(rank, number, _TIMEOUT)
        try:
            pipe.send((task(groups[number], *arguments) if rank < number else None, None))
        except Exception:  # noqa: BLE001 (the test is told)
            pipe.send((None, traceback.format_exc()))
