"""Runs the loop with its fakes and prints, as JSON, what each output shows of its steps.

python tests/report/everywhere.py PACKAGE_PARENT DIRECTORY
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

from ratel_cli.console import RunLog
from ratel_cli.report.page.page import page_of
from ratel_cli.report.page.step_curves import step_curves
from ratel_cli.report.page.terminal import report_lines
from ratel_cli.report.words.panel import Panel
from ratel_cli.report.words.run import step_line
from ratel_cli.report.words.status import status_lines, status_to_json
from ratel_cli.run.ask.report import report_of
from ratel_cli.run.files.run_directory import find_run
from ratel_cli.run.train.tracker_child import values_of
from ratel_cli.run.train.trackers import FIGURE_NAMES
from ratel_cli.training.history import read_history
from ratel_cli.training.metrics_log import line_of
from tests.report.recorded import write_run
from tests.report.test_panel import FACTS
from tests.training.loop_fakes import Run


def main(directory: Path) -> None:
    """Make a run below `directory` and show it."""
    output = write_run(directory / "out", [])
    steps = Run().run_all()
    path = output / "run" / "metrics.jsonl"
    path.write_bytes(b"".join(map(line_of, steps)))
    report = report_of(find_run(output, RunLog(StringIO())))
    panel = Panel(FACTS, predicted_seconds=1.0)
    for each in steps:
        panel.show(each)
    json.dump(
        {
            "lines of metrics": path.read_text().splitlines(),
            "read back": [str(each) for each in read_history(path).steps],
            "step line": step_line(steps[-1], 4),
            "panel": [line.plain for line in panel.lines(80)],
            "status": status_lines([report.status], now=datetime.now(UTC)),
            "status JSON": status_to_json([report.status]),
            "page": page_of(report),
            "terminal": report_lines(report, width=100),
            "picture": [each.caption for each in step_curves(report.steps)],
            "tracker": values_of(json.loads(line_of(steps[-1])), FIGURE_NAMES),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
