"""`ratel explain [KEY]`: what a key of the config means, or what one can ask."""

from __future__ import annotations

import json
import sys

import typer

from ratel_cli.config.describe import explain, explain_json, overview, overview_json
from ratel_cli.console import RunLog

_NARROW_INDENT = 2
"""Where a column would leave less than half of the terminal."""


def run(key: str | None, *, as_json: bool) -> None:
    """Print what `key` means; without one, what one can ask. On a terminal it is folded between words, in its column.
    Raises BadInput."""
    if as_json:
        typer.echo(json.dumps(overview_json() if key is None else explain_json(key), indent=2))
        return
    log = RunLog(sys.stdout)
    for line in overview() if key is None else explain(key):
        indent = line.indent if line.indent <= log.columns // 2 else _NARROW_INDENT
        log.remark(line.text, indent=indent)
