"""Files that commands write for the user: what cannot be written is known before the command works for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.run.files.new_file import check_new


def test_a_place_that_cannot_be_written_is_known_at_once() -> None:
    """`ratel init -o` measures the machine before it writes its file."""
    with pytest.raises(EnvironmentFailure, match=r"^/proc/run\.yaml: cannot be written: "):
        check_new(Path("/proc/run.yaml"), overwrite=False)
    with pytest.raises(EnvironmentFailure, match=r"^/proc/run\.yaml: cannot be written: "):
        check_new(Path("/proc/run.yaml"), overwrite=True)


def test_a_place_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    check_new(path, overwrite=False)
    assert list(tmp_path.iterdir()) == []
    path.write_text("mine")
    with pytest.raises(BadInput, match="the file exists"):
        check_new(path, overwrite=False)
    check_new(path, overwrite=True)
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
