"""The `ratel` command: its groups of subcommands, and the only place where errors become lines and exit codes.

A subcommand's options are in the file of its group, in the order in which `ratel --help` shows them; a new one goes
there. What it does has a file of its own, which is imported when the command is called: `--help`, a wrong argument and
a wrong config are answered without importing torch.

Invariant: for every expected failure `main` returns the exit code of `errors`, without a traceback. An unexpected
failure is a bug: its trace goes to a file, and a line names that file. A command whose output nobody reads any more
ends without a message.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from threading import Timer
from types import FrameType
from typing import Annotated, Self

import typer
from typer.exceptions import TyperException

from ratel_cli.cli import config_commands, model_commands, training_commands, upkeep_commands
from ratel_cli.closing import Closing
from ratel_cli.commands import forget_run
from ratel_cli.engine.ranks.launched import RanksEnded, launched_rank
from ratel_cli.errors import EnvironmentFailure, Interrupted, RatelError
from ratel_cli.neighbours import (
    broken_package,
    can_start_without,
    leave_out,
    left_out,
    missed_package,
    needs_package,
    start_without,
)
from ratel_cli.training.stopping import STOPPED

EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_CLOSED = 141
"""128 + SIGPIPE: what a shell reports of a program that this signal ends."""
EXIT_TERMINATED = 143
_AGAIN_SECONDS = 0.01
"""Seconds until a signal is sent again."""

app = typer.Typer(
    name="ratel",
    help="Fine-tunes Hugging Face models that are larger than GPU memory and RAM: all weights, or an adapter (LoRA, "
    "QLoRA), with their state on NVMe.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from ratel_cli.run.files.user_cache import ratel_version

    typer.echo(f"ratel {ratel_version()}")
    raise typer.Exit


@app.callback()
def ratel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hold the options that belong to no subcommand."""


for _group in (training_commands, config_commands, model_commands, upkeep_commands):
    app.add_typer(_group.commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _replace_what_cannot_be_shown()
    forget_run()
    with _Termination() as termination:
        try:
            code = _run(arguments)
        except KeyboardInterrupt:
            code = None
    _ignore_interrupts(arguments)
    if code is not None:
        return code
    _report_stop(STOPPED)
    return EXIT_TERMINATED if termination.received else EXIT_INTERRUPTED


def _ignore_interrupts(arguments: Sequence[str] | None) -> None:
    """From now on Ctrl-C does nothing if the process ends with its command. Torch then closes what it has, and Python
    would print the trace of an interrupt."""
    if arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _replace_what_cannot_be_shown() -> None:
    """From now on, print `?` for a character that the encoding of the output does not have, and nothing where stderr is
    closed. A file that took a closed descriptor would get what libraries print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Termination(Closing):
    """While it is open, SIGTERM ends a command as Ctrl-C does. `training.stopping` takes over while a store is used.

    Where the interpreter cannot raise, as in `__del__`, it prints what was raised and goes on. The command would run to
    its end, so a signal that comes there is sent again.
    """

    def __init__(self) -> None:
        self.received = False
        self._again: Timer | None = None

    def __enter__(self) -> Self:
        self._previous_hook = sys.unraisablehook
        sys.unraisablehook = self._raise_again
        self._previous = signal.signal(signal.SIGTERM, self._interrupt)
        return self

    def close(self) -> None:
        """Install the earlier handlers again. Idempotent."""
        self._drop_timer()
        sys.unraisablehook = self._previous_hook
        # None: it was not installed from Python, so Python cannot install it again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        raise KeyboardInterrupt

    def _raise_again(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._previous_hook(unraisable)
            return
        while True:
            try:
                self._start_timer()
            except KeyboardInterrupt:  # of another signal, while the timer was being started
                continue
            return

    def _start_timer(self) -> None:
        """Send the signal again a little later, from a thread: here, nothing can be raised either."""
        self._drop_timer()
        number = signal.SIGTERM if self.received else signal.SIGINT
        self._again = Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        self._again.start()

    def _drop_timer(self) -> None:
        """Wait until no timer can send a signal any more, which would come to whatever runs then."""
        if self._again is not None and self._again.ident is not None:
            self._again.cancel()
            self._again.join()


def _run(arguments: Sequence[str] | None) -> int | None:
    """Run the command and report what went wrong. Returns the exit code; None if the command was interrupted."""
    try:
        code = _run_command(arguments)
    except (BrokenPipeError, SystemExit) as ended:
        # rich and typer end the process for a broken pipe of any kind; typer also when it has completed a word.
        cause = ended.__context__ if isinstance(ended, SystemExit) else ended
        if not isinstance(cause, BrokenPipeError):
            raise
        if _discard_unread_output():
            return EXIT_OUTPUT_CLOSED
        _report_bug(cause)
        return EXIT_BUG
    return code


def _run_command(arguments: Sequence[str] | None) -> int | None:
    try:
        code = _called(arguments)
        _flush_output()
    except BrokenPipeError:
        raise
    except RanksEnded as exc:
        return exc.exit_code
    except Interrupted as exc:
        _ignore_interrupts(arguments)
        _report_stop(exc.message)
        return exc.exit_code
    except RatelError as exc:
        _report_error(exc)
        return exc.exit_code
    except TyperException as exc:
        _report_usage_error(exc)
        return EXIT_BAD_INPUT
    except OSError as exc:
        return _report_os_error(exc)
    except Exception as exc:  # noqa: BLE001 - the last resort: every other kind is named above
        _report_bug(exc)
        return EXIT_BUG
    if code == EXIT_INTERRUPTED:
        return None  # typer returns this code for KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _called(arguments: Sequence[str] | None) -> object:
    """What the command returns. Without an installed package that does not load, it starts again if it can."""
    try:
        os.getcwd()
    except OSError as error:
        message = f"the working directory cannot be used: {error.strerror}"
        raise EnvironmentFailure(message, "change to a directory that exists: cd") from error
    if arguments is None:
        leave_out()
        if left_out() and not launched_rank():
            from ratel_cli.console import RunLog

            for each in left_out():
                RunLog().warn(f"{each.words}; it is left out. {each.remedy}")
    try:
        return app(args=None if arguments is None else list(arguments), prog_name="ratel", standalone_mode=False)
    except Exception as error:
        missed = missed_package(error)
        package = missed or broken_package(error)
        if package is None:
            raise
        if arguments is None and missed is None and can_start_without(package):
            start_without(package)
        raise needs_package(package) from error


def _flush_output(more: str = "") -> None:
    """Write what stdout still holds, and `more`. Raises BrokenPipeError; EnvironmentFailure for every other reason."""
    if sys.stdout is None:  # it was closed from the beginning
        return
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(1)
        raise EnvironmentFailure(f"the output cannot be written: {error.strerror}") from error


def _discard_unread_output() -> bool:
    """Drop what is still written to stdout or stderr, if the pipe there has no reader. Returns whether one has none."""
    streams = select.poll()
    for descriptor in (1, 2):
        streams.register(descriptor, 0)
    unread = [descriptor for descriptor, events in streams.poll(0) if events & select.POLLERR]
    for descriptor in unread:
        _discard(descriptor)
    return bool(unread)


def _discard(descriptor: int) -> None:
    """Drop what is still written to a descriptor; the interpreter would try again at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _report(message: str, hint: str | None) -> None:
    from ratel_cli.console import RankLog, RunLog

    rank = launched_rank()
    (RankLog(rank) if rank else RunLog()).error(message, hint)


def _report_os_error(error: OSError) -> int:
    """Report it as the failure to write what the command printed, if it is that. Returns the exit code."""
    try:
        _flush_output("\n")  # of a long text that could not be written nothing is left in the buffer
    except BrokenPipeError:
        pass
    except EnvironmentFailure as failure:
        _report_error(failure)
        return failure.exit_code
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        _report_bug(error)
        return EXIT_BUG
    few = EnvironmentFailure("too many files are open", "allow more of them: ulimit -n 4096")
    _report_error(few)
    return few.exit_code


def _report_stop(message: str) -> None:
    """Print without `error:`, because the user asked for it."""
    from ratel_cli.console import RunLog

    if not launched_rank():
        RunLog().remark(message)


def _report_error(error: RatelError) -> None:
    if error.reported_by not in (None, launched_rank()):
        return
    for finding in (error, *error.others):
        _report(finding.message, finding.hint)


def _report_usage_error(error: TyperException) -> None:
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    command = "ratel" if context is None else context.command_path
    hint = f"see {command} --help"
    takes_keys = context is not None and any("KEY=VALUE" in str(each.metavar) for each in context.command.params)
    if "No such option" in message and takes_keys:
        hint = f"keys of the config are set without dashes: learning_rate=1e-5; {hint}"
    _report(message[:1].lower() + message[1:], hint)


def _report_bug(error: BaseException) -> None:
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
