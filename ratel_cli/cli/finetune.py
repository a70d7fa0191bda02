"""`ratel finetune CONFIG`: reads the config, then runs it.

Invariant: nothing heavy is imported before the config is known to be right, so a typo is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.run_directory import read_config


def run(path: Path, overrides: Sequence[str], resume: str, dry_run: bool) -> None:
    """Run the config in `path`. Raises RatelError."""
    log = RunLog()
    config = read_config(path, log, overrides)
    if config.cost_model != "ratel":
        log.notice("`cost_model` is only for `ratel plan`; a run is always planned with `cost_model: ratel`")
    if config.base_model is None:
        raise BadInput("`model_shape` is only for `ratel plan`", "set `base_model` to train a model")
    from ratel_cli.run.finetune import run_finetune

    run_finetune(config, log, resume=resume, dry_run=dry_run)
