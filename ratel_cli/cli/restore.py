"""`ratel restore CONFIG`: a run's store made anew from its snapshot, for `ratel finetune` to go on from.

Called by `cli.app`. Nothing heavy is imported before the config is known to be good.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.find import find_run


def run(path: Path, overrides: Sequence[str], snapshot: Path | None, *, overwrite: bool) -> None:
    """Bring the state back. Raises RatelError."""
    log = RunLog()
    config = find_run(path, log, overrides)
    if snapshot is None:
        if config.storage.snapshot is None:
            raise BadInput(
                f"{path}: `storage.snapshot` is not set, so there is nothing to restore from",
                "name the snapshot's directory: --from DIR",
            )
        snapshot = config.storage.snapshot.path
    from ratel_cli.run.restore import restore

    step = restore(config, snapshot, overwrite=overwrite, log=log)
    command = " ".join(["ratel finetune", str(path) if path.is_file() else "CONFIG", *overrides])
    log.say(
        f"restored step {step} from {snapshot} to {', '.join(map(str, config.storage.paths))}; "
        f"`{command}` goes on from there"
    )
