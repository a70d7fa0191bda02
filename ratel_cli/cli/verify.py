"""`ratel verify RUN|DIR`: checks every byte of a run's store, and its export against the store; or a model's directory.

The table goes to stdout, everything else to stderr.

Invariants: nothing heavy is imported before the path is known to be a run or a directory; everything that was found is
reported; if anything is wrong, the exit code is 4.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.words.verify import check_lines, checks_to_json, raise_if_wrong
from ratel_cli.run.files.output import has_own_store, no_store
from ratel_cli.run.files.run_directory import find_run, is_output_of_run


def run(path: Path, *, as_json: bool) -> None:
    """Verify a run, or a directory with a model. Raises RatelError; IntegrityFailure after the table was printed."""
    log = RunLog()
    config = None if os.path.isdir(path) and not is_output_of_run(path) else find_run(path, log)
    from ratel_cli.run.ask.verify import verify_directory, verify_run

    if config is None:
        checks = verify_directory(path, log)
    elif os.path.isdir(path) and not has_own_store(config):
        why = no_store(config)
        log.notice(f"{why.message}; only the export is verified; for the store, {why.hint}")
        checks = verify_directory(path, log)
    else:
        checks = verify_run(config, log)
    if as_json:
        sys.stdout.write(json.dumps(checks_to_json(checks), indent=2) + "\n")
    else:
        page = RunLog(sys.stdout)
        for line in check_lines(checks):
            page.say(line)
    raise_if_wrong(checks)
