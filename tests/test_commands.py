"""Commands in messages: they can be pasted into a shell, and name the run as the user did."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.commands import command, errors_about, forget_run, name_run, with_run_named
from ratel_cli.errors import BadInput


@pytest.fixture(autouse=True)
def nothing_is_named() -> Iterator[None]:
    forget_run()
    yield
    forget_run()


@pytest.mark.parametrize("path", ["run.yaml", "outputs/run two é", "it's", "$HOME", "a;b"])
def test_a_shell_reads_back_what_was_quoted(path: str) -> None:
    shown = command("clean", Path(path), "--yes")
    assert shown[0] == shown[-1] == "`"
    assert shlex.split(shown[1:-1]) == ["ratel", "clean", path, "--yes"]


def test_messages_call_the_run_what_the_user_called_it() -> None:
    text = "`ratel data CONFIG --bad`; `ratel restore CONFIG`; `ratel profile CONFIG --refresh`; CONFIG"
    assert with_run_named(text) == text
    name_run(Path("my run.yaml"), ["seed=3", "datasets=a b"])
    name_run(Path("another.yaml"))  # such as the run of --from
    data, restore, profile, rest = with_run_named(text).split("; ")
    assert data == "`ratel data 'my run.yaml' seed=3 'datasets=a b' --bad`"
    assert restore == "`ratel restore 'my run.yaml' seed=3 'datasets=a b'`"
    assert profile == "`ratel profile 'my run.yaml' --refresh`", "it takes no overrides"
    assert rest == "CONFIG"
    forget_run()
    assert with_run_named(text) == text


def test_an_error_about_another_run_names_that_one() -> None:
    name_run(Path("mine.yaml"))
    with pytest.raises(BadInput) as raised, errors_about(Path("outputs/theirs")):
        raise BadInput("it is damaged", "restore it with `ratel restore CONFIG`")
    assert raised.value.hint is not None
    assert with_run_named(raised.value.hint) == "restore it with `ratel restore outputs/theirs`"
