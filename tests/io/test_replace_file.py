"""Files that are replaced whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratel_cli.io.files import replace_file


def test_it_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    for content in (b"", b"first", b"second"):
        replace_file(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["a", "a.new"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / name).symlink_to("mine")
    replace_file(tmp_path / "a", b"ours")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "a").read_bytes() == b"ours" and not (tmp_path / "a").is_symlink()


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_file(tmp_path / "a", b"before")

    def full(_: int) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "a", b"after")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a", b"before")]
