"""What of a machine a config's run would use, and so what is to be measured.

Called by `cli.profile`, which measures it, and by `cli.plan_inputs`, which looks whether that was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.cli.profile_cache import Subject
from ratel_cli.config.schema import RunConfig
from ratel_cli.movement.files import nearest_existing


def subject_of(config: RunConfig, storage: Sequence[Path] = ()) -> Subject:
    """As the config says; directories that are given go before its own."""
    return Subject(
        paths=tuple(storage) or tuple(nearest_existing(path) for path in config.storage.paths),
        dtype=config.dtype,
        device=config.device,
        engine=config.storage.engine,
    )
