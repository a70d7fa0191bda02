"""`ratel data CONFIG`: samples with the tokens that have loss marked, counts of each dataset, and rejected rows.

The content goes to stdout, everything else to stderr. Invariant: nothing heavy is imported before the config is known
to be right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.words.data import data_to_json, reject_lines, sample_title, set_lines, summary_rows
from ratel_cli.run.files.run_directory import find_run

_MOST_REJECTS = 1000


def run(path: Path, overrides: Sequence[str], *, num_samples: int, bad: bool, as_json: bool) -> None:
    """Show the data of the config in `path`. Raises RatelError; what is known about rejected rows is shown before."""
    log = RunLog()
    config = find_run(path, log, overrides)
    from ratel_cli.run.ask.data import RowsRejected, inspect_data

    page = RunLog(sys.stdout)
    try:
        report = inspect_data(
            config, log, num_samples=0 if bad and not as_json else num_samples, num_rejects=_MOST_REJECTS
        )
    except RowsRejected as error:
        if bad and not as_json:
            for line in reject_lines(error.rejects):
                page.say(line)
        raise
    if as_json:
        sys.stdout.write(json.dumps(data_to_json(report), indent=2) + "\n")
        return
    for line in reject_lines(report.rejects) if bad else ():
        page.say(line)
    for sample in report.samples:
        page.say(sample_title(sample))
        page.marked(sample.parts)
        page.say("")
    for line in set_lines(report.sets, report.test_sets):
        page.say(line)
    page.say("")
    page.facts(summary_rows(report))
