"""`ratel explain KEY`: what a key of the config means."""

from __future__ import annotations

import json
import re
import sys

import typer

from ratel_cli.config.describe import explain, explain_json
from ratel_cli.console import RunLog

_INDENT = 2
_COLUMN = re.compile(r"  [\w.]+  +")
"""What is left of the meaning of a section's key."""


def run(key: str, *, as_json: bool) -> None:
    """Print what `key` means. On a terminal it is folded between words, in its column. Raises BadInput."""
    if as_json:
        typer.echo(json.dumps(explain_json(key), indent=2))
        return
    log = RunLog(sys.stdout)
    for line in explain(key).split("\n"):
        column = _COLUMN.match(line)
        indent = column.end() if column is not None and column.end() <= log.columns // 2 else _INDENT
        log.remark(line, indent=indent)
