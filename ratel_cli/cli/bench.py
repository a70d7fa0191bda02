"""`ratel bench`: what a run costs on this machine, next to plain PyTorch on the same tokens.

The table goes to stdout, or the JSON and the table to stderr; everything else goes to stderr. Invariants: nothing heavy
is imported before the arguments are known to be right, and nothing that is written remains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ratel_cli.cli.arguments import check_directories
from ratel_cli.console import RunLog
from ratel_cli.report.words.bench import bench_lines


def run(size: str | None, storage: Sequence[Path], *, seconds: int, as_json: bool) -> None:
    """Measure, and print what was found. Raises RatelError."""
    check_directories("--storage", storage)
    from ratel_cli.run.ask.bench import run_bench

    found = run_bench(size, storage or [Path.cwd()], RunLog(), seconds=seconds)
    (sys.stderr if as_json else sys.stdout).write("\n".join(bench_lines(found)) + "\n")
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=2) + "\n")
