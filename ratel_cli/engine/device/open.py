"""Opens the device that computes: the CPU, or a GPU with a limit on its memory.

Invariant: torch's CUDA code is imported only where a GPU is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ratel_cli.engine.device.device import Device, HostDevice
from ratel_cli.engine.telemetry import Timeline


@contextmanager
def open_device(device: torch.device, timeline: Timeline, *, limit_bytes: int | None = None) -> Iterator[Device]:
    """Open the device for an engine. `limit_bytes`: the most that torch may allocate on a GPU; None sets no limit."""
    if device.type == "cpu":
        yield HostDevice(timeline)
        return
    from ratel_cli.engine.device.cuda import CudaDevice

    with CudaDevice(device, timeline, limit_bytes=limit_bytes) as opened:
        yield opened
