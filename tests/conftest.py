"""For all tests: one environment, signals that reach whoever is started, Hypothesis's profiles, slow tests, nights."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterator
from unittest import mock

import pytest
import typer.main

from ratel_cli import neighbours
from ratel_cli.hardware import load
from ratel_cli.hardware.system_files import SystemFiles
from ratel_cli.run.train import first_checks
from tests.collecting import QuickCollection
from tests.environment import fix, restored
from tests.forked_chat import forked_chat_children
from tests.night import add_night_options, pin, pinned, register_choice
from tests.slowest import SlowestTests, add_slowest_option
from tests.tiers import register_profiles

fix()  # before anything imports torch

# A shell's background job has its children ignore SIGINT, and those pass that on to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

register_profiles()

_build_commands = functools.cache(lambda app, _variable, build=typer.main.get_command: build(app))


def _commands(app: typer.Typer) -> object:
    """The commands of the program. typer builds them from all their options, and has other ones where this variable is
    set. A process has one command line and needs them once; tests have thousands of command lines in a process."""
    return _build_commands(app, os.environ.get("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"))


typer.main.get_command = _commands


def pytest_addoption(parser: pytest.Parser) -> None:
    add_slowest_option(parser)
    add_night_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    SlowestTests.register(config)
    register_choice(config)
    config.pluginmanager.register(QuickCollection(pinned()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    pin(items, pinned())


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test has the same environment, a cache directory of its own, and a machine on which nobody else works. A
    doctor tries one package there: all of them take ten seconds."""
    silent = SystemFiles(root=tmp_path_factory.getbasetemp() / "no-such-root")
    few = mock.patch.object(neighbours, "NEIGHBOURS", ("numpy",))
    of_a_run = mock.patch.object(first_checks, "SystemFiles", return_value=silent)
    with restored(), few, of_a_run, mock.patch.object(load, "SystemFiles", return_value=silent):
        yield


@pytest.fixture(autouse=True, scope="module")
def _chat_children() -> Iterator[None]:
    """A test of how chat children start has a fixture of this name that does nothing."""
    with forked_chat_children():
        yield
