"""The fixtures of tests/io, for the tests of the store, and a queue of plain threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ratel_cli.io.queue import IoQueue
from tests.fakes import FaultyQueue
from tests.io.conftest import engine, fd, pool, queue

__all__ = ["engine", "fd", "plain_queue", "pool", "queue"]


@pytest.fixture
def plain_queue() -> Iterator[IoQueue]:
    """A queue of plain threads, without faults."""
    with FaultyQueue(depth=4) as opened:
        yield opened
