"""The processes that the tests of ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes(4) as found:
        yield found
