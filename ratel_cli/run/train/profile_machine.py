"""Measures this machine with the code that training uses: thoroughly for `ratel profile`, briefly otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit, EnvironmentFailure, NotEnoughSpace
from ratel_cli.hardware.budget import BRIEF, FULL, MeasurementBudget
from ratel_cli.hardware.gpu import compute_device
from ratel_cli.hardware.host import default_limit_bytes
from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.measure import measure
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.files import nearest_existing
from ratel_cli.io.queue import open_queue
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.profile_cache import ProfileTarget, profile_target, with_recent_rates
from ratel_cli.sizes import DtypeName
from ratel_cli.units import format_seconds

_ASSUMED_BYTES_PER_SECOND = 1e9
"""The rate of drives that cannot be measured."""


def measure_machine(target: ProfileTarget, log: RunLog, *, budget: MeasurementBudget = FULL) -> HardwareProfile:
    """The whole profile, in about half a minute. Reports what it measures.

    Raises RatelError where the device or a directory cannot be measured.
    """
    start = time.perf_counter()
    profile = _measure(target, log, budget=budget, progress=lambda what: log.say(f"measuring {what}"))
    log.say(f"measured in {format_seconds(time.perf_counter() - start)}")
    return profile


def measure_briefly(target: ProfileTarget, log: RunLog) -> HardwareProfile:
    """A profile as a run makes it, in about a second, where nothing better is known. Raises RatelError, as above."""
    log.notice("this machine is measured briefly; `ratel profile CONFIG` makes the plan better")
    return with_recent_rates(_measure(target, log, budget=BRIEF, progress=lambda what: None), target)


def report_other_load(meter: LoadMeter, log: RunLog) -> None:
    """Say that others computed while something was measured, if they did."""
    load = meter.other_load()
    if load is not None:
        log.notice(f"{load.words}, so measured speeds are too low and predicted times are rough")


def _measure(
    target: ProfileTarget, log: RunLog, *, budget: MeasurementBudget, progress: Callable[[str], None]
) -> HardwareProfile:
    device, meter = compute_device(target.device), LoadMeter()
    with ExitStack() as resources:
        queue = resources.enter_context(open_queue(target.engine, notice=log.notice))
        pool = resources.enter_context(BufferPool(default_limit_bytes()))
        dtype = _compute_dtype(target.dtype)
        profile = measure(target.paths, queue, pool, dtype=dtype, device=device, budget=budget, progress=progress)
    report_other_load(meter, log)
    return profile


def measure_for_run(context: RunContext, *, has_store: bool) -> HardwareProfile:
    """The profile that a run is planned with, in about a second. Raises EnvironmentFailure.

    Measuring takes space of its own, which is not what a run needs: where there is none, or where the run has its store
    and the drives cannot be measured, they get an assumed rate, and a warning says so.
    """
    config, queue, pool = context.config, context.queue, context.pool
    paths, dtype = [nearest_existing(path) for path in config.storage.paths], _compute_dtype(config.dtype)
    try:
        measured = measure(paths, queue, pool, dtype=dtype, device=context.device)
        return with_recent_rates(measured, profile_target(config))
    except EnvironmentFailure as failure:
        # A full disk must not stop a run that resumes, nor one whose store is smaller than what is measured with. If
        # there is too little memory or space to measure, the plan reports how much is missing in all.
        if not has_store and not isinstance(failure, DoesNotFit | NotEnoughSpace):
            raise
        context.log.warn(f"the drives could not be measured: {failure.message}; the prediction assumes 1 GB/s")
        rates = (_ASSUMED_BYTES_PER_SECOND, _ASSUMED_BYTES_PER_SECOND)
        return measure(paths, queue, pool, dtype=dtype, device=context.device, nvme_rates=rates)


def _compute_dtype(name: DtypeName) -> torch.dtype:
    """The dtype that a config's `dtype` names. Without transformers, which costs seconds to import."""
    return VALUE_DTYPES[name]
