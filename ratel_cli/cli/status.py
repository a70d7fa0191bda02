"""`ratel status [DIR]`: the runs below a directory, or one run: state, step, loss, speed, time left, disk.

The table goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.words.status import status_lines, status_to_json
from ratel_cli.run.ask.status import MOST_LEVELS, find_statuses


def run(path: Path, *, as_json: bool) -> None:
    """Print the status of each run. Raises BadInput if there is no such directory or run."""
    log = RunLog()
    runs = find_statuses(path, log)
    for each in runs:
        if each.problem is not None:
            log.warn(each.problem)
    if as_json:
        sys.stdout.write(json.dumps(status_to_json(runs), indent=2) + "\n")
        return
    if not runs:
        log.say(f"there is no run in {path}, nor in the folders below it, {MOST_LEVELS} levels deep")
        return
    page = RunLog(sys.stdout)
    for line in status_lines(runs, now=datetime.now().astimezone()):
        page.say(line)
