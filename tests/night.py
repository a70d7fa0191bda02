"""A part of the nightly tier for every check: `pytest -m nightly --night=N --night-seconds=S`.

Nobody waits for the whole nightly tier. So each check runs one of 30 parts of it, for as long as it has time: which
part, and in which order, N decides alone, such as the number of commits. What has not begun in time is skipped.

A case that fails there goes into `tests/pinned.txt`, one name a line, and is in the full tier until it is understood.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import xxhash

NUM_PARTS = 30
PINNED = Path(__file__).with_name("pinned.txt")


def add_night_options(parser: pytest.Parser) -> None:
    """Add the options that choose the part and its time."""
    parser.addoption("--night", type=int, metavar="N", help=f"of all cases, run part N modulo {NUM_PARTS}")
    parser.addoption("--night-seconds", type=float, default=240.0, metavar="S", help="begin no case later than this")


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
    return sorted(chosen, key=lambda name: xxhash.xxh3_64_intdigest(f"{number} {name}".encode()))


class Night:
    """Leaves out all cases but those of the part, and those that there is no time for."""

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self._until = number, time.monotonic() + seconds

    @classmethod
    def register(cls, config: pytest.Config) -> None:
        """Take part if the option asks for it."""
        number = config.getoption("night")
        if number is not None:
            config.pluginmanager.register(cls(number, config.getoption("night_seconds")))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Behind the choice of a tier."""
        by_name = {item.nodeid: item for item in items}
        kept = dict.fromkeys(part(list(by_name), self._number))
        config.hook.pytest_deselected(items=[item for name, item in by_name.items() if name not in kept])
        items[:] = [by_name[name] for name in kept]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A part may have no case."""
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_runtest_setup(self) -> None:
        """Skip what would begin too late."""
        if time.monotonic() > self._until:
            pytest.skip("the night is over")
