"""The slowest tests of a session, kept as a file: `pytest --slowest=FILE`.

With several workers, their controller writes the file: it gets every worker's reports. Setting up a fixture counts as
part of the test that asked for it first.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

_NUMBER = 50


def add_slowest_option(parser: pytest.Parser) -> None:
    """Add the option that names the file.

    It is written with `=`. Before pytest has loaded tests/conftest.py it does not know the option: it would take an
    existing FILE for a path with tests, and look for the conftest there only.
    """
    parser.addoption("--slowest", type=Path, metavar="FILE", help=f"write the {_NUMBER} slowest tests to FILE")


class SlowestTests:
    """Adds up what each test takes, and writes the longest ones when the session ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @classmethod
    def register(cls, config: pytest.Config) -> None:
        """Have the file written, if the option names one and this process is no worker."""
        file = config.getoption("slowest")
        if file is not None and not hasattr(config, "workerinput"):
            config.pluginmanager.register(cls(file))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and teardown each report what they took."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write one line for each of the slowest tests: seconds, then its name."""
        slowest = sorted(self._seconds.items(), key=lambda item: (-item[1], item[0]))[:_NUMBER]
        total = f"{sum(self._seconds.values()):9.1f}  all {len(self._seconds)} tests"
        lines = [*(f"{seconds:9.1f}  {name}" for name, seconds in slowest), total]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("\n".join(lines) + "\n", encoding="utf-8")
