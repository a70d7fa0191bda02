"""Fixtures: a queue of each engine, a pool, an open file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import EngineName, IoQueue, open_queue
from tests.fakes import REQUEST_BYTES, open_direct


@pytest.fixture(params=["io_uring", "liburing", "threads"])
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    try:
        open_queue(name, notice=pytest.fail).close()
    except EnvironmentFailure as failure:
        pytest.skip(failure.message)
    return name


@pytest.fixture
def queue(engine: EngineName) -> Iterator[IoQueue]:
    with open_queue(engine, notice=pytest.fail, request_bytes=REQUEST_BYTES, depth=4) as opened:
        yield opened


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(None) as opened:
        yield opened


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = open_direct(tmp_path / "data")
    yield opened
    os.close(opened)
