"""The commands of the program, so that a new one cannot be forgotten."""

from __future__ import annotations

import typer

from ratel_cli.cli.app import app

TAKES_A_RUN = ("config", "run", "path", "places")
"""The names of the arguments."""


def commands_that_take_a_run() -> list[str]:
    """By the names of their arguments."""
    commands = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typer's type does not have them
    return sorted(
        name
        for name, command in commands.items()
        if any(each.param_type_name == "argument" and each.name in TAKES_A_RUN for each in command.params)
    )
