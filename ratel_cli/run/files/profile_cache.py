"""The cache of the machine's profile: a hardware file in the user's cache directory, named by what was measured.

Invariant: a profile from here has the caller's paths, and the memory and space that are free now; its rates were
measured on this hardware with this software. Nothing needs the cache: if it cannot be read or written, the profile is
measured again, with a notice. Nothing heavy is imported, so a cached profile is shown at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeVar

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import available_bytes, free_bytes, gpu_names, memory_bytes, num_cores, processor_name
from ratel_cli.hardware.spec import ComputeDevice, HardwareProfile, Host, Link, Nvme
from ratel_cli.io.files import nearest_existing
from ratel_cli.io.queue import EngineChoice
from ratel_cli.run.files.hardware_file import load_hardware, to_text
from ratel_cli.run.files.user_cache import software_versions, user_cache_file, write_user_cache
from ratel_cli.sizes import DtypeName
from ratel_cli.units import format_seconds

_RECENT_SECONDS = 600.0
_Rates = TypeVar("_Rates", ComputeDevice, Link, Nvme, Host)

REFRESHES = "`ratel profile CONFIG --refresh`"
"""The command that measures again what a config's run needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTarget:
    """What to measure of a machine. The fields are as in a run's config."""

    paths: tuple[Path, ...]
    """Directories that exist."""
    dtype: DtypeName
    device: Literal["auto", "cuda", "cpu"]
    engine: EngineChoice


def profile_target(config: RunConfig, storage: Sequence[Path] = ()) -> ProfileTarget:
    """What to measure for a config's run. Directories in `storage` replace those of the config."""
    return ProfileTarget(
        paths=tuple(storage) or tuple(nearest_existing(path) for path in config.storage.paths),
        dtype=config.dtype,
        device=config.device,
        engine=config.storage.engine,
    )


def machine_profile(
    target: ProfileTarget,
    measure: Callable[[ProfileTarget], HardwareProfile],
    log: RunLog,
    *,
    refresh: bool,
    refreshed_by: str,
) -> HardwareProfile:
    """The cached profile or, if there is none or with `refresh`, a new one, which `measure` makes and which is
    cached. `refreshed_by`: the command that measures this target again."""
    cached = None if refresh else cached_machine_profile(target, log, refreshed_by=refreshed_by)
    if cached is not None:
        return cached
    profile, file = measure(target), cache_file(target)
    try:
        write_user_cache(file, to_text(profile))
    except OSError as error:
        log.warn(f"{file}: the profile cannot be cached ({error.strerror}); the next command measures again")
    return profile


def with_recent_rates(measured: HardwareProfile, target: ProfileTarget) -> HardwareProfile:
    """A brief profile with the better of its rates and those of other brief profiles of the last minutes, so that
    commands which follow each other predict the same.

    A rate is measured for a fraction of a second. What was best is nearest to what the machine can do.
    """
    file = cache_file(target, kind="brief")
    try:
        is_recent = time.time() - file.stat().st_mtime < _RECENT_SECONDS
        recent = load_hardware(file) if is_recent else None
    except (OSError, BadInput):
        recent = None
    best = measured
    if recent is not None:
        best = replace(
            measured,
            gpu=_with_best_rates(measured.gpu, recent.gpu),
            link=measured.link and recent.link and _with_best_rates(measured.link, recent.link),
            nvme=_with_best_rates(measured.nvme, recent.nvme),
            host=_with_best_rates(measured.host, recent.host),
        )
    if best != recent:
        with suppress(OSError):  # the next command does without
            write_user_cache(file, to_text(best))
    return best


def _with_best_rates(measured: _Rates, recent: _Rates) -> _Rates:
    """The first one with the greater of each rate that both have."""
    best = {}
    for name in (each.name for each in fields(measured) if each.name.endswith("_per_second")):
        mine, other = getattr(measured, name), getattr(recent, name)
        if mine is not None and other is not None:
            best[name] = max(mine, other)
    return replace(measured, **best)


def cached_machine_profile(target: ProfileTarget, log: RunLog, *, refreshed_by: str) -> HardwareProfile | None:
    """The cached profile, with a line about its age and the command that measures the target again;
    None if there is none that can be used."""
    file = cache_file(target)
    if not os.path.exists(file):
        return None
    try:
        cached = load_hardware(file)
    except BadInput as error:
        log.notice(f"the cached profile of this machine cannot be used: {error.message}")
        return None
    age_seconds = max(0.0, time.time() - file.stat().st_mtime)
    log.say(f"machine measured {format_seconds(age_seconds)} ago; {refreshed_by} measures again")
    return refresh_free_space(cached, target)


def refresh_free_space(profile: HardwareProfile, target: ProfileTarget) -> HardwareProfile:
    """The profile with the target's paths, and with the memory and the space that are free now."""
    return replace(
        profile,
        nvme=replace(profile.nvme, paths=tuple(map(str, target.paths)), free_bytes=free_bytes(target.paths)),
        host=replace(profile.host, available_bytes=available_bytes()),
    )


def cache_file(target: ProfileTarget, *, kind: str = "hardware") -> Path:
    """The file with the profile of this target on this machine, whether it exists or not."""
    rates_depend_on = {
        "processor": processor_name(),
        "num_cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": gpu_names(),
        "drives": [path.stat().st_dev for path in target.paths],  # equally fast on one device, whatever their names
        "dtype": target.dtype,
        "device": target.device,
        "engine": target.engine,
        "software": software_versions("ratel-cli", "torch"),
    }
    return user_cache_file(kind, rates_depend_on)
