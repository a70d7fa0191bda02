"""The command line: exit codes, and messages of failures."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import typer
import typer.core
from typer.exceptions import TyperException

import ratel_cli.cli
from ratel_cli.cli.app import app, main
from ratel_cli.cli.arguments import command_line
from ratel_cli.cli.launch import launch
from ratel_cli.engine.ranks.launched import OfAllRanks, RanksEnded
from ratel_cli.errors import (
    BadInput,
    Diverged,
    DoesNotFit,
    EnvironmentFailure,
    IntegrityFailure,
    Interrupted,
    RankLost,
    RatelError,
)
from ratel_cli.run.train.start import GoBack, Resume, Start, StartOver

Run = Callable[..., None]
Install = Callable[[Run], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Replaces the finetune command by a function."""

    def place(run: Run) -> None:
        module = ModuleType("ratel_cli.cli.finetune")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ratel_cli.cli.finetune", module)
        monkeypatch.setattr(ratel_cli.cli, "finetune", module, raising=False)

    return place


def raising(error: BaseException) -> Run:
    def run(config_path: Path, overrides: list[str], resume: str, **flags: bool) -> None:
        raise error

    return run


def test_arguments_arrive_as_they_were_written(install: Install) -> None:
    calls: list[tuple[Path, list[str], Start, set[str]]] = []
    install(
        lambda path, overrides, start, **flags: calls.append(
            (path, overrides, start, {name for name, is_set in flags.items() if is_set})
        )
    )
    assert main(["finetune", "a.yaml"]) == 0
    assert main(["finetune", "a.yaml", "x=y=z", "limits.host_memory=2GiB", "--resume", "12", "--dry-run"]) == 0
    assert main(["finetune", "--resume=no", "--overwrite", "a.yaml", "k="]) == 0
    assert main(["finetune", "a.yaml", "--resume=no", "--overwrite-store"]) == 0
    assert calls == [
        (Path("a.yaml"), [], Resume(), set()),
        (Path("a.yaml"), ["x=y=z", "limits.host_memory=2GiB"], GoBack(12), {"dry_run"}),
        (Path("a.yaml"), ["k="], StartOver(), {"overwrite"}),
        (Path("a.yaml"), [], StartOver(replaces_others=True), set()),
    ]


def test_ranks_get_the_same_arguments(install: Install) -> None:
    """Each of them with a value, and all at once: a rank's command is called as this one is, but for the number."""
    calls: list[tuple[object, dict[str, object]]] = []
    install(lambda *arguments, **options: calls.append((arguments, options)))
    values = {"--resume": "no", "--from": "runs/a b@7", "--ranks": "3"}
    given = [[f"{name}={values[name]}" if name in values else name] for name in options_of(COMMANDS["finetune"])]
    assert ["--ranks=3"] in given and ["--dry-run"] in given and ["--fresh-optimizer"] in given
    for options in (*given, [*chain(*given)]):
        needed = ["--resume=no"] if options == ["--overwrite-store"] else []
        for places in (["a.yaml"], ["my runs/b.yaml", "x=1", "y=a b", "z=-1"]):
            command = ["finetune", *places, *options, *needed, *({"--ranks=3"} - {*options})]
            assert main(command) == 0
            ((number, started),) = [calls[-1][1].pop("ranks")]
            assert number == 3
            assert main(started) == 0
            assert calls[-1][1].pop("ranks") is None
            assert calls[-1] == calls[-2], started


GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands  # type: ignore[attr-defined]
OF_PROGRAM = typer.Context(GROUP, info_name="ratel", **GROUP.context_settings)
"""What a command's context inherits. A command keeps the help option of the first one that it is parsed in."""
VALUES = ("a b", "1", "0.5", "1GB/s", "original", "small")


def options_of(command: typer.core.TyperCommand) -> list[str]:
    return [
        max(each.opts, key=len) for each in command.params if each.param_type_name == "option" and each.expose_value
    ]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_line_is_what_was_given(name: str) -> None:
    """Of any command, with each of its options alone and with all of them: read again, it has the same values."""
    command = COMMANDS[name]
    needed = {max(each.opts, key=len) for each in command.params if each.required}
    places = ["--", *(each for each in needed if each[0] != "-")]

    def context_of(*given: str) -> typer.Context:
        options = [f"{each}=a b" for each in needed if each[0] == "-" and not any(each in form for form in given)]
        return command.make_context(name, [*given, *options, *places], parent=OF_PROGRAM)  # type: ignore[no-any-return]

    def given(option: str) -> list[str]:
        """The option as a flag, or with a value that it takes, twice if it may be repeated."""
        for forms in ([option], *([f"{option}{'=' if len(option) > 2 else ''}{value}"] for value in VALUES)):
            with contextlib.suppress(TyperException):
                values = context_of(*forms, *forms).params.values()
                return forms * (1 + any(isinstance(each, list | tuple) and len(each) == 2 for each in values))
        raise AssertionError(option)

    of_each = [given(option) for option in options_of(command)]
    for options in ([], *of_each, [*chain(*of_each)]):
        context = context_of(*options)
        first, *again = command_line(context, without="--nothing")
        assert first == name and command.make_context(name, again, parent=OF_PROGRAM).params == context.params, again


def test_ranks_do_not_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(BadInput, match="torchrun has started"):
        launch(2, [])


@pytest.mark.parametrize(
    ("error", "code"), [(RankLost("rank 1 has ended", "h"), 75), (RanksEnded(4), 4), (OfAllRanks("m"), 2)]
)
def test_what_other_ranks_report_is_not_reported_again(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    install(raising(error))
    reported = {0: not isinstance(error, RanksEnded), 1: isinstance(error, RankLost)}
    for rank, is_reported in reported.items():
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("RANK", str(rank))
        assert main(["finetune", "a.yaml"]) == code
        assert ("error: " in capsys.readouterr().err) is is_reported, rank


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("m"), 2),
        (EnvironmentFailure("m"), 3),
        (DoesNotFit("m", shortfall_bytes=1), 3),
        (IntegrityFailure("m"), 4),
        (Diverged("m"), 5),
        (RatelError("m"), 1),
    ],
)
def test_every_error_has_its_exit_code_and_no_traceback(
    install: Install, capsys: pytest.CaptureFixture[str], error: RatelError, code: int
) -> None:
    install(raising(error))
    assert main(["finetune", "a.yaml"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: m\n")


def test_too_many_open_files_are_no_bug(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(OSError(errno.EMFILE, "Too many open files", "/tmp/x")))
    assert main(["finetune", "a.yaml"]) == 3
    assert capsys.readouterr().err.split("\n")[-3:-1] == [
        "error: too many files are open",
        "hint: allow more of them: ulimit -n 4096",
    ]


def test_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["explain", "seed"]) == 3
    assert "error: the working directory cannot be used: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_prints_no_error(
    install: Install, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    install(raising(Interrupted(number, "Stopped at step 3.")))
    assert main(["finetune", "a.yaml"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Stopped at step 3.\n")


def test_every_finding_is_reported_with_its_hint(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        raising(BadInput("a:1:2: one", "do this", others=(BadInput("a:3:4: two\x1b[2J"), BadInput("three", "that"))))
    )
    assert main(["finetune", "a.yaml"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: a:1:2: one",
        "hint: do this",
        "error: a:3:4: two\\x1b[2J",
        "error: three",
        "hint: that",
    ]


def test_control_c(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(raising(KeyboardInterrupt()))
    assert main(["finetune", "a.yaml"]) == 130
    assert capsys.readouterr().err == "Stopped. Run the same command again.\n"


def test_sigterm(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def run(config_path: Path, overrides: list[str], resume: str, **flags: bool) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal did nothing")

    install(run)
    assert main(["finetune", "a.yaml"]) == 143
    assert capsys.readouterr().err == "Stopped. Run the same command again.\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_not_lost_where_nothing_can_be_raised(
    install: Install, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    def run(config_path: Path, overrides: list[str], resume: str, **flags: bool) -> None:
        for _ in range(3):
            Dying()
        time.sleep(60)
        raise AssertionError("the signal did nothing")

    hook = sys.unraisablehook
    install(run)
    assert main(["finetune", "a.yaml"]) == code
    assert capsys.readouterr().err == "Stopped. Run the same command again.\n"
    assert sys.unraisablehook is hook


def test_other_exceptions_that_cannot_be_raised_are_shown(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying:
        def __del__(self) -> None:
            raise ValueError("odd")

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    install(lambda *arguments, **flags: Dying() and None)
    assert main(["finetune", "a.yaml"]) == 0
    assert "ValueError: odd" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("odd\nthing"), EOFError(), MemoryError(), OSError(28, "No space")])
def test_a_bug_leaves_its_trace_in_a_file(
    install: Install,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    install(raising(error))
    assert main(["finetune", "a.yaml"]) == 1
    [trace] = tmp_path.iterdir()
    assert "Traceback" in trace.read_text()
    assert type(error).__name__ in trace.read_text()
    stderr = capsys.readouterr().err.lstrip()
    assert "Traceback" not in stderr
    assert stderr.startswith("error: this is a bug in Ratel: ")
    assert stderr.splitlines()[1] == f"hint: please report it with the trace in {trace}"


def test_a_bug_whose_trace_cannot_be_written_prints_it(
    install: Install, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    install(raising(ValueError("odd")))
    assert main(["finetune", "a.yaml"]) == 1
    stderr = capsys.readouterr().err
    assert "ValueError: odd" in stderr.splitlines()
    assert stderr.splitlines()[-1] == "error: this is a bug in Ratel: ValueError: odd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: missing command"),
        (["finetune"], "error: missing argument"),
        (["finetun", "a.yaml"], "error: no such command 'finetun'"),
        (["finetune", "a.yaml", "--lr=3"], "hint: keys of the config are set without dashes"),
        (["verify", "a.yaml", "--step", "3"], "\nhint: see ratel verify --help\n"),
        (["finetune", "a.yaml", "--resume", "maybe"], "error: argument '--resume maybe': must be `auto`, `no`"),
        (["finetune", "a.yaml", "--resume", "-1"], "error: argument '--resume -1': must be `auto`, `no`"),
        (["finetune", "a.yaml", "--resume"], "error: option '--resume' requires an argument"),
    ],
)
def test_wrong_arguments(
    install: Install, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    install(raising(AssertionError("must not run")))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_help_and_version_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "finetune" in capsys.readouterr().out
    assert main(["finetune", "-h"]) == 0
    assert "--dry-run" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("ratel ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan run.yaml --overwrite", "'--overwrite': it belongs to --plot FILE"),
        ("profile --overwrite", "'--overwrite': it belongs to -o FILE"),
        ("schema --overwrite", "'--overwrite': it belongs to -o FILE"),
        ("import theirs.yaml --overwrite", "'--overwrite': it belongs to -o FILE"),
        ("finetune run.yaml --fresh-optimizer", "'--fresh-optimizer': it belongs to --from RUN"),
        ("finetune run.yaml --overwrite-store", "'--overwrite-store': it belongs to --resume no"),
    ],
)
def test_an_option_that_would_do_nothing_is_rejected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    option, needed = message.split("'")[1], message.partition("belongs to ")[2]
    assert captured.out == ""
    assert captured.err == f"error: argument {message}\nhint: add {needed}, or leave out {option}\n"
