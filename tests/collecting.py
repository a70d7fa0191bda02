"""Collecting quickly: each worker collects all cases before it runs the first one.

Three of four cases are the nightly tier's. A session makes no items of those that it will not run; and while items are
made, which all stay, no garbage is looked for among them.

Invariant: what a session runs, and the names of its cases, are the same as without this.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

from tests.night import part


class QuickCollection:
    """Leaves out cases that the session deselects, but for those of `kept`."""

    def __init__(self, kept: frozenset[str]) -> None:
        self._kept = kept

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """After all parameters are known, and their names. At least one case stays: a test without one is an error."""
        night, tiers = metafunc.config.getoption("night"), metafunc.config.option.markexpr
        is_named = any("[" in each for each in metafunc.config.args)
        if is_named or (night is None and "not nightly" not in tiers):
            return
        stay = []
        for call in metafunc._calls:
            name = f"{metafunc.definition.nodeid}[{call.id}]"
            is_of_night = any(mark.name == "nightly" for mark in call.marks)
            if part([name], night) if night is not None else name in self._kept or not is_of_night:
                stay.append(call)
        metafunc._calls = stay or metafunc._calls[:1]

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Modules and items live as long as the session: later searches for garbage pass them by as well."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()
            gc.collect()
            gc.freeze()
