"""The fixtures of tests/io, for the tests of the store."""

from __future__ import annotations

from tests.io.conftest import engine, fd, pool, queue

__all__ = ["engine", "fd", "pool", "queue"]
