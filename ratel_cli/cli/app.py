"""The `ratel` command: its subcommands, and the one place where errors become lines and exit codes.

Entry point of the package (`ratel`, `python -m ratel_cli`). Each subcommand lives in a file of its
own, imported when it is called: `--help`, a wrong argument and a wrong config never import torch.

Invariant: `main` returns the exit codes of `errors` for every expected failure, without a traceback;
an unexpected one is a bug, and its trace goes to a file whose path is told.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Self

import typer
from typer.exceptions import TyperException

from ratel_cli.errors import BadInput, Interrupted, RatelError
from ratel_cli.training.stopping import STOPPED

EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_MAX_STEP_DIGITS = 18

app = typer.Typer(
    name="ratel",
    help="Full fine-tuning of Hugging Face models that are larger than GPU and main memory, with their state on NVMe.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        number = version("ratel-cli")
    except PackageNotFoundError:
        number = "(not installed)"
    typer.echo(f"ratel {number}")
    raise typer.Exit


@app.callback()
def ratel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Holds the options that belong to no subcommand; with it, a single subcommand keeps its name."""


@app.command(
    help="Train the model that CONFIG describes, and leave a Hugging Face directory.",
    epilog="Example: ratel finetune configs/demo.yaml learning_rate=1e-5 storage.paths=[/mnt/a,/mnt/b]",
)
def finetune(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config to set otherwise.", show_default=False),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|no|GENERATION",
            help="auto: go on from the last committed step, if there is one. no: start again. "
            "GENERATION: go back to that saved step.",
        ),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the opening statement.")] = False,
) -> None:
    _check_resume(resume)
    from ratel_cli.cli import finetune as command

    command.run(config, overrides or [], resume, dry_run)


@app.command(
    help="Measure what this machine can do for a run: compute, memory, drives. CONFIG says where and in which dtype.",
    epilog="Example: ratel profile --storage /mnt/a --storage /mnt/b -o hardware.json",
)
def profile(
    config: Annotated[Path | None, typer.Argument(help="The YAML file of a run.", show_default=False)] = None,
    storage: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A directory to measure, once for each drive. Default: those of CONFIG, or this one.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the hardware file instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the hardware file.", show_default=False),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if it was measured before.")] = False,
) -> None:
    from ratel_cli.cli import profile as command

    command.run(config, storage or [], output, as_json=as_json, refresh=refresh)


@app.command(
    help="Say whether the run that CONFIG describes fits, how long it takes and why, and what would help.",
    epilog="Example: ratel plan configs/models/gpt-70b.yaml --hardware configs/hardware/paper-4090-12ssd.yaml",
)
def plan(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config to set otherwise.", show_default=False),
    ] = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plan for the machine that this file describes. Default: this one, as the run or `ratel profile` "
            "measured it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curve as a picture, .svg or .png.", show_default=False),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with what other systems would swap.")] = False,
    largest: Annotated[bool, typer.Option("--largest", help="Tell the largest model that fits.")] = False,
    prices: Annotated[bool, typer.Option("--prices", help="Tell what a price buys, by number of SSDs.")] = False,
) -> None:
    from ratel_cli.cli import plan as command
    from ratel_cli.run.plan_questions import Questions

    questions = Questions(compare=compare, largest=largest, prices=prices)
    command.run(config, overrides or [], hardware, plot, questions, as_json=as_json)


@app.command(
    help="Write a Hugging Face directory from a step that the store of RUN keeps.",
    epilog="Example: ratel export outputs/my-run --step 200 -o outputs/my-run-200",
)
def export(
    run: Annotated[Path, typer.Argument(help="A run: its output directory, or its config file.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to write.", show_default=False)
    ],
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="STEP", help="A saved step. Default: the last one.", show_default=False),
    ] = None,
) -> None:
    from ratel_cli.cli import export as command

    command.run(run, step, output)


@app.command(
    help="Check every byte that RUN has left: its store's checksums, and its export against the store. Or check the "
    "model in a directory.",
    epilog="Example: ratel verify outputs/my-run",
)
def verify(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run: its output directory, or its config file. Or a directory with a model.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    from ratel_cli.cli import verify as command

    command.run(run, as_json=as_json)


@app.command(
    help="Make the store of the run that CONFIG describes anew from its snapshot.",
    epilog="Example: ratel restore my-run.yaml --from /mnt/backup/my-run",
)
def restore(
    config: Annotated[
        Path, typer.Argument(help="The YAML file of the run, or its output directory.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config to set otherwise.", show_default=False),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="The snapshot. Default: storage.snapshot.path.", show_default=False),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a store that is as new as the snapshot, or damaged.")
    ] = False,
) -> None:
    from ratel_cli.cli import restore as command

    command.run(config, overrides or [], snapshot, overwrite=overwrite)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    with _Termination() as termination:
        try:
            code = _run(arguments)
        except KeyboardInterrupt:
            code = None
    if code is not None:
        return code
    _tell_stop(STOPPED)
    return EXIT_TERMINATED if termination.received else EXIT_INTERRUPTED


class _Termination:
    """SIGTERM ends a command as Ctrl-C does, wherever it is. While a store is written, `training.stopping` listens."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # None: it was not set from Python, and cannot be set back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> int | None:
    """The exit code, when what went wrong has been told. None: the command was interrupted."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="ratel", standalone_mode=False)
    except Interrupted as exc:
        _tell_stop(exc.message)
        return exc.signal_exit_code
    except RatelError as exc:
        _tell_error(exc)
        return exc.exit_code
    except TyperException as exc:
        _tell_usage_error(exc)
        return EXIT_BAD_INPUT
    except Exception as exc:  # noqa: BLE001 - the last resort: every other kind is named above
        _tell_bug(exc)
        return EXIT_BUG
    if code == EXIT_INTERRUPTED:
        return None  # as typer has it
    return code if isinstance(code, int) else 0


def _check_resume(resume: str) -> None:
    if resume in ("auto", "no") or (resume.isascii() and resume.isdigit() and len(resume) <= _MAX_STEP_DIGITS):
        return
    raise BadInput(
        f"argument '--resume {resume}': must be `auto`, `no` or the number of a saved step",
        "write --resume auto to go on, --resume no to start again",
    )


def _tell(message: str, hint: str | None) -> None:
    from ratel_cli.console import RunLog

    RunLog().error(message, hint)


def _tell_stop(message: str) -> None:
    """No error: the user asked for it."""
    from ratel_cli.console import RunLog

    RunLog().say(message)


def _tell_error(error: RatelError) -> None:
    findings = (error, *error.others) if isinstance(error, BadInput) else (error,)
    for finding in findings:
        _tell(finding.message, finding.hint)


def _tell_usage_error(error: TyperException) -> None:
    message = error.format_message().rstrip(".")
    hint = "see ratel --help"
    if "No such option" in message:
        hint = "keys of the config are set without dashes: learning_rate=1e-5; see ratel finetune --help"
    _tell(message[:1].lower() + message[1:], hint)


def _tell_bug(error: Exception) -> None:
    trace = "".join(traceback.format_exception(error))
    first_line = (str(error).splitlines() or [""])[0]
    summary = f"this is a bug in Ratel: {type(error).__name__}: {first_line}".rstrip(": ")
    try:
        with tempfile.NamedTemporaryFile(prefix="ratel-trace-", suffix=".txt", delete=False) as file:
            file.write(trace.encode(errors="backslashreplace"))
    except OSError:
        sys.stderr.write(trace)
        _tell(summary, None)
        return
    _tell(summary, f"please report it with the trace in {file.name}")
