"""Options of the commands about runs and the machine.

They are `restore`, `data`, `clean`, `status`, `report`, `env`, `doctor` and `bench`.

Each command imports its own file when it is called, so that `--help` and a wrong argument are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ratel_cli.cli.arguments import ConfigPath, Drives, Overrides, Places, RunPath

commands = typer.Typer()


@commands.command(
    help="Restore the store of a run from its snapshot.",
    epilog="Example: ratel restore my-run.yaml --from /mnt/backup/my-run",
)
def restore(
    config: ConfigPath,
    overrides: Overrides = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="The snapshot's directory. Default: storage.snapshot.path.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the store even if it is not older than the snapshot, belongs to another run, or cannot be "
            "opened.",
        ),
    ] = False,
) -> None:
    from ratel_cli.cli import restore as command

    command.run(config, overrides or [], snapshot, overwrite=overwrite)


@commands.command(
    help="Show what a run would train on. Prints samples, with the tokens that have loss marked, and "
    "counts of each dataset.",
    epilog="Example: ratel data my-run.yaml -n 3",
)
def data(
    config: ConfigPath,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option("-n", min=0, metavar="N", help="How many samples to show.")] = 5,
    bad: Annotated[
        bool, typer.Option("--bad", help="Show rejected rows, with the reasons, instead of samples.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    from ratel_cli.cli import data as command

    command.run(config, overrides or [], num_samples=samples, bad=bad, as_json=as_json)


@commands.command(
    help="Delete everything of RUN but its model. Lists store, snapshot and the files in run/, and asks first. With "
    "--store, delete only the store: the training state's files, without which the run cannot be resumed.",
    epilog="Example: ratel clean outputs/my-run --store",
)
def clean(
    run: RunPath,
    only_store: Annotated[
        bool, typer.Option("--store", help="Delete only the store; keep snapshot, metrics, plan and config.")
    ] = False,
    with_export: Annotated[bool, typer.Option("--output", help="Delete the exported model, too.")] = False,
    is_agreed: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    from ratel_cli.cli import clean as command

    command.run(run, only_store=only_store, with_export=with_export, is_agreed=is_agreed)


@commands.command(
    help="Show the progress of the runs below DIR, or of one run. Prints state, step, loss, speed, time left and disk.",
    epilog="Example: ratel status outputs",
)
def status(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|RUN",
            help="A directory with runs in it, or a run: its output directory, or its config file. "
            "Default: the current directory.",
            show_default=False,
        ),
    ] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    from ratel_cli.cli import status as command

    command.run(path, as_json=as_json)


@commands.command(
    help="Write a report of RUN as one HTML page. It has curves, plan and config. With "
    "--terminal, draw the curves in the terminal instead.",
    epilog="Example: ratel report outputs/my-run -o report.html",
)
def report(
    run: RunPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page to write. Default: run/report.html in the run's output directory.",
            show_default=False,
        ),
    ] = None,
    in_terminal: Annotated[bool, typer.Option("--terminal", help="Draw the curves in the terminal instead.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE even if it is no report.")] = False,
) -> None:
    from ratel_cli.cli import report as command

    command.run(run, output, in_terminal=in_terminal, overwrite=overwrite)


@commands.command(
    help="Print versions and hardware, for a bug report. It names no user, no path and no environment variable.",
    epilog="Example: ratel env my-run.yaml",
)
def env(
    places: Places = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    from ratel_cli.cli import env as command

    command.run(places or [], as_json=as_json)


@commands.command(
    help="Find what would slow a run down or break it on this machine. Says what to do, and changes nothing.",
    epilog="Example: ratel doctor my-run.yaml /mnt/a /mnt/b",
)
def doctor(
    places: Places = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    from ratel_cli.cli import doctor as command

    command.run(places or [], as_json=as_json)


@commands.command(
    help="Measure what a run costs on this machine, next to plain PyTorch on the same tokens. Takes about five "
    "minutes, downloads nothing, and removes what it writes.",
    epilog="Example: ratel bench --storage /mnt/a --storage /mnt/b --json > bench.json",
)
def bench(
    size: Annotated[
        Literal["tiny", "small", "1b"] | None,
        typer.Option(
            help="The model to train. Default: 1b with a GPU, small without one. tiny shows that the command works, "
            "no more.",
            show_default=False,
        ),
    ] = None,
    storage: Drives = None,
    seconds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Begin no round that would end later; one is always run.")
    ] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, and the table on stderr.")] = False,
) -> None:
    from ratel_cli.cli import bench as command

    command.run(size, storage or [], seconds=seconds, as_json=as_json)
