"""What the engines of a run share: the pool, whose idle buffers belong to one plan where the CPU computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from ratel_cli.engine.measure.telemetry import Timeline
from ratel_cli.engine.ranks.ranks import ALONE
from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.planning.duties.activations import RUNTIME_BYTES
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext
from ratel_cli.run.train import engine
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.store import Store
from ratel_cli.units import GIB


@contextmanager
def nothing(*_: object, **__: object) -> Iterator[SimpleNamespace]:
    """A device, and what makes engines."""
    yield SimpleNamespace(engine=lambda settings: None)


@pytest.mark.parametrize(("device", "pages"), [("cpu", 4), ("cuda", 6)])
def test_a_new_plan_gives_idle_buffers_back_where_the_cpu_computes(
    monkeypatch: pytest.MonkeyPatch, device: str, pages: int
) -> None:
    """A GPU's are pinned, which takes long, and torch's memory is elsewhere."""
    for name in ("open_device", "EngineParts"):
        monkeypatch.setattr(engine, name, nothing)
    monkeypatch.setattr(engine, "engine_settings", lambda config, plan: None)
    plan = cast("Plan", SimpleNamespace(device_allocation_bytes=None, memory=SimpleNamespace(process=GIB)))
    with BufferPool(None) as pool:
        context = SimpleNamespace(
            host_limit_bytes=2 * GIB,
            device=torch.device(device),
            pool=pool,
            queue=None,
            config=SimpleNamespace(storage=SimpleNamespace(paths=()), limits=SimpleNamespace(gpu_memory=None)),
            stop=SimpleNamespace(check=None),
            ranks=ALONE,
        )
        opened = engine.open_planned_engines(
            cast("RunContext", context),
            cast("DecoderModel", None),
            cast("Store", None),
            plan,
            timeline=Timeline(),
            drive_shares=(1,),
        )
        with opened as engine_for:
            engine_for(plan)
            pool.lease(4 * PAGE_BYTES, "the plan before").release()
            engine_for(plan)
            pool.lease(2 * PAGE_BYTES, "the new one").release()
        assert pool.peak_bytes == pages * PAGE_BYTES
        # Idle pinned buffers stay out of what the plan counts on for the process and for torch.
        assert pool.idle_limit_bytes == (None if device == "cpu" else GIB - RUNTIME_BYTES)
