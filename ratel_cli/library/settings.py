"""What a caller's arguments become: the config of a run without data, a log of warnings, a store's identity."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

import torch
import transformers

from ratel_cli import _native
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import config_of_caller
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.library.limits import Limits
from ratel_cli.run.files.user_cache import ratel_version

OWN_LOOP = "a loop of its own"
"""In a store's identity, where a run has what its data hashes to: no run resumes from it."""


class WarningLog(RunLog):
    """Prints nothing. What is worth knowing is a warning of Python's."""

    def __init__(self) -> None:
        super().__init__(StringIO())

    def notice(self, text: str) -> None:
        """See RunLog."""
        warnings.warn(f"ratel: {text}", stacklevel=2)

    def warn(self, text: str) -> None:
        """See RunLog."""
        warnings.warn(f"ratel: {text}", stacklevel=2)


def caller_config(
    settings: dict[str, object], storage: Sequence[str | Path], limits: Limits, names: Mapping[str, str]
) -> RunConfig:
    """The config with these settings, for a loop of one's own. `names`: arguments, by the keys of a config that have
    another name. Raises BadInput."""
    if isinstance(storage, str | Path) or not storage:
        raise BadInput("storage must be a list of directories, such as ['/mnt/a', '/mnt/b']")
    paths = [Path(each) for each in storage]
    for path in paths:
        if path.exists() and not path.is_dir():
            raise BadInput(f"storage: {path} is no directory")
    sizes = {"host_memory": limits.host_memory, "gpu_memory": limits.gpu_memory}
    return config_of_caller(
        {
            **settings,
            "storage": {"paths": paths},
            "limits": {name: size for name, size in sizes.items() if size is not None},
            "output_dir": paths[0],
        },
        names,
    )


def software() -> str:
    """The part of a store's identity that says what computed it."""
    return (
        f"ratel {ratel_version()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{_native.active_isa()}"
    )
