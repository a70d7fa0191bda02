"""`ratel report RUN`: one HTML page about a run, or the same curves in the terminal.

The curves of `--terminal` go to stdout, everything else to stderr.

Invariant: a file that is not a report is replaced only with `--overwrite`, and a page appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.report.page.page import page_of
from ratel_cli.run.ask.report import report_of
from ratel_cli.run.files.new_file import check_place
from ratel_cli.run.files.run_directory import REPORT_NAME, find_run, is_output_of_run, run_directory
from ratel_cli.run.files.run_files import is_report, is_run_output, list_run_files


def run(path: Path, output: Path | None, *, in_terminal: bool, overwrite: bool) -> None:
    """Report on the run that `path` names. Raises RatelError."""
    if in_terminal and (output is not None or overwrite):
        given = "--overwrite" if output is None else f"-o {output}"
        raise BadInput(f"arguments '--terminal' and '{given}': --terminal writes no file", "leave out one of them")
    log = RunLog()
    config = find_run(path, log)
    if not is_output_of_run(config.output_dir):
        raise BadInput(f"there is nothing to report: {config.output_dir} has no run in it", "the run has not begun")
    target = output or run_directory(config.output_dir) / REPORT_NAME
    if not in_terminal:
        _check(target, overwrite=overwrite)
        if output is None and not is_run_output(config.output_dir):
            raise BadInput(f"Ratel did not make {config.output_dir}", "write the report elsewhere with -o FILE")
    report = report_of(config)
    if in_terminal:
        from ratel_cli.report.page.terminal import report_lines

        page = RunLog(sys.stdout)
        for line in report_lines(report, width=shutil.get_terminal_size().columns):
            page.say(line)
        return
    _write(target, page_of(report), of_run=None if output is not None else config.output_dir)
    log.say(f"wrote {target}")


def _check(target: Path, *, overwrite: bool) -> None:
    """Raise BadInput unless the report may be written to `target`."""
    check_place(target)
    if os.path.lexists(target) and not overwrite and not is_report(target):
        raise BadInput(
            f"{target}: the file exists, and it is not a report", "name another file, or replace it with --overwrite"
        )


def _write(target: Path, text: str, *, of_run: Path | None) -> None:
    """Put the page in its place, whole. `of_run`: the output directory whose file it is. Raises EnvironmentFailure."""
    made: Path | None = None
    try:
        if of_run is not None:
            list_run_files(of_run, [REPORT_NAME])
        with open(target.with_name(f".ratel-{os.getpid()}.html"), "x", encoding="utf-8") as file:  # by the umask
            made = Path(file.name)
            file.write(text)
        os.replace(made, target)
    except OSError as error:
        if made is not None:
            with suppress(OSError):
                made.unlink()
        hint = "write it elsewhere with -o FILE"
        raise EnvironmentFailure(f"{target}: cannot be written: {error.strerror}", hint) from error
