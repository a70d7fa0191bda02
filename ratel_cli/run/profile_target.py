"""What of a machine a config's run would use, and so what is to be measured.

Called by `cli.profile`, which measures it, and by `run.plan_inputs`, which looks whether that was done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.config.schema import RunConfig
from ratel_cli.io.files import nearest_existing
from ratel_cli.run.profile_cache import ProfileTarget


def profile_target(config: RunConfig, storage: Sequence[Path] = ()) -> ProfileTarget:
    """As the config says; directories that are given go before its own."""
    return ProfileTarget(
        paths=tuple(storage) or tuple(nearest_existing(path) for path in config.storage.paths),
        dtype=config.dtype,
        device=config.device,
        engine=config.storage.engine,
    )
