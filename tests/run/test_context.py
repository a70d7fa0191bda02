"""What a run has open: the order in which it is closed, and the progress bar that a signal stops."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ratel_cli.config.keys.schema import DatasetConfig, LimitsConfig, RunConfig, StorageConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import Interrupted
from ratel_cli.run.context import open_context
from ratel_cli.units import MIB


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(
        base_model="none",
        datasets=(DatasetConfig(path="none"),),
        storage=StorageConfig(paths=(tmp_path,), engine="threads"),
        limits=LimitsConfig(host_memory=MIB),
    )


def test_resources_are_closed_before_queue_and_memory(config: RunConfig) -> None:
    closed: list[bool] = []
    with open_context(config, RunLog()) as context:
        assert (context.queue.engine, context.host_limit_bytes) == ("threads", MIB)

        def close() -> None:
            with context.pool.lease(4096, "test"):
                closed.append(True)

        context.resources.callback(close)
    assert closed == [True]


def test_a_signal_stops_the_work_at_its_next_part(config: RunConfig) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with open_context(config, RunLog()) as context:
        context.listen()
        with context.bar("working", 2) as advance:
            advance(1)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Interrupted) as raised:
                advance(1)
    assert raised.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before
