"""`ratel finetune CONFIG`: reads the config, then hands over to the run.

Called by `cli.app`. Nothing heavy is imported before the config is known to be good, so that a typo
is answered at once.
"""

from __future__ import annotations

from pathlib import Path

from ratel_cli.config.load import load_config
from ratel_cli.config.schema import RunConfig
from ratel_cli.errors import BadInput
from ratel_cli.runlog import RunLog


def run(config_path: Path, overrides: list[str], resume: str, dry_run: bool) -> None:
    """Carry out one fine-tuning run from its configuration file. Raises RatelError."""
    log = RunLog()
    loaded = load_config(config_path, overrides)
    for notice in (*loaded.notices, *_not_carried_out(loaded.config)):
        log.notice(notice)
    if loaded.config.base_model is None:
        raise BadInput("`model_shape` is for `ratel plan` alone", "give `base_model` to train a model")
    from ratel_cli.cli.training_run import carry_out

    carry_out(loaded.config, log, resume=resume, dry_run=dry_run)


def _not_carried_out(config: RunConfig) -> list[str]:
    """Keys whose value has no effect yet, each told once."""
    notices = []
    if config.activations not in ("auto", "keep", "recompute", "static"):
        notices.append(
            f"activations: {config.activations} has no effect yet; everything but block inputs is recomputed"
        )
    if config.limits.gpu_memory is not None:
        notices.append("limits.gpu_memory has no effect yet; this version computes on the CPU")
    if config.cost_model != "ratel":
        notices.append("cost_model is for `ratel plan`")
    return notices
