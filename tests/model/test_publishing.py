"""An export that is killed anywhere is published by the next command, and nothing of the user's is lost on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ratel_cli.errors import BadInput, EnvironmentFailure
from ratel_cli.model.export.publishing import finish_publishing
from ratel_cli.model.export.staging import Destination, Staging
from ratel_cli.model.files.directory import INDEX_NAME, WEIGHTS_NAME
from ratel_cli.model.files.marker import MARKER_NAME, STAGING_NAME, Marker, read_marker, write_marker

SHARDED = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX_NAME)
SINGLE = (WEIGHTS_NAME,)
COMMON = ("README.md", "additional_chat_templates/tools.jinja")
CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir")
"""What changes names in a directory."""
KILLED = 9


def publish(output: Path, names: Iterable[str], step: int, *, overwrite: bool = False) -> list[tuple[Path, Path]]:
    """Export files whose content says of which step they are."""
    with Staging(Destination(directory=output, run="/runs/a", overwrite=overwrite, option="-o")) as staging:
        for name in (*names, *COMMON):
            (staging.path / name).parent.mkdir(exist_ok=True)
            staging.write_text(name, f"{name} of step {step}")
        return staging.publish(step=step)


def contents(directory: Path) -> dict[str, str]:
    """All files but the marker."""
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file() and path.name != MARKER_NAME
    }


def model(names: Iterable[str], step: int) -> dict[str, str]:
    return {name: f"{name} of step {step}" for name in (*names, *COMMON)}


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed before its n-th change of a name. Returns whether it lived that long."""
    pid = os.fork()
    if not pid:
        left = call

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def counting(*arguments: object, **options: object) -> object:
                nonlocal left
                left -= 1
                if not left:
                    os._exit(KILLED)
                return change(*arguments, **options)

            return counting

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == KILLED


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "next_command"),
    [
        (SHARDED, SINGLE, "export"),
        (SINGLE, SHARDED, "finish"),
        pytest.param(SINGLE, SINGLE, "export", marks=pytest.mark.nightly),
        pytest.param((), SHARDED, "finish", marks=pytest.mark.nightly),
    ],
)
def test_killed_at_every_change_of_a_name(
    tmp_path: Path, old: tuple[str, ...], new: tuple[str, ...], next_command: str
) -> None:
    call, states = 1, set()
    while True:
        output = tmp_path / str(call)
        before: dict[str, str] = {"notes.txt": "mine"}
        if old:
            publish(output, old, 1)
            before |= model(old, 1)
        else:
            output.mkdir()
            write_marker(output, Marker(run="/runs/a", is_run=False))
        (output / "notes.txt").write_text("mine")
        if not killed_at(call, lambda output=output: publish(output, new, 2)):  # type: ignore[misc]
            break
        marker, found = read_marker(output), contents(output)
        assert marker is not None and found["notes.txt"] == "mine"
        begun = {name.removeprefix(f"{STAGING_NAME}/"): text for name, text in found.items()}
        if marker.step == 2:
            assert {name: begun[name] for name in model(new, 2)} == model(new, 2), "the new files are whole"
            loads = not {WEIGHTS_NAME, INDEX_NAME}.isdisjoint(found)
            wholes = [before, model(new, 2)]
            assert not loads or any(whole.items() <= found.items() for whole in wholes), "no mix of two models loads"
        else:
            assert {name: found[name] for name in before} == before, "the old files are whole"
        states.add((marker.step, marker.is_publishing))
        if next_command == "export":
            publish(output, new, 2)
        else:
            assert finish_publishing(output) == []
        marker = read_marker(output)
        assert marker is not None and not marker.is_publishing and marker.replaced == ()
        if marker.step == 2:
            assert contents(output) == {"notes.txt": "mine", **model(new, 2)}
            assert not (output / STAGING_NAME).exists()
        call += 1
    assert call > 10 and (2, True) in states
    assert contents(output) == {"notes.txt": "mine", **model(new, 2)}


@pytest.mark.full
def test_killed_while_it_overwrites_files_of_the_users(tmp_path: Path) -> None:
    """They insisted once; the next command does not ask again, and sets aside what came later."""
    call = 1
    while True:
        output = tmp_path / str(call)
        (output / "additional_chat_templates").mkdir(parents=True)
        mine = {name: f"my {name}" for name in (INDEX_NAME, "README.md", "model-00001-of-00002.safetensors")}
        for name, text in mine.items():
            (output / name).write_text(text)
        if not killed_at(call, lambda output=output: publish(output, SINGLE, 2, overwrite=True)):  # type: ignore[misc]
            break
        marker = read_marker(output)
        if marker is not None and marker.is_publishing:
            publish(output, SINGLE, 2)
            found = contents(output)
            assert found.pop(f"{INDEX_NAME}.old") == mine[INDEX_NAME]
            assert found.pop("model-00001-of-00002.safetensors") == mine["model-00001-of-00002.safetensors"]
            assert found == model(SINGLE, 2)
        else:
            found = contents(output)
            assert {name: found.get(name, found.get(f"{name}.old")) for name in mine if name != "README.md"} == {
                name: text for name, text in mine.items() if name != "README.md"
            }
        call += 1
    assert call > 8


@pytest.mark.parametrize(("names", "stale"), [(SINGLE, INDEX_NAME), (SHARDED, WEIGHTS_NAME)])
def test_what_would_lead_to_other_weights_is_renamed_not_deleted(
    tmp_path: Path, names: tuple[str, ...], stale: str
) -> None:
    publish(tmp_path, names, 1)
    (tmp_path / stale).write_text("mine")
    (tmp_path / f"{stale}.old").write_text("older")
    before = contents(tmp_path)
    with (
        Staging(Destination(directory=tmp_path, run="/runs/a")) as staging,
        pytest.raises(BadInput, match=f"{stale} would lead to other weights") as caught,
    ):
        staging.reject_files_of_others([*names, *COMMON])
    assert f"with --overwrite it is renamed to {stale}.old" in str(caught.value.hint)
    assert contents(tmp_path) == before
    assert publish(tmp_path, names, 1, overwrite=True) == [(tmp_path / stale, tmp_path / f"{stale}.old2")]
    assert contents(tmp_path) == {**model(names, 1), f"{stale}.old": "older", f"{stale}.old2": "mine"}


def test_a_link_is_renamed_not_written_through(tmp_path: Path) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "README.md").write_text("mine")
    output.mkdir()
    (output / "README.md").symlink_to(elsewhere / "README.md")
    (output / "additional_chat_templates").symlink_to(elsewhere)
    renamed = publish(output, SINGLE, 1, overwrite=True)
    assert {spare.name for _, spare in renamed} == {"README.md.old", "additional_chat_templates.old"}
    assert contents(elsewhere) == {"README.md": "mine"}
    assert all((output / name).read_text() == text for name, text in model(SINGLE, 1).items())


def test_a_failure_is_finished_by_the_next_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing at each move."""
    move = os.replace
    for failing in (*SINGLE, *COMMON):
        output = tmp_path / failing.replace("/", "-")
        publish(output, SHARDED, 1)

        def fail(source: Path, destination: Path, failing: Path = output / failing) -> None:
            if destination == failing:
                raise PermissionError(13, "permission denied")
            move(source, destination)

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", fail)
            with pytest.raises(EnvironmentFailure, match="permission denied"):
                publish(output, SINGLE, 2)
        assert not {INDEX_NAME, WEIGHTS_NAME} & contents(output).keys()
        publish(output, SINGLE, 2)
        assert contents(output) == model(SINGLE, 2)


def test_a_file_that_was_removed_before_it_was_published(tmp_path: Path) -> None:
    """Then the directory holds the model of no step."""
    publish(tmp_path, SINGLE, 1)
    call = 1
    while (marker := read_marker(tmp_path)) is not None and not marker.is_publishing:
        killed_at(call, lambda: publish(tmp_path, SINGLE, 2))
        call += 1
    (tmp_path / STAGING_NAME / "README.md").unlink()
    finish_publishing(tmp_path)
    marker = read_marker(tmp_path)
    assert marker is not None and marker.step is None and not marker.is_publishing
