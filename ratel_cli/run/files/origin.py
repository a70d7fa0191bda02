"""Which step of which run a new run starts from: `--from RUN[@STEP]`, and the record of it in `run/origin.json`.

The record stays with the run. With it the same command, `--from` included, resumes a run that was stopped, and the
steps of the other run do not count for what this one has written.

Invariant: this file imports nothing heavy, so a wrong RUN is answered at once.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.json_fields import read_file_as
from ratel_cli.run.files.run_directory import ORIGIN_NAME, REFERENCE_NAME, find_run, run_directory
from ratel_cli.run.files.run_files import is_users, list_run_files, remove_run_file, write_run_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run that `--from` names."""

    config: RunConfig
    step: int | None
    """A saved step; None: the last one."""
    fresh_optimizer: bool
    """Take the weights only, and begin at step 0."""

    def __str__(self) -> str:
        return f"{self.config.output_dir}" + ("" if self.step is None else f"@{self.step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginRecord:
    """What a run has recorded of its origin."""

    run: str
    """The output directory of the other run."""
    step: int
    fresh_optimizer: bool

    @property
    def first_step(self) -> int:
        """The step that the run began after."""
        return 0 if self.fresh_optimizer else self.step


def find_origin(text: str, log: RunLog, *, fresh_optimizer: bool) -> Origin:
    """The origin that `RUN[@STEP]` names. Raises BadInput if RUN is no run."""
    path, step = Path(text), None
    found = re.fullmatch(r"(.+)@(\d{1,18})", text, flags=re.ASCII | re.DOTALL)
    if found is not None and not os.path.lexists(path):
        path, step = Path(found[1]), int(found[2])
    try:
        config = find_run(path, log, ranks=(0, 0))  # each rank reads the stores of all
    except BadInput as error:
        raise BadInput(f"--from {text}: {error.message}", error.hint, others=error.others) from error
    return Origin(config=config, step=step, fresh_optimizer=fresh_optimizer)


def check_origin(config: RunConfig, origin: Origin) -> None:
    """Raise BadInput if the config's run would write where the run that it starts from has its files."""
    theirs, ours = origin.config, config
    if os.path.realpath(theirs.output_dir) == os.path.realpath(ours.output_dir):
        raise BadInput(
            f"--from {origin}: that run has the same output_dir, {ours.output_dir}",
            "a run that starts from another one needs an output_dir of its own: output_dir=DIR",
        )
    shared = set(map(os.path.realpath, theirs.storage.paths)) & set(map(os.path.realpath, ours.storage.paths))
    if shared:
        raise BadInput(
            f"--from {origin}: that run has its store in the same directory, {min(shared)}",
            "a run that starts from another one needs a store of its own: set storage.paths",
        )


def check_same_origin(config: RunConfig, origin: Origin) -> None:
    """Raise BadInput unless the config's run, which has a store already, began where `origin` says."""
    record = read_origin(config)
    is_same = (
        record is not None
        and record.run == os.path.realpath(origin.config.output_dir)
        and record.fresh_optimizer == origin.fresh_optimizer
        and origin.step in (None, record.step)
    )
    if is_same:
        return
    began = "at its base model"
    if record is not None:
        began = f"from {record.run}@{record.step}" + (" with --fresh-optimizer" if record.fresh_optimizer else "")
    asked = f"--from {origin}" + (" --fresh-optimizer" if origin.fresh_optimizer else "")
    raise BadInput(
        f"{asked}: the run in {config.output_dir} has begun already, {began}",
        "leave out --from to resume it; set another output_dir for a new run; or start over with --resume no",
    )


def read_origin(config: RunConfig) -> OriginRecord | None:
    """What the config's run has recorded of its origin; None if it has none, or it cannot be read."""
    if is_users(config.output_dir, ORIGIN_NAME):
        return None
    return read_file_as(OriginRecord, _path(config))


def write_origin(config: RunConfig, record: OriginRecord | None) -> None:
    """Record the origin of a new run, which forgets the reference model of an earlier one; None: it begins with its
    base model. Raises EnvironmentFailure."""
    path = _path(config)
    try:
        remove_run_file(config.output_dir, REFERENCE_NAME)  # what there is was computed with other weights
        if record is None:
            remove_run_file(config.output_dir, ORIGIN_NAME)
            return
        list_run_files(config.output_dir, [ORIGIN_NAME])
        path.parent.mkdir(parents=True, exist_ok=True)
        write_run_file(path, json.dumps(asdict(record), indent=2) + "\n")
    except OSError as error:
        raise EnvironmentFailure(
            f"output_dir: {path} cannot be written: {error.strerror}", "set output_dir to another directory"
        ) from error


def _path(config: RunConfig) -> Path:
    return run_directory(config.output_dir) / ORIGIN_NAME
