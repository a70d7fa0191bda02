"""The queues and buffers of the tests of io/, which the tests of store/ use too."""

from __future__ import annotations

from tests.io.conftest import engine, fd, pool, queue

__all__ = ["engine", "fd", "pool", "queue"]
