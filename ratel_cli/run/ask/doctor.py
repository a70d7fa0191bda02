"""`ratel doctor`: looks at this machine as a run would use it, and gathers what it finds.

Invariant: nothing remains. Only a file without a name is written, one page, in each directory.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.hardware.checkup import (
    Diagnosis,
    Verdict,
    check_bf16,
    check_huge_pages,
    check_io_uring,
    check_memory,
    check_waiting,
)
from ratel_cli.hardware.checkup_drives import Place, check_place, check_sharing, check_space
from ratel_cli.hardware.checkup_gpu import GpuSight, check_gpu
from ratel_cli.hardware.gpu_sight import look_at_gpu
from ratel_cli.hardware.host import free_bytes
from ratel_cli.hardware.mounts import mount_of
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.io.files import nearest_existing
from ratel_cli.io.probe import probe_directory
from ratel_cli.io.queue import IoQueue, open_queue
from ratel_cli.neighbours import packages_that_fail
from ratel_cli.run.files.places import Places
from ratel_cli.run.inputs.model_description import describe_model
from ratel_cli.run.inputs.settings import new_geometry
from ratel_cli.run.train.first_checks import computes_in_bf16_here
from ratel_cli.run.train.space import spaces_of, taken_bytes


def examine(
    places: Places, log: RunLog, *, files: SystemFiles, look: Callable[[], GpuSight] = look_at_gpu
) -> list[Diagnosis]:
    """All diagnoses, in the order in which they are shown. `look` is how the GPU is looked at."""
    limits = [config.limits.host_memory for config in places.configs if config.limits.host_memory is not None]
    diagnoses = [
        check_memory(files, wanted_bytes=max(limits, default=None)),
        check_huge_pages(files),
        check_waiting(os.environ),
        *([check_bf16(files)] if any(map(computes_in_bf16_here, places.configs)) else []),
    ]
    diagnoses += _packages()
    with ExitStack() as resources:
        uring_failure: str | None = None
        try:
            queue = resources.enter_context(open_queue("io_uring", notice=lambda text: None))
        except EnvironmentFailure as failure:
            queue, uring_failure = (
                resources.enter_context(open_queue("threads", notice=lambda text: None)),
                failure.message,
            )
        needs_uring = any(config.storage.engine == "io_uring" for config in places.configs)
        diagnoses.append(check_io_uring(files, uring_failure, is_required=needs_uring))
        directories = [_place(path, queue, files) for path in places.paths]
    diagnoses += [check_place(place) for place in directories]
    diagnoses += check_sharing(directories)
    for config in places.configs:
        diagnoses += _space(config, directories, log)
    if all(config.device == "cpu" for config in places.configs) and places.configs:
        diagnoses.append(Diagnosis(what="GPU", verdict="ok", reason="not used: device is cpu"))
    else:
        diagnoses += check_gpu(files, look(), environment=os.environ, kernel=platform.release())
    return diagnoses


def _packages() -> Iterator[Diagnosis]:
    """Diagnose the packages installed beside Ratel: whether each of them loads."""
    failed = packages_that_fail()
    for each in failed:
        yield Diagnosis(
            what="packages", verdict="broken" if each.is_needed else "slow", reason=each.words, remedy=each.remedy
        )
    if not failed:
        yield Diagnosis(what="packages", verdict="ok", reason="all that a run may import can be imported")


def _place(path: Path, queue: IoQueue, files: SystemFiles) -> Place:
    directory = nearest_existing(path)
    return Place(
        path=path,
        mount=mount_of(Path(os.path.realpath(directory)), files),
        free_bytes=free_bytes([directory]),
        probe=probe_directory(directory, queue),
    )


def _space(config: RunConfig, places: Sequence[Place], log: RunLog) -> Iterator[Diagnosis]:
    """Whether the config's store, snapshot and export fit; nothing if the model is not here, which decides it."""
    try:
        spec = describe_model(config, name="", log=log).spec
    except BadInput as error:
        log.notice(f"the space that the store needs is not known: {error.message}")
        return
    paths = config.storage.paths
    need_bytes = sum(new_geometry(config, spec.stored_blocks, shares=(1,) * len(paths)).file_bytes())
    available_bytes = free_bytes([nearest_existing(path) for path in paths]) + taken_bytes(paths)
    mine = [place for place in places if place.path in paths]
    yield check_space(mine, need_bytes=need_bytes, available_bytes=available_bytes)
    for space in spaces_of(config, spec, nvme_bytes=need_bytes):
        verdict: Verdict = "ok" if space.remedy is None else "broken"
        yield Diagnosis(what=space.name, verdict=verdict, reason=space.words, remedy=space.remedy)
