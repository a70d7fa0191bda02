"""Every malformed input through the command line: exit code, message, line, time, and no file changed.

A healthy run has finished and left its store and its model. Each case then starts another run with one damaged input.
Invariant: the store and the model of the finished run do not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from ratel_cli.cli.app import main
from ratel_cli.model.files.marker import MARKER_NAME
from tests.config.test_hardware_file import LINES
from tests.e2e.runs import CHAT, Config, write_config
from tests.inputs.cases import MalformedInput, RunFiles
from tests.tiers import sample_kinds

KINDS = "yaml argument hardware model_config tokenizer safetensors index row template"
CORPUS: list[MalformedInput] = [
    case for kind in KINDS.split() for case in import_module(f"tests.inputs.{kind}_cases").cases()
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """The healthy run."""

    config: Config

    def result(self) -> dict[str, object]:
        """Every file of its store and its model: when it was written, and the hash of its content. Of the marker its
        content, but for the names of the files that rejected rows are written to."""
        marker = self.config.output / MARKER_NAME
        exported = (path for path in self.config.output.iterdir() if path.is_file() and path != marker)
        found: dict[str, object] = {
            str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in (self.config.store, *exported)
        }
        listed = json.loads(marker.read_bytes())
        listed["run_files"] = [name for name in listed["run_files"] if "rejects" not in name]
        return {**found, str(marker): listed}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path, rows: Path) -> FinishedRun:
    directory = tmp_path_factory.mktemp("finished")
    config = write_config(directory, base=base, rows=rows, data_type=CHAT, max_steps=1)
    config.succeed()
    return FinishedRun(config=config)


@pytest.fixture
def inputs(tmp_path: Path, finished: FinishedRun, base: Path) -> RunFiles:
    """The inputs of the finished run, in a directory of the case's own."""
    return RunFiles(directory=tmp_path, healthy_base=base, settings=yaml.safe_load(finished.config.read_text()))


def test_the_corpus_is_large() -> None:
    names = [case.name for case in CORPUS]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert len(names) >= 400


@pytest.mark.full
def test_healthy_inputs_are_accepted(inputs: RunFiles, finished: FinishedRun) -> None:
    """Otherwise the corpus would prove nothing."""
    before = finished.result()
    inputs.arguments = ["--resume", "auto", "--dry-run"]
    assert ask(inputs.command_line())[:1] == (0,)
    inputs.plan_for(LINES.encode())
    assert ask(inputs.command_line())[:1] == (0,)
    assert finished.result() == before


def kind_of(case: MalformedInput) -> str:
    """The words with which its name begins, three at most: "tensor of dtype", "index naming", "override", ..."""
    [words] = re.findall(r"^(?:[a-z_.]+ ?){1,3}", case.name) or [""]
    return words


@pytest.mark.parametrize(
    "case",
    [
        # The endless template takes 10 s. tests/data/test_chat.py has one with a shorter limit in the short tier.
        pytest.param(*case.values, marks=pytest.mark.full) if case.values[0].seconds > 10 and not case.marks else case
        for case in sample_kinds(CORPUS, kind=kind_of, every=10)
    ],
    ids=lambda case: ascii(case.name)[1:-1][:80],
)
def test_malformed_input(case: MalformedInput, inputs: RunFiles, finished: FinishedRun) -> None:
    line = case.damage(inputs)
    command_line = inputs.command_line()
    before = finished.result()
    code, output, seconds = ask(command_line)
    assert code == case.code, output
    assert all(each.isprintable() for each in output.split("\n")), ascii(output)
    assert "Traceback" not in output
    errors = [each for each in output.splitlines() if each.startswith("error: ")]
    assert errors, output
    place = "" if line is None else rf"error: [^\s:]+:{line}(:\d+)?: "
    assert any(re.match(place, each) and re.search(case.message, each) for each in errors), output
    assert max(map(len, output.splitlines())) < 10_000, "too long to be read"
    assert finished.result() == before
    assert not (inputs.directory / "canary").exists()
    assert seconds <= case.seconds


def ask(command_line: list[str]) -> tuple[int, str, float]:
    """Run `ratel` in this process. Returns its exit code, its stderr and the seconds it took.

    The seconds are processor time, or a tenth of the clock's time if that is more: on a busy machine the clock alone
    would measure the other processes.
    """
    stderr = io.StringIO()
    start, start_cpu = time.monotonic(), processor_seconds()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        code = main(command_line)
    seconds, cpu_seconds = time.monotonic() - start, processor_seconds() - start_cpu
    return code, stderr.getvalue(), max(cpu_seconds, seconds / 10)


def processor_seconds() -> float:
    """Processor time of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No case may look up a name on the hub."""
    monkeypatch.setattr("ratel_cli.model.files.directory._download", _unreachable)


def _unreachable(repository: str) -> str:
    raise AssertionError(f"{repository} was asked for on the hub")
