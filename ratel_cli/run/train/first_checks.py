"""What can be wrong about a run before anything of it is read: one list, for `ratel finetune` and `ratel check`.

Invariants: nothing heavy is imported, so all of it is answered at once; nothing remains written.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.data.text.mistral_tokenizer import check_mistral_common
from ratel_cli.errors import BadInput, EnvironmentFailure, ErrorList
from ratel_cli.hardware.checkup import check_bf16
from ratel_cli.hardware.host import gpu_names
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.io.files import nearest_existing
from ratel_cli.run.files.output import check_run_output
from ratel_cli.run.files.run_files import files_of_run
from ratel_cli.run.train.trackers import check_trackers
from ratel_cli.store.lock import DATA_FILE_NAME


def check_first(config: RunConfig, errors: ErrorList, *, has_origin: bool = False, overwrite: bool = False) -> None:
    """Check packages and directories. What is wrong goes to `errors`, and is raised if a directory cannot exist.

    `has_origin`: the run starts from another one; `overwrite`: files of others in the output directory are replaced.
    """
    errors.attempt(("report_to",), partial(check_trackers, config))
    if config.tokenizer_use_mistral_common:
        errors.attempt(("tokenizer_use_mistral_common",), check_mistral_common)
    snapshot = config.storage.snapshot
    places = [(("output_dir",), config.output_dir), *((("storage", "paths"), path) for path in config.storage.paths)]
    places += [(("storage", "snapshot", "path"), snapshot.path)] if snapshot is not None else []
    can_exist = [errors.attempt(key, partial(_check_name, path, ".".join(key))) for key, path in places]
    if not all(can_exist):
        errors.raise_all()
    names = files_of_run(config, has_origin=has_origin)
    errors.attempt(("output_dir",), partial(_check_output, config, names, overwrite=overwrite))
    for key, path in places[1:]:  # whether `storage.paths` can be written is seen when they are measured
        errors.attempt(key, partial(_check_store_place, path, ".".join(key)))
    if snapshot is not None and not os.path.isfile(snapshot.path / DATA_FILE_NAME):
        errors.attempt(places[-1][0], partial(_check_writable, snapshot.path, "storage.snapshot.path"))


def check_can_train(config: RunConfig, notice: Callable[[str], None]) -> None:
    """Raise BadInput if the config is only for `ratel plan`; keys that are only for it get a notice."""
    if config.cost_model != "ratel":
        notice("`cost_model` is only for `ratel plan`; a run is always planned with `cost_model: ratel`")
    if config.base_model is None:
        raise BadInput("`model_shape` is only for `ratel plan`", "set `base_model` to train a model")
    notice_slow_dtype(config, notice)


def notice_slow_dtype(config: RunConfig, notice: Callable[[str], None]) -> None:
    """Say so if this machine computes in the config's dtype, and slowly."""
    found = check_bf16(SystemFiles())
    if found.remedy is not None and computes_in_bf16_here(config):
        notice(f"{found.reason}: {found.remedy}")


def computes_in_bf16_here(config: RunConfig) -> bool:
    """Whether this machine's processor is what computes the layers, in bf16."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not gpu_names())
    return on_cpu and config.dtype == "bfloat16"


def _check_output(config: RunConfig, names: Sequence[str], *, overwrite: bool) -> None:
    check_run_output(config, names, overwrite=overwrite)
    _check_writable(config.output_dir, "output_dir")


def _check_store_place(directory: Path, option: str) -> None:
    """Raise EnvironmentFailure if no store can be in this directory."""
    file = directory / DATA_FILE_NAME
    if os.path.lexists(file) and not os.path.isfile(file):
        raise EnvironmentFailure(f"{option}: {file} is not a file", f"remove it, or set {option} to another directory")


def _check_writable(directory: Path, option: str) -> None:
    """Raise EnvironmentFailure unless the directory can be made, or files in it if it is there."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".ratel-", dir=nearest_existing(directory)))
    except OSError as error:
        raise _unusable(directory, option, error) from error


def _check_name(directory: Path, option: str) -> bool:
    """True; raises EnvironmentFailure if no directory can have this name: it is too long, or leads in a circle."""
    try:
        os.stat(directory)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise _unusable(directory, option, error) from error
    return True


def _unusable(directory: Path, option: str, error: OSError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"{option}: {directory} cannot be written: {error.strerror}", f"set {option} to another directory"
    )
