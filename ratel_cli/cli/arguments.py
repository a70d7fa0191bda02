"""Arguments and options that several commands have. Each means the same in all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ratel_cli.errors import BadInput

A_RUN = "A run: its config file, or its output directory."

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help=A_RUN, show_default=False)]
"""What `find_run` reads."""


ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help=A_RUN, show_default=False)]
"""What `read_config` reads."""


Places = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN|DIR",
        help="Runs (their config files, or output directories), and directories on drives to look at. KEY=VALUE "
        "arguments change the runs' configs. Default: the current directory.",
        show_default=False,
    ),
]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys of the config to override.", show_default=False),
]


ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN|DIR",
        help="A run (its output directory, or its config file), or a directory with a model.",
        show_default=False,
    ),
]


Drives = Annotated[
    list[Path] | None,
    typer.Option(
        "--storage",
        metavar="DIR",
        help="A directory on a drive to use; repeat for each drive. Default: storage.paths where a config is given, "
        "else the current directory.",
        show_default=False,
    ),
]
"""What `check_directories` checks."""


SavedStep = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="STEP",
        help="A saved step. Default: the last or, with load_best_model_at_end, the best one.",
        show_default=False,
    ),
]


Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Write into a directory that has other files in it. Files with the names of the model's are replaced.",
    ),
]


ReplaceFile = Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it exists.")]


def check_directories(option: str, paths: Sequence[Path]) -> None:
    """Raise BadInput, with all of them, for values of an option that are no directories."""
    # os.path, because the methods of Path raise for names that are too long.
    wrong = [
        BadInput(f"argument '{option} {path}': there is no such directory") for path in paths if not os.path.isdir(path)
    ]
    if wrong:
        raise BadInput(wrong[0].message, others=tuple(wrong[1:]))


def command_line(context: typer.Context, *, without: str) -> list[str]:
    """The command that runs, with all its arguments, but for the option `without`: what starts it again elsewhere."""
    options, positional = list[str](), list[str]()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value is None or value is False or without in parameter.opts:
            continue
        values = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
        if parameter.param_type_name == "argument":
            positional += values
        else:
            option = max(parameter.opts, key=len)
            before_value = f"{option}=" if option.startswith("--") else option
            options += [option] if value is True else [before_value + each for each in values]
    return [context.command.name or "", *options, "--", *positional]


def check_option(option: str, is_given: bool, *, only_with: str, is_met: bool) -> None:
    """Raise BadInput if an option is given that does nothing without another one."""
    if is_given and not is_met:
        raise BadInput(f"argument '{option}': it belongs to {only_with}", f"add {only_with}, or leave out {option}")
