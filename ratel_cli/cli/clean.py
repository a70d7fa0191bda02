"""`ratel clean RUN`: lists what a run has left besides its model, or its store alone, asks, and deletes exactly that.

The list goes to stdout, everything else to stderr.

Invariant: without a terminal and without `--yes` nothing is deleted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.run.files.clean import Extent, delete, find_left_files
from ratel_cli.run.files.run_directory import find_run, run_directory
from ratel_cli.units import counted, format_bytes


def run(path: Path, *, only_store: bool, with_export: bool, is_agreed: bool) -> None:
    """Delete what the run has left. Raises RatelError; BadInput if nobody can be asked."""
    if only_store and with_export:
        raise BadInput("arguments '--store' and '--output': --store keeps the model", "leave out one of them")
    extent: Extent = "store" if only_store else "export" if with_export else "run"
    log = RunLog()
    left = find_left_files(find_run(path, log), extent)
    for reason in left.kept:
        log.notice(f"kept: {reason}")
    if not left.files:
        log.say("there is nothing to delete")
        return
    page = RunLog(sys.stdout)
    for file in left.files:
        page.say(f"{format_bytes(file.lstat().st_size):>10}  {file}")
    output_dir = left.config.output_dir
    if left.step and not left.is_exported:
        log.warn(
            f"{output_dir} has no export of step {left.step}: deleting the store deletes its weights; "
            f"export them first: {command('export', path, '-o', 'DIR')}"
        )
    what = f"{counted(len(left.files), 'file')}, {format_bytes(left.num_bytes)}"
    if not is_agreed:
        if not (sys.stdin.isatty() and log.is_terminal):
            raise BadInput(f"nothing was deleted ({what}): there is no terminal to ask on", "add --yes")
        log.say(f"delete {what}? The run cannot be resumed then. [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            log.say("nothing was deleted")
            return
    delete(left)
    log.say(
        f"deleted {what}" + (f"; metrics, plan and config stay in {run_directory(output_dir)}" if only_store else "")
    )
