"""`ratel check CONFIG`: everything that is wrong about a run, at once; nothing is written but caches.

What would run goes to stdout, everything else to stderr.

Invariants: the exit code is that of `finetune --dry-run`; what is wrong with the config is printed before anything
heavy is imported to look at the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import typer

from ratel_cli.commands import command, name_run
from ratel_cli.config.load import examine_config
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.report.words.check import CheckReport, ReportedError
from ratel_cli.run.ask.check import check_run, config_errors
from ratel_cli.run.files.run_directory import config_file


def run(path: Path, overrides: Sequence[str], *, as_json: bool) -> None:
    """Check the config in `path`. Raises RatelError with all that is wrong."""
    name_run(path, overrides)
    printed: tuple[ReportedError, ...] = ()
    try:
        reading = examine_config(config_file(path), overrides)
    except BadInput as error:
        reported = ReportedError(place=None, key=None, message=error.message, hint=error.hint)
        report = CheckReport(errors=(reported,), exit_code=error.exit_code)
    else:
        printed, log = config_errors(reading), RunLog()
        for each in printed:
            log.error(each.text, each.hint)
        report = check_run(reading, path=path, overrides=overrides)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), indent=2) + "\n")
    _raise(report, printed)
    if not as_json:
        page = RunLog(sys.stdout)
        page.facts(report.rows)
        page.say(f"no errors; {command('finetune', path, *overrides)} runs it")


def _raise(report: CheckReport, printed: Collection[ReportedError]) -> None:
    """Raise all errors that are not `printed` yet as one. Without errors: do nothing."""
    kind = BadInput if report.exit_code == BadInput.exit_code else EnvironmentFailure
    errors = [kind(each.text, each.hint) for each in report.errors if each not in printed]
    if errors:
        first, *others = errors
        first.others = tuple(others)
        raise first
    if printed:
        raise typer.Exit(report.exit_code)
