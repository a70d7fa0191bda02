"""Fixtures of loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import measured_briefly
from tests.library.test_own_loop import saved


@pytest.fixture
def _measured_briefly() -> Iterator[None]:
    with measured_briefly():
        yield


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny Llama, as from_pretrained reads it."""
    return saved(tmp_path / "base", "llama")
