"""`ratel env [RUN|DIR ...]`: versions and hardware, for a report of a bug.

Invariant: nothing heavy is imported, so it works where torch does not; and nothing private is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.words.environment import environment_rows
from ratel_cli.run.ask.environment import environment_of
from ratel_cli.run.files.places import find_places


def run(arguments: Sequence[Path], *, as_json: bool) -> None:
    """Print what this machine is. Raises BadInput."""
    found = environment_of(find_places(arguments, RunLog()).paths)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2) + "\n")
    else:
        RunLog(sys.stdout).facts(environment_rows(found))
