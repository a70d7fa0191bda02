"""`ratel doctor [RUN|DIR ...]`: is this machine fit for a run, and what would make it faster?

The table goes to stdout, everything else to stderr.

Invariants: nothing heavy is imported before the arguments are known to be right; everything that was found is reported;
if anything is broken, the exit code is 3.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.report.words.doctor import diagnoses_to_json, diagnosis_lines, raise_if_broken
from ratel_cli.run.files.places import find_places


def run(arguments: Sequence[Path], *, as_json: bool) -> None:
    """Examine the machine and the directories. Raises RatelError; EnvironmentFailure after the table was printed."""
    log = RunLog()
    places = find_places(arguments, log)
    from ratel_cli.run.ask.doctor import examine

    diagnoses = examine(places, log, files=SystemFiles())
    if as_json:
        sys.stdout.write(json.dumps(diagnoses_to_json(diagnoses), indent=2) + "\n")
    else:
        page = RunLog(sys.stdout)
        for line in diagnosis_lines(diagnoses):
            page.say(line)
    raise_if_broken(diagnoses)
