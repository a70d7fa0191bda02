"""`ratel finetune CONFIG`: reads the config, then hands over to the run.

Called by `cli.app`. Nothing heavy is imported before the config is known to be good, so that a typo
is answered at once.
"""

from __future__ import annotations

from pathlib import Path

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput


def run(config_path: Path, overrides: list[str], resume: str, dry_run: bool) -> None:
    """Carry out one fine-tuning run from its configuration file. Raises RatelError."""
    log = RunLog()
    loaded = load_config(config_path, overrides)
    for notice in loaded.notices:
        log.notice(notice)
    if loaded.config.cost_model != "ratel":
        log.notice("`cost_model` is for `ratel plan` alone; a run is planned as it will be carried out")
    if loaded.config.base_model is None:
        raise BadInput("`model_shape` is for `ratel plan` alone", "give `base_model` to train a model")
    from ratel_cli.run.finetune import run_finetune

    run_finetune(loaded.config, log, resume=resume, dry_run=dry_run)
