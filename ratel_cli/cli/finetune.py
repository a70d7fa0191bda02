"""`ratel finetune CONFIG`: reads the config, then runs it.

Invariant: nothing heavy is imported before the config is known to be right, so a typo is answered at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ratel_cli.cli.arguments import check_option
from ratel_cli.console import RankLog, RunLog
from ratel_cli.engine.ranks.launched import RanksEnded, launched_rank, see_own_gpu
from ratel_cli.errors import BadInput, ErrorList
from ratel_cli.run.files.origin import check_origin, find_origin
from ratel_cli.run.files.output import finish_export
from ratel_cli.run.files.run_directory import read_config
from ratel_cli.run.train.first_checks import check_can_train, check_first
from ratel_cli.run.train.start import GoBack, Start


def run(
    path: Path,
    overrides: Sequence[str],
    start: Start,
    *,
    dry_run: bool,
    overwrite: bool,
    origin: str | None,
    fresh_optimizer: bool,
    ranks: tuple[int, Sequence[str]] | None = None,
) -> None:
    """Run the config in `path`, from the step of another run if `origin` names one. `ranks`: in how many that are
    started, and with which arguments; None: in this process. Raises RatelError."""
    check_option("--fresh-optimizer", fresh_optimizer, only_with="--from RUN", is_met=origin is not None)
    if origin is not None and isinstance(start, GoBack):
        raise BadInput(
            f"arguments '--from' and '--resume {start.step}': a run that starts from another one has no step to go "
            "back to",
            "name the other run's step with --from RUN@STEP",
        )
    see_own_gpu()
    rank = launched_rank()
    starts_ranks = ranks is not None and ranks[0] > 1
    log = RankLog(rank) if rank or starts_ranks else RunLog()
    config = read_config(path, log, overrides)
    check_can_train(config, log.notice)
    errors = ErrorList()
    check_first(config, errors, has_origin=origin is not None, overwrite=overwrite)
    errors.raise_all()
    found = None if origin is None else find_origin(origin, log, fresh_optimizer=fresh_optimizer)
    if found is not None:
        check_origin(config, found)
    if not dry_run and not rank:
        finish_export(config.output_dir, log, option="output_dir")
    if ranks is not None and starts_ranks:
        from ratel_cli.cli.launch import launch

        raise RanksEnded(launch(*ranks))
    from ratel_cli.run.train.finetune import run_finetune

    run_finetune(config, log, start=start, dry_run=dry_run, overwrite=overwrite, origin=found)
