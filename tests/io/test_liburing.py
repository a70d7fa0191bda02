"""`storage.engine: liburing`: what is said where the package is missing, dies, or cannot be used.

That it moves the bytes of the other engines is tested with them, where it is installed (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io import liburing_ring
from ratel_cli.io.queue import open_queue


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    liburing_ring._check_package.cache_clear()
    yield
    liburing_ring._check_package.cache_clear()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGILL)", "ends its process with signal 4 on this processor"),
        ("raise ModuleNotFoundError('liburing')", "needs a package that is not installed"),
        ("raise OSError(38, 'Function not implemented')", "not available here: OSError: \\[Errno 38\\] Function"),
    ],
)
def test_a_package_that_cannot_be_used_is_an_error_and_not_the_end(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name stands first on the path of the process that tries it."""
    (tmp_path / "liburing.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EnvironmentFailure, match=message):
        open_queue("liburing", notice=pytest.fail)
