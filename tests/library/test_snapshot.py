"""A snapshot is a copy of the last step from which training goes on, and is replaced by nothing but the next one."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import ratel_cli as ratel
from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.library import snapshots
from ratel_cli.store.barrier import FAILPOINT_VARIABLE, FAILPOINTS
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.shadow import Shadow
from tests.library import test_hook, test_own_loop
from tests.library.adapters import ADAPTERS, IN_PEFT
from tests.library.test_own_loop import RATES, Batch, batches
from tests.library.test_state import State, all_of, assert_same
from tests.reference import Recipe
from tests.store.stores import flip_in
from tests.tiers import rotating, thinned

pytestmark = pytest.mark.usefixtures("_measured_briefly")

NUM_STEPS = len(RATES)


class Killed(BaseException):
    """Stands for SIGKILL."""


def opened(base: Path, *storage: Path, what: str = "all weights") -> ratel.Model:
    return ratel.open(base, storage=storage, dtype="bfloat16", device="cpu", adapter=ADAPTERS[what])


def train(model: ratel.Model, steps: Sequence[list[Batch]], first: int, last: int) -> None:
    assert model.num_steps == first
    for number in range(first, last):
        model.forward_backward(steps[number])
        model.step(learning_rate=RATES[number])


def equal(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(each, second[name][key]) for name, tensors in first.items() for key, each in tensors.items()
    )


def content(*directories: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for each in directories for path in sorted(each.iterdir()) if path.is_file()}


@pytest.mark.parametrize("what", thinned(ADAPTERS, every=3))
def test_training_goes_on_from_a_snapshot(tmp_path: Path, base: Path, what: str) -> None:
    """After further steps, whose snapshot replaces the first one; with the bits of a loop that nobody disturbed."""
    steps, snapshot = batches(NUM_STEPS, 1), tmp_path / "snapshot"
    with opened(base, tmp_path / "a", tmp_path / "b", what=what) as model:
        for first, last in ((0, 1), (1, 3)):
            train(model, steps, first, last)
            model.snapshot(snapshot)
        train(model, steps, 3, NUM_STEPS)
        undisturbed = all_of(model.state())
    if what != "qlora":  # whose frozen bytes plain PyTorch has not
        recipe = Recipe(dtype=torch.bfloat16, weight_decay=0.0, lora=tuple(IN_PEFT.items()) if what == "lora" else None)
        wanted = test_own_loop.wanted("llama", steps, recipe)
        assert_same(undisturbed, wanted, trained=wanted.moments)
    with opened(base, snapshot, what=what) as model:
        train(model, steps, 3, NUM_STEPS)
        assert equal(all_of(model.state()), undisturbed)
        model.verify()


def test_training_of_a_hooked_module_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """With a frozen part, which lies in the store once for all steps."""
    before = test_hook.built("llama")
    before.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    steps = test_hook.net_steps("llama", 4, 1)

    def trained(directory: Path, first: int, last: int, snapshots_after: Sequence[int] = ()) -> State:
        model = copy.deepcopy(before)
        with test_hook.hooked("llama", model, directory) as state:
            ratel.AdamW(model, lr=test_hook.LEARNING_RATE)
            assert state.num_steps == first
            for number in range(first, last):
                test_hook.run("llama", model, steps[number : number + 1], state)
                if number + 1 in snapshots_after:
                    state.snapshot(tmp_path / "copied" / "state")
            return all_of(state.state())

    undisturbed = trained(tmp_path / "undisturbed", 0, 4)
    assert equal(trained(tmp_path / "first", 0, 4, snapshots_after=(1, 2)), undisturbed)
    assert equal(trained(tmp_path / "copied", 2, 4), undisturbed)


@pytest.mark.parametrize("what", thinned(ADAPTERS, every=3))
def test_a_snapshot_goes_back_to_several_drives(tmp_path: Path, base: Path, what: str) -> None:
    """By a snapshot of the snapshot, which stays as it is."""
    steps, snapshot, drives = batches(3, 1), tmp_path / "snapshot", (tmp_path / "c", tmp_path / "d")
    with opened(base, tmp_path / "a", tmp_path / "b", what=what) as model:
        train(model, steps, 0, 2)
        model.snapshot(snapshot)
        train(model, steps, 2, 3)
        undisturbed = all_of(model.state())
    with opened(base, snapshot, what=what) as model:
        model.snapshot(*drives)
        model.snapshot(*drives)
    with opened(base, *drives, what=what) as model:
        train(model, steps, 2, 3)
        assert equal(all_of(model.state()), undisturbed)
    with opened(base, snapshot, what=what) as model:
        assert model.num_steps == 2


def test_it_is_durable_before_the_loop_goes_on(tmp_path: Path, base: Path) -> None:
    """And nothing of it stays open: the files may be copied."""
    snapshot, moved = tmp_path / "snapshot", tmp_path / "moved"
    with opened(base, tmp_path / "state") as model:
        train(model, batches(1, 1), 0, 1)
        model.snapshot(snapshot)
        wanted = all_of(model.state())
        snapshot.rename(moved)
        model.snapshot(moved)
        with opened(base, moved) as copied:
            assert equal(all_of(copied.state()), wanted)


def interrupted_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Let the process "be killed" when it comes to a failpoint, or when it has written a part of the copy."""
    if point != "copy":

        def kill(pid: int, number: int) -> None:
            assert (pid, number) == (os.getpid(), signal.SIGKILL)
            raise Killed

        monkeypatch.setattr("ratel_cli.store.barrier.os.kill", kill)
        monkeypatch.setenv(FAILPOINT_VARIABLE, f"{point}:1")
        return
    write, parts = Shadow.write, iter(range(5))

    def interrupted(*arguments: object) -> object:
        if next(parts, None) is None:
            raise Killed
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Shadow, "write", interrupted)


@pytest.mark.parametrize(
    ("point", "what"),
    rotating(
        ["copy", *(each for each in FAILPOINTS if not each.startswith("create"))],
        list(ADAPTERS),
        every=4,
        full_rotation=True,
    ),
)
def test_a_crash_leaves_the_snapshot_before(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, point: str, what: str
) -> None:
    """Or the new one, once it is complete. The next snapshot is made all the same."""
    steps, snapshot, aside = batches(3, 1), tmp_path / "snapshot", tmp_path / "aside"
    states: list[State] = []
    with opened(base, tmp_path / "state", what=what) as model:
        train(model, steps, 0, 1)
        states.append(all_of(model.state()))
        model.snapshot(snapshot)
        train(model, steps, 1, 2)
        states.append(all_of(model.state()))
        with monkeypatch.context() as patch:
            interrupted_at(patch, point)
            with pytest.raises(Killed):
                model.snapshot(snapshot)
        aside.mkdir()
        (aside / DATA_FILE_NAME).write_bytes((snapshot / DATA_FILE_NAME).read_bytes())
        with opened(base, aside, what=what) as left:
            is_complete = point.endswith("published")
            assert left.num_steps == 1 + is_complete
            assert equal(all_of(left.state()), states[is_complete])
        train(model, steps, 2, 3)
        model.snapshot(snapshot)
        states.append(all_of(model.state()))
    with opened(base, snapshot, what=what) as model:
        assert equal(all_of(model.state()), states[2])


@pytest.mark.parametrize(
    ("point", "what"),
    rotating(
        ["copy", *(each for each in FAILPOINTS if not each.endswith("published"))],
        list(ADAPTERS),
        every=4,
        full_rotation=True,
    ),
)
def test_a_first_snapshot_that_was_interrupted_is_made_anew(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, point: str, what: str
) -> None:
    with opened(base, tmp_path / "state", what=what) as model:
        with monkeypatch.context() as patch:
            interrupted_at(patch, point)
            with pytest.raises(Killed):
                model.snapshot(tmp_path / "snapshot")
        train(model, batches(1, 1), 0, 1)
        model.snapshot(tmp_path / "snapshot")
    with opened(base, tmp_path / "snapshot", what=what) as model:
        assert model.num_steps == 1


def others(tmp_path: Path, base: Path) -> dict[str, Callable[[], Path]]:
    """By what it is: makes something that no snapshot of `tmp_path / "state"` may replace."""
    place = tmp_path / "place"

    def state() -> Path:
        opened(base, place).close()
        return place

    def snapshot_of_another() -> Path:
        with opened(base, tmp_path / "other") as model:
            model.snapshot(place)
        return place

    def opened_snapshot() -> Path:
        with opened(base, tmp_path / "state") as model:
            model.snapshot(place)
        return state()

    def foreign() -> Path:
        place.mkdir()
        (place / DATA_FILE_NAME).write_bytes(b"mine" * 5000)
        return place

    def part() -> Path:
        with opened(base, tmp_path / "state") as model:
            model.snapshot(tmp_path / "first", place)
        return place

    return {
        "a training state": state,
        "a snapshot of another training state": snapshot_of_another,
        "a snapshot that training went on from": opened_snapshot,
        "a file of the user's": foreign,
        "the second directory of a snapshot": part,
    }


@pytest.mark.parametrize("what", others(Path(), Path()))
def test_nothing_else_is_replaced(tmp_path: Path, base: Path, what: str) -> None:
    """Even if model and settings are the same."""
    place = others(tmp_path, base)[what]()
    before = content(place)
    with opened(base, tmp_path / "state") as model:
        with pytest.raises(BadInput, match="is no snapshot of this training state"):
            model.snapshot(place)
        train(model, batches(1, 1), 0, 1)
        model.verify()
    assert content(place) == before


def test_a_state_in_use_is_no_place_for_a_snapshot(tmp_path: Path, base: Path) -> None:
    """That is said without waiting for it."""
    with opened(base, tmp_path / "state") as model, opened(base, tmp_path / "other"):
        began = time.monotonic()
        with pytest.raises(BadInput, match="is no snapshot of this training state"):
            model.snapshot(tmp_path / "other")
        assert time.monotonic() - began < 9  # the wait for a lock takes 10


def test_the_state_itself_is_no_place_for_a_snapshot(tmp_path: Path, base: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "file").write_text("mine")
    with opened(base, tmp_path / "a", tmp_path / "b") as model:
        for directories in ([tmp_path / "a"], [tmp_path / "link"], [tmp_path / "new", tmp_path / "b"]):
            with pytest.raises(BadInput, match="has the training state itself"):
                model.snapshot(*directories)
        with pytest.raises(BadInput, match="file is no directory"):
            model.snapshot(tmp_path / "file")
        with pytest.raises(BadInput, match="twice"):
            model.snapshot(tmp_path / "new", tmp_path / "new")
        assert not (tmp_path / "new").exists()
        model.verify()


def test_it_is_asked_for_between_steps_of_what_is_open(tmp_path: Path, base: Path) -> None:
    [[batch]] = batches(1, 1)
    with opened(base, tmp_path / "state") as model:
        model.forward_backward(batch)
        with pytest.raises(BadInput, match="snapshot was called between forward_backward and step"):
            model.snapshot(tmp_path / "snapshot")
    with pytest.raises(BadInput, match="the model is closed"):
        model.snapshot(tmp_path / "snapshot")
    with test_hook.hooked("llama", test_hook.built("llama"), tmp_path / "hooked") as state:
        pass
    with pytest.raises(BadInput, match="the hooked module is closed"):
        state.snapshot(tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()


def test_a_snapshot_that_cannot_be_used_is_an_error(tmp_path: Path, base: Path) -> None:
    """Of another number of directories, or truncated."""
    with opened(base, tmp_path / "state") as model:
        model.snapshot(tmp_path / "a", tmp_path / "b")
        with pytest.raises(BadInput, match=r"cannot be replaced: .* the store has 2") as rejected:
            model.snapshot(tmp_path / "a")
        assert rejected.value.hint == snapshots._HINT
        model.snapshot(tmp_path / "c")
        data = tmp_path / "c" / DATA_FILE_NAME
        os.truncate(data, data.stat().st_size // 2)
        with pytest.raises(IntegrityFailure, match=r"cannot be replaced: .* truncated") as failed:
            model.snapshot(tmp_path / "c")
        assert failed.value.hint == snapshots._HINT


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path, base: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with opened(base, tmp_path / "state") as model:
        with pytest.raises(EnvironmentFailure, match=r"the snapshot cannot be made: .* cannot be created") as raised:
            model.snapshot(tmp_path / "file" / "snapshot")
        assert "storage" not in str(raised.value.hint)


def test_a_damaged_state_does_not_replace_a_snapshot(tmp_path: Path) -> None:
    model = test_hook.built("llama")
    with test_hook.hooked("llama", model, tmp_path) as state:
        state.snapshot(tmp_path / "copied" / "state")
        flip_in(tmp_path / "state", model.lm_head.weight.detach().numpy().tobytes()[:64])
        with pytest.raises(IntegrityFailure, match="are not what step 0 wrote"):
            state.snapshot(tmp_path / "copied" / "state")
    with test_hook.hooked("llama", test_hook.built("llama"), tmp_path / "copied") as state:
        state.verify()


def test_a_snapshot_is_opened_as_what_it_was_made(tmp_path: Path, base: Path) -> None:
    """What is rejected stays a snapshot."""
    with opened(base, tmp_path / "state") as model:
        model.snapshot(tmp_path / "snapshot")
        with pytest.raises(BadInput, match="was made with other settings"):
            ratel.open(base, storage=[tmp_path / "snapshot"], dtype="bfloat16", device="cpu", weight_decay=0.5)
        model.snapshot(tmp_path / "snapshot")
