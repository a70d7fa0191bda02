"""The list of mutants fits the source, and a mutant that nothing notices is reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import MUTANTS, ROOT, Mutant, apply, pytest_calls, try_mutant

FEWEST = 60
SMALL = Mutant("small", "small.py", "+ 1", "+ 2", "it adds one", "test_small.py")


def test_there_are_enough_and_each_has_its_name() -> None:
    assert len(MUTANTS) >= FEWEST
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("room", sorted({mutant.file.partition("/")[0] for mutant in MUTANTS}))
def test_their_texts_stand_once_in_their_files_and_their_tests_are_there(room: str) -> None:
    for mutant in (each for each in MUTANTS if each.file.partition("/")[0] == room):
        source = (ROOT / "ratel_cli" / mutant.file).read_text(encoding="utf-8")
        assert (source.count(mutant.old), mutant.new != mutant.old) == (1, True), mutant.name
        compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
        assert mutant.tests and [path for path in mutant.test_paths if not (ROOT / path).exists()] == [], mutant.name


@pytest.fixture
def small_repository(tmp_path: Path) -> Path:
    """One module and its test."""
    for name, text in {
        "ratel_cli/__init__.py": "",
        "ratel_cli/small.py": "def more(number):\n    return number + 1  # and no less\n",
        "tests/test_small.py": "from ratel_cli.small import more\n\ndef test_more():\n    assert more(1) == 2\n",
        "tests/test_other.py": "import ratel_cli.small\n\ndef test_nothing():\n    assert ratel_cli.small.more(1)\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.full
def test_a_mutant_is_caught(small_repository: Path) -> None:
    trial = try_mutant(SMALL, small_repository)
    assert (trial.verdict, "test_small.py::test_more" in trial.note) == ("caught", True)
    assert "+ 1" in (small_repository / "ratel_cli/small.py").read_text()


@pytest.mark.full
def test_a_mutant_survives(small_repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the tests that are named, all others have run."""
    monkeypatch.setattr(mutants, "GPU_TESTS", ("tests/test_other.py",))
    trial = try_mutant(replace(SMALL, old="no less", new="no more"), small_repository)
    assert (trial.verdict, trial.note) == ("survived", "small.py: it adds one")


def test_a_mutant_that_is_out_of_date_is_an_error(small_repository: Path) -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        apply(replace(SMALL, old="+ 7"), small_repository)


def test_tests_that_cannot_run_are_no_verdict(small_repository: Path) -> None:
    trial = try_mutant(replace(SMALL, tests="test_gone.py"), small_repository)
    assert trial.verdict == "not tried"


def test_tests_of_the_gpu_run_apart() -> None:
    by_day = ["-m", "not nightly"]
    apart = ({"RATEL_SIMULATED_GPU": "1"}, [*by_day, "tests/gpu/test_link.py"])
    assert list(pytest_calls(["tests/gpu/test_link.py"])) == [apart]
    both = list(pytest_calls(["tests/gpu/test_link.py", "tests/io"]))
    assert both == [({}, [*by_day, "tests/io", "--ignore=tests/gpu", "--ignore=tests/simulated_gpu"]), apart]
    timed = ({"RATEL_SIMULATED_GPU": "1"}, ["-m", "nightly", "tests/gpu/test_simulated_time.py"])
    assert list(pytest_calls(["tests/gpu/test_simulated_time.py", "tests/gpu/test_link.py"])) == [apart, timed]
    assert [environment for environment, _ in pytest_calls([])] == [{}, {"RATEL_SIMULATED_GPU": "1"}]


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutants.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(MUTANTS)
