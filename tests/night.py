"""What a check has time for: `pytest --seconds=S --order=N`, and `pytest -m nightly --night=N --seconds=S`.

A check must end, on a busy machine too. So what of the full and the nightly tier has not begun after S seconds is
skipped; and N, such as the number of commits, decides the order of the files, so that other cases are left out each
time. Nobody waits for the whole nightly tier: each check runs one of 30 parts of it, which N chooses.

A case that fails there goes into `tests/pinned.txt`, one name a line, and is in the full tier until it is understood.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

NUM_PARTS = 30
PINNED = Path(__file__).with_name("pinned.txt")


def add_night_options(parser: pytest.Parser) -> None:
    """Add the options that choose the cases, their order and their time."""
    parser.addoption("--night", type=int, metavar="N", help=f"of all cases, run part N modulo {NUM_PARTS}")
    parser.addoption("--order", type=int, metavar="N", help="run the files of tests in another order for each N")
    parser.addoption("--seconds", type=float, metavar="S", help="begin no case of the full or nightly tier later")


def pinned() -> frozenset[str]:
    """The names of the cases that the full tier has for now."""
    lines = PINNED.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def pin(items: list[pytest.Item], names: frozenset[str]) -> None:
    """Move these cases from the nightly tier to the full one."""
    for item in items:
        if item.nodeid in names:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "nightly"]
            item.add_marker("full")


def part(names: list[str], number: int) -> list[str]:
    """Of these cases, those of a part, in its order: each case is in one of 30 parts that follow one another."""
    chosen = [name for name in names if (xxhash.xxh3_64_intdigest(name.encode()) - number) % NUM_PARTS == 0]
    return sorted(chosen, key=_drawn(number))


def by_file(names: list[str], number: int) -> list[str]:
    """These cases, their files in an order that the number decides. Cases of a file share what it sets up once."""
    drawn = _drawn(number)
    return sorted(names, key=lambda name: drawn(name.partition("::")[0]))


def _drawn(number: int) -> Callable[[str], int]:
    return lambda name: xxhash.xxh3_64_intdigest(f"{number} {name}".encode())


class Chosen:
    """Leaves out all cases but those that a number chooses, and has them run in its order."""

    def __init__(self, choose: Callable[[list[str], int], list[str]], number: int) -> None:
        self._choose, self._number = choose, number

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Behind the choice of a tier."""
        by_name = {item.nodeid: item for item in items}
        kept = dict.fromkeys(self._choose(list(by_name), self._number))
        config.hook.pytest_deselected(items=[item for name, item in by_name.items() if name not in kept])
        items[:] = [by_name[name] for name in kept]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A part may have no case."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK


class TimeLimit:
    """Skips what would begin too late, but for the short tier."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before anything is set up for a case."""
        may_wait = item.get_closest_marker("full") or item.get_closest_marker("nightly")
        if may_wait and time.monotonic() > self._until:
            pytest.skip("no time is left for it")


def register_choice(config: pytest.Config) -> None:
    """Take part as far as the options ask for it."""
    for option, choose in (("night", part), ("order", by_file)):
        if (number := config.getoption(option)) is not None:
            config.pluginmanager.register(Chosen(choose, number))
    if (seconds := config.getoption("seconds")) is not None:
        config.pluginmanager.register(TimeLimit(seconds))
