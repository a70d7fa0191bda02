"""The machine's profile is measured once and kept: a hardware file in the user's cache directory, named by what
it was measured on.

Called by `cli.profile` and `run.plan_inputs`. Imports nothing heavy, so that a profile that is there is shown at once.

Invariant: a profile that comes from here has the caller's paths, and memory and space as free as they are now; its
rates were measured on this hardware, with this software. The cache is never needed: where it cannot be read or
written, the profile is measured, and that is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.host import available_bytes, free_bytes, gpu_names, memory_bytes, num_cores, processor_name
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.queue import EngineChoice
from ratel_cli.run.hardware_file import load_hardware, to_text
from ratel_cli.run.user_cache import software_versions, user_cache_file, write_user_cache
from ratel_cli.sizes import DtypeName
from ratel_cli.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTarget:
    """What is to be measured: the directories must exist; the other fields are as in a run's config."""

    paths: tuple[Path, ...]
    dtype: DtypeName
    device: Literal["auto", "cuda", "cpu"]
    engine: EngineChoice


def profile_of(
    subject: ProfileTarget, measure: Callable[[ProfileTarget], HardwareProfile], log: RunLog, *, refresh: bool
) -> HardwareProfile:
    """The profile as it was kept, or else measured now and kept; told which, and how old it is."""
    kept = None if refresh else kept_profile(subject, log)
    if kept is not None:
        return kept
    profile = measure(subject)
    _write(cache_file(subject), profile, log)
    return profile


def kept_profile(subject: ProfileTarget, log: RunLog) -> HardwareProfile | None:
    """The profile as it was kept, told how old it is; None if there is none that can be used."""
    file = cache_file(subject)
    kept = _read(file, log)
    if kept is None:
        return None
    age_seconds = max(0.0, time.time() - file.stat().st_mtime)
    log.say(f"as measured {format_seconds(age_seconds)} ago; `ratel profile --refresh` measures again")
    return refresh_free_space(kept, subject)


def refresh_free_space(profile: HardwareProfile, subject: ProfileTarget) -> HardwareProfile:
    """The same rates, with the subject's paths, and memory and space as free as they are now."""
    return replace(
        profile,
        nvme=replace(profile.nvme, paths=tuple(map(str, subject.paths)), free_bytes=free_bytes(subject.paths)),
        host=replace(profile.host, available_bytes=available_bytes()),
    )


def cache_file(subject: ProfileTarget) -> Path:
    """Where a profile of this subject on this machine is cached."""
    return user_cache_file("hardware", asdict(_fingerprint(subject)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fingerprint:
    """All that the rates depend on. Directories on the same devices are equally fast, whatever their names."""

    processor: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    drives: tuple[int, ...]
    dtype: str
    device: str
    engine: str
    software: tuple[str, ...]


def _fingerprint(subject: ProfileTarget) -> _Fingerprint:
    return _Fingerprint(
        processor=processor_name(),
        num_cores=num_cores(),
        memory_bytes=memory_bytes(),
        gpus=gpu_names(),
        drives=tuple(path.stat().st_dev for path in subject.paths),
        dtype=subject.dtype,
        device=subject.device,
        engine=subject.engine,
        software=software_versions("ratel-cli", "torch"),
    )


def _read(file: Path, log: RunLog) -> HardwareProfile | None:
    if not os.path.exists(file):
        return None
    try:
        return load_hardware(file)
    except BadInput as error:
        log.notice(f"the profile that was kept cannot be used: {error.message}")
        return None


def _write(file: Path, profile: HardwareProfile, log: RunLog) -> None:
    try:
        write_user_cache(file, to_text(profile))
    except OSError as error:
        log.warn(f"{file}: the profile cannot be kept ({error.strerror}); it will be measured again next time")
