"""`ratel restore CONFIG`: replaces a run's lost or damaged store by its snapshot, so that the run can resume.

Invariant: nothing heavy is imported before the config is known to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.run_directory import find_run, store_at


def run(path: Path, overrides: Sequence[str], snapshot: Path | None, *, overwrite: bool) -> None:
    """Restore the store of the run that `path` names. Raises RatelError."""
    log = RunLog()
    config = find_run(path, log, overrides)
    if snapshot is None:
        if config.storage.snapshot is None:
            raise BadInput(
                f"{path}: `storage.snapshot` is not set, so there is nothing to restore from",
                "give the snapshot's directory: --from DIR",
            )
        snapshot = config.storage.snapshot.path
    from ratel_cli.run.train.restore import restore

    step = restore(config, snapshot, overwrite=overwrite, log=log)
    resumes = command("finetune", path, *overrides)
    log.say(f"restored step {step} from {snapshot} to {store_at(config)}; {resumes} resumes from it")
