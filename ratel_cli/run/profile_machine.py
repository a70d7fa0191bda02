"""Measures this machine in full, for `ratel profile`: opens what that needs, and tells what it is doing.

Called by `cli.profile` when nothing is kept, as it takes half a minute and imports torch.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from ratel_cli.console import RunLog
from ratel_cli.hardware.budget import FULL, MeasurementBudget
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import open_queue
from ratel_cli.run.profile_cache import ProfileTarget
from ratel_cli.units import format_seconds

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def measure_machine(target: ProfileTarget, log: RunLog, *, budget: MeasurementBudget = FULL) -> HardwareProfile:
    """The whole profile. Raises RatelError where the device or a directory cannot be measured."""
    start = time.perf_counter()
    device = compute_device(target.device)
    with ExitStack() as resources:
        queue = resources.enter_context(open_queue(target.engine, notice=log.notice))
        pool = resources.enter_context(BufferPool(default_limit_bytes()))
        profile = measure(
            target.paths,
            queue,
            pool,
            dtype=_DTYPES[target.dtype],
            device=device,
            budget=budget,
            progress=lambda what: log.say(f"measuring {what}"),
        )
    log.say(f"measured in {format_seconds(time.perf_counter() - start)}")
    return profile
