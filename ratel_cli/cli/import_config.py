"""`ratel import FILE`: the config of another trainer becomes one of ours.

Invariant: a file that exists is not replaced unless the user insists. If something is impossible, nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from ratel_cli.cli.arguments import check_option
from ratel_cli.commands import command
from ratel_cli.config.importing import import_config
from ratel_cli.console import RunLog
from ratel_cli.report.words.imported import import_rows
from ratel_cli.run.files.new_file import reject_existing, write_new


def run(path: Path, output: Path | None, *, overwrite: bool, as_json: bool) -> None:
    """Translate the config in `path`. Raises RatelError."""
    check_option("--overwrite", overwrite, only_with="-o FILE", is_met=output is not None)
    if output is not None:
        reject_existing(output, overwrite=overwrite)
    imported = import_config(path)
    log = RunLog()
    if output is not None:
        write_new(output, imported.text, overwrite=overwrite)
    if as_json:
        keys = [
            {
                "key": outcome.written,
                "value": outcome.value,
                "fate": outcome.fate,
                "ours": outcome.ours,
                "reason": outcome.reason,
                "line": outcome.where.line,
            }
            for outcome in imported.outcomes
        ]
        written = None if output is None else str(output)
        content = {"tool": imported.tool, "output": written, "config": imported.text, "keys": keys}
        typer.echo(json.dumps(content, indent=2))
        return
    log.facts(import_rows(imported.tool, imported.outcomes))
    if output is None:
        sys.stdout.write(imported.text)
    else:
        undecided = any(outcome.fate == "undecided" for outcome in imported.outcomes)
        then = "decide what it asks, then try" if undecided else "try"
        log.say(f"wrote {output}; {then} {command('check', output)}")
