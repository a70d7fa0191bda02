"""`ratel check` finds what is wrong with inputs and machine at once, each thing on its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Ended, ratel

MACHINE = ("limits.host_memory=1MiB", "storage.paths=[/proc/x]")
MEMORY, SPACE, OUTPUT = (
    "RAM: a step needs ",
    "not enough space for the store: ",
    "output_dir: /proc/q cannot be written",
)


def assert_finds(ended: Ended, code: int, wanted: Sequence[str]) -> None:
    """The errors are these, in any order, each once."""
    assert ended.code == code, ended.stderr
    assert len(ended.errors) == len(wanted), ended.stderr
    assert [part for part in wanted if sum(part in line for line in ended.errors) != 1] == [], ended.stderr


@pytest.fixture
def bad_rows(tmp_path: Path, rows: Path) -> Path:
    path = tmp_path / "bad.jsonl"
    path.write_text(rows.read_text() + "not json\n{}\n")
    return path


def test_memory_space_and_output(make_config: MakeConfig) -> None:
    config = make_config()
    assert_finds(ratel("check", config, *MACHINE, "output_dir=/proc/q"), 3, [MEMORY, SPACE, OUTPUT])
    assert_finds(ratel("check", config, *MACHINE), 3, [MEMORY, SPACE])
    assert_finds(ratel("check", config, MACHINE[1]), 3, [SPACE])
    assert_finds(ratel("check", config, MACHINE[0]), 3, [MEMORY])


@pytest.mark.full
def test_bad_rows_hide_nothing(make_config: MakeConfig, bad_rows: Path) -> None:
    ended = ratel("check", make_config(rows=bad_rows), *MACHINE)
    assert_finds(ended, 2, ["rejected 2 of 50 rows", "bad.jsonl:49: not JSON", "bad.jsonl:50: ", MEMORY, SPACE])


@pytest.mark.full
def test_a_wrong_key_hides_nothing(make_config: MakeConfig) -> None:
    ended = ratel("check", make_config(), *MACHINE, "learning_rte=1", "output_dir=/proc/q")
    assert_finds(ended, 2, ["unknown key `learning_rte`", MEMORY, SPACE, OUTPUT])
    doubtful = ratel("check", make_config(), MACHINE[0], "storage.paths=3")
    assert_finds(doubtful, 2, ["`storage.paths` must be"])


@pytest.mark.parametrize("base", ["/no/such", None])
def test_rows_are_read_without_a_model(make_config: MakeConfig, bad_rows: Path, base: str | None) -> None:
    """By both types that the rows may have: which one they are, the tokenizer decides."""
    config = make_config(rows=bad_rows, base_model=base)
    wanted = ["rejected 2 of 50 rows", "bad.jsonl:49: not JSON", "bad.jsonl:50: "]
    ended = ratel("check", config)
    assert_finds(ended, 2, ["`base_model`" if base is None else "there is no directory /no/such", *wanted])
    ended = ratel("check", config, "datasets.0.typ=alpaca")
    assert any("rejected 1 of 50 rows" in line for line in ended.errors), "only what is no row"


@pytest.mark.full
def test_the_output_of_a_dry_run_must_be_writable(make_config: MakeConfig) -> None:
    """A run would find it out only after its inputs."""
    for command in (["check"], ["finetune", "--dry-run"], ["finetune"]):
        ended = ratel(command[0], make_config(), *command[1:], "output_dir=/proc/q")
        assert ended.code == 3 and OUTPUT in ended.stderr, ended.stderr
