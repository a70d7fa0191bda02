"""The `ratel` command: its subcommands and options, and the only place where errors become lines and exit codes.

Each subcommand has a file of its own, which is imported when the command is called: `--help`, a wrong argument and a
wrong config are answered without importing torch.

Invariant: for every expected failure `main` returns the exit code of `errors`, without a traceback. An unexpected
failure is a bug: its trace goes to a file, and a line names that file.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer
from typer.exceptions import TyperException

from ratel_cli.closing import Closing
from ratel_cli.errors import BadInput, Interrupted, RatelError
from ratel_cli.training.stopping import STOPPED

EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
_MAX_STEP_DIGITS = 18

app = typer.Typer(
    name="ratel",
    help="Full fine-tuning of Hugging Face models that are larger than GPU memory and RAM, with their state on NVMe.",
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


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config to override.", show_default=False),
]


@app.callback()
def ratel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that belong to no subcommand."""


@app.command(
    help="Train the model that CONFIG describes. The result is a Hugging Face directory.",
    epilog="Example: ratel finetune configs/demo.yaml learning_rate=1e-5 storage.paths=[/mnt/a,/mnt/b]",
)
def finetune(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|no|STEP",
            help="auto: resume from the last committed step, if there is one. no: start over. "
            "STEP: go back to that saved step.",
        ),
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop. Nothing is written to the store.")
    ] = False,
) -> None:
    _check_resume(resume)
    from ratel_cli.cli import finetune as command

    command.run(config, overrides or [], resume, dry_run)


@app.command(
    help="Measure this machine: compute, memory and drives. With CONFIG, use its settings, and measure its model too.",
    epilog="Example: ratel profile --storage /mnt/a --storage /mnt/b -o hardware.json",
)
def profile(
    config: Annotated[Path | None, typer.Argument(help="The YAML file of a run.", show_default=False)] = None,
    storage: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="A directory on a drive to measure; repeat for each drive. Default: storage.paths, or the current "
            "directory.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the hardware file instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Also write the hardware file to FILE.", show_default=False
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if a profile is cached.")] = False,
) -> None:
    from ratel_cli.cli import profile as command

    command.run(config, storage or [], output, as_json=as_json, refresh=refresh)


@app.command(
    help="Predict whether a run fits, how long it takes and why, and what would help.",
    epilog="Example: ratel plan configs/models/gpt-70b.yaml --hardware configs/hardware/paper-4090-12ssd.yaml",
)
def plan(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.", show_default=False)],
    overrides: Overrides = None,
    hardware: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The hardware file of the machine to plan for. Default: this machine, as an earlier run or "
            "`ratel profile` measured it.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plot step time against offloaded bytes to FILE, .svg or .png.", show_default=False
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with what other systems would offload.")] = False,
    largest: Annotated[bool, typer.Option("--largest", help="Print the largest model that fits.")] = False,
    prices: Annotated[
        bool, typer.Option("--prices", help="Print price and speed for different numbers of SSDs.")
    ] = False,
) -> None:
    from ratel_cli.cli import plan as command
    from ratel_cli.run.plan_questions import Questions

    questions = Questions(compare=compare, largest=largest, prices=prices)
    command.run(config, overrides or [], hardware, plot, questions, as_json=as_json)


@app.command(
    help="Write a Hugging Face directory from a saved step of RUN.",
    epilog="Example: ratel export outputs/my-run --step 200 -o outputs/my-run-200",
)
def export(
    run: Annotated[Path, typer.Argument(help="A run: its output directory, or its config file.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to write.", show_default=False)
    ],
    step: Annotated[
        int | None, typer.Option(min=0, metavar="STEP", help="A saved step. Default: the last one.", show_default=False)
    ] = None,
) -> None:
    from ratel_cli.cli import export as command

    command.run(run, step, output)


@app.command(
    help="Check every byte of a run: its store against the checksums, and its export against the store. "
    "Or check the model in a directory.",
    epilog="Example: ratel verify outputs/my-run",
)
def verify(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|DIR",
            help="A run (its output directory, or its config file), or a directory with a model.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from ratel_cli.cli import verify as command

    command.run(run, as_json=as_json)


@app.command(
    help="Restore the store of a run from its snapshot.",
    epilog="Example: ratel restore my-run.yaml --from /mnt/backup/my-run",
)
def restore(
    config: Annotated[
        Path, typer.Argument(help="The YAML file of the run, or its output directory.", show_default=False)
    ],
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    with _Termination() as termination:
        try:
            code = _run(arguments)
        except KeyboardInterrupt:
            code = None
    if code is not None:
        return code
    _report_stop(STOPPED)
    return EXIT_TERMINATED if termination.received else EXIT_INTERRUPTED


class _Termination(Closing):
    """While it is open, SIGTERM ends a command as Ctrl-C does. `training.stopping` takes over while a store is used."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._interrupt)
        return self

    def close(self) -> None:
        """Install the earlier handler again. Idempotent."""
        # None: it was not installed from Python, so Python cannot install it again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt


def _run(arguments: Sequence[str] | None) -> int | None:
    """Run the command and report what went wrong. Returns the exit code; None if the command was interrupted."""
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="ratel", standalone_mode=False)
    except Interrupted as exc:
        _report_stop(exc.message)
        return exc.signal_exit_code
    except RatelError as exc:
        _report_error(exc)
        return exc.exit_code
    except TyperException as exc:
        _report_usage_error(exc)
        return EXIT_BAD_INPUT
    except Exception as exc:  # noqa: BLE001 - the last resort: every other kind is named above
        _report_bug(exc)
        return EXIT_BUG
    if code == EXIT_INTERRUPTED:
        return None  # typer returns this code for KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _check_resume(resume: str) -> None:
    if resume in ("auto", "no") or (resume.isascii() and resume.isdigit() and len(resume) <= _MAX_STEP_DIGITS):
        return
    raise BadInput(
        f"argument '--resume {resume}': must be `auto`, `no` or the number of a saved step",
        "--resume auto resumes from the last committed step, --resume no starts over",
    )


def _report(message: str, hint: str | None) -> None:
    from ratel_cli.console import RunLog

    RunLog().error(message, hint)


def _report_stop(message: str) -> None:
    """Print without `error:`, because the user asked for it."""
    from ratel_cli.console import RunLog

    RunLog().say(message)


def _report_error(error: RatelError) -> None:
    findings = (error, *error.others) if isinstance(error, BadInput) else (error,)
    for finding in findings:
        _report(finding.message, finding.hint)


def _report_usage_error(error: TyperException) -> None:
    message = error.format_message().rstrip(".")
    hint = "see ratel --help"
    if "No such option" in message:
        hint = "keys of the config are set without dashes: learning_rate=1e-5; see ratel finetune --help"
    _report(message[:1].lower() + message[1:], hint)


def _report_bug(error: Exception) -> None:
    trace = "".join(traceback.format_exception(error))
    first_line = (str(error).splitlines() or [""])[0]
    summary = f"this is a bug in Ratel: {type(error).__name__}: {first_line}".rstrip(": ")
    try:
        with tempfile.NamedTemporaryFile(prefix="ratel-trace-", suffix=".txt", delete=False) as file:
            file.write(trace.encode(errors="backslashreplace"))
    except OSError:
        sys.stderr.write(trace)
        _report(summary, None)
        return
    _report(summary, f"please report it with the trace in {file.name}")
