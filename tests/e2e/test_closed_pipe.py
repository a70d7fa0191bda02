"""A command whose output nobody reads any more ends with exit code 141 and no message, as after `| head -1`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.runs import Config, Ended

ROOT = Path(__file__).parents[2]
SHAPE = (ROOT / "configs/models/gpt-70b.yaml", "--hardware", ROOT / "configs/hardware/paper-4090-12ssd.yaml")
Argument = str | Path
BUFFERED = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
"""Without a buffer Python loses what a short write leaves, and nothing is left to write at the end."""


def ratel(*arguments: Argument) -> list[str]:
    return [sys.executable, "-m", "ratel_cli", *map(str, arguments)]


def ended(
    arguments: Sequence[str],
    *,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
    environment: Mapping[str, str] = BUFFERED,
) -> Ended:
    run = subprocess.run(
        arguments, check=False, stdout=stdout, stderr=stderr, text=True, timeout=300, env=dict(environment), cwd=ROOT
    )
    return Ended(code=run.returncode, stdout=run.stdout or "", stderr=run.stderr or "")


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    """The end of a pipe that is written to."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def stderr_without_reader(*arguments: Argument) -> str:
    """What a command prints to stderr when stdout has no reader from the beginning. Its exit code is 141."""
    with pipe_without_reader() as stdout:
        command = ended(ratel(*arguments), stdout=stdout)
    assert command.code == 141, command.stderr
    return command.stderr


@pytest.mark.full
@pytest.mark.parametrize("arguments", [(), ("--json",)], ids=["text", "json"])
def test_plan(arguments: tuple[str, ...]) -> None:
    assert stderr_without_reader("plan", *SHAPE, *arguments) == ""


@pytest.mark.parametrize(
    "arguments", [("explain", "learning_rate"), ("schema",), ("finetune", "--help"), ("--version",)], ids=" ".join
)
def test_commands_that_answer_at_once(arguments: tuple[str, ...]) -> None:
    assert stderr_without_reader(*arguments) == ""


@pytest.mark.full
def test_data(plain_run: Config) -> None:
    printed = stderr_without_reader("data", plain_run)
    assert "error" not in printed and "Traceback" not in printed


@pytest.mark.full
def test_report(plain_run: Config) -> None:
    assert stderr_without_reader("report", "--terminal", plain_run.output) == ""


def test_a_reader_that_leaves_after_the_first_line() -> None:
    """What comes after it does not fit into the pipe."""
    pipe = subprocess.PIPE
    with subprocess.Popen(ratel("schema"), stdout=pipe, stderr=pipe, pipesize=4096, text=True, env=BUFFERED) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=300) == 141


def test_an_error_that_nobody_reads() -> None:
    with pipe_without_reader() as stderr:
        assert ended(ratel("explain", "zzz"), stderr=stderr) == Ended(code=141, stderr="")


def test_a_pipe_that_is_not_the_output(tmp_path: Path) -> None:
    """It is a failure like any other."""
    program = (
        "import sys, tempfile, ratel_cli.cli.explain as explain\n"
        "from ratel_cli.cli.app import main\n"
        "def broken(key, as_json): raise BrokenPipeError('a pipe to another process')\n"
        "explain.run = broken\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "sys.exit(main(['explain', 'seed']))\n"
    )
    command = ended([sys.executable, "-c", program])
    assert command.code == 1
    assert "this is a bug in Ratel: BrokenPipeError: a pipe to another process" in command.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="without /dev/full")
@pytest.mark.parametrize("environment", [BUFFERED, {**BUFFERED, "PYTHONUNBUFFERED": "1"}], ids=["buffer", "no buffer"])
@pytest.mark.parametrize("arguments", [("explain", "seed"), ("schema",)], ids=["short", "long"])
def test_an_output_on_a_full_disk(arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = ended(ratel(*arguments), stdout=full.fileno(), environment=environment)
    assert command == Ended(code=3, stderr="error: the output cannot be written: No space left on device\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="without /dev/full")
def test_messages_on_a_full_disk() -> None:
    """What a command was asked for is done all the same."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        assert ended(ratel("explain", "zzz"), stderr=full.fileno()).code == 2


@pytest.mark.full
def test_no_file_takes_the_place_of_a_closed_stderr(tmp_path: Path) -> None:
    program = (
        "import os, ratel_cli.cli.explain as explain\n"
        "from ratel_cli.cli.app import main\n"
        f"def run(key, as_json): print(os.open({str(tmp_path / 'file')!r}, os.O_RDWR | os.O_CREAT))\n"
        "explain.run = run\n"
        "main(['explain', 'seed'])\n"
    )
    words = ["sh", "-c", 'exec "$0" "$@" 2>&-', sys.executable, "-c", program]
    done = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False)
    assert int(done.stdout) > 2
