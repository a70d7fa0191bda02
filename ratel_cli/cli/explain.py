"""`ratel explain KEY`: what a key of the config means."""

from __future__ import annotations

import json

import typer

from ratel_cli.config.describe import explain, explain_json


def run(key: str, *, as_json: bool) -> None:
    """Print what `key` means. Raises BadInput."""
    typer.echo(json.dumps(explain_json(key), indent=2) if as_json else explain(key))
