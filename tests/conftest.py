"""For all tests: one environment, signals that reach whoever is started, Hypothesis's profiles, the slowest tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.environment import fix, restored
from tests.slowest import SlowestTests, add_slowest_option
from tests.tiers import register_profiles

fix()  # before anything imports torch

# A shell's background job has its children ignore SIGINT, and those pass that on to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_slowest_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    SlowestTests.register(config)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Each test has the same environment, and a cache directory of its own."""
    with restored():
        yield
