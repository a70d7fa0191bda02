"""Looks at the GPU as a run does: through torch, with the link measured; and asks the driver's tool about its clock.

Invariant: whatever fails here becomes a sentence, never an exception: this is for machines that are broken.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import torch

from ratel_cli.errors import RatelError, first_line
from ratel_cli.hardware.checkup_gpu import GpuSight
from ratel_cli.hardware.gpu import compute_device, measure_link
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.pinning import GpuPinning
from ratel_cli.sizes import HUGE_PAGE_BYTES

_SECONDS = 0.2
"""For each direction of the link: long enough for a GPU that was idle to raise its link's speed."""
_TOOL_SECONDS = 10.0
_CLOCK_QUERIES = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The name of today's drivers, and that of older ones."""


def look_at_gpu() -> GpuSight:
    """What torch makes of the GPU, after some work on it, so that link and clock are those of work."""
    build = torch.version.cuda or torch.version.hip
    failure = _failure_of_cuda() if build else None
    try:
        device = compute_device("auto")
        if device.type == "cpu":
            return GpuSight(build=build, failure=failure, name=None)
        name = str(torch.get_device_module(device).get_device_name(device))
        pinning_failure, link = _pinning_failure(device), measure_link(device, _SECONDS)
    except (RatelError, RuntimeError) as error:  # torch's errors of CUDA are RuntimeErrors
        return GpuSight(build=build, failure=first_line(error), name=None)
    return GpuSight(
        build=build,
        failure=None,
        name=name,
        link=link if link.to_gpu_bytes_per_second < 1e12 else None,  # there is none where the host's memory is shared
        pinning_failure=pinning_failure,
        clock_reasons=clock_reasons(_ask_driver),
    )


def clock_reasons(ask: Callable[[str], str]) -> int | None:
    """The driver's reasons for the present clocks of all GPUs, as bits; None if it gives none.

    `ask` returns what nvidia-smi prints for a field. It raises OSError or SubprocessError if that is not possible.
    """
    for field in _CLOCK_QUERIES:
        try:
            answers = [int(line, 16) for line in ask(field).split()]
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        reasons = 0
        for answer in answers:
            reasons |= answer
        return reasons
    return None


def _ask_driver(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    return done.stdout


def _failure_of_cuda() -> str | None:
    """What torch says when it is asked for CUDA; None if it can, or says nothing."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return None


def _pinning_failure(device: torch.device) -> str | None:
    said: list[str] = []
    with BufferPool(None, pin=GpuPinning(device, said.append)) as pool, pool.lease(HUGE_PAGE_BYTES, "a probe"):
        return said[0].partition(";")[0] if said else None
