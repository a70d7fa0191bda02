"""What a process knows of its rank before torch is imported."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ratel_cli.engine.ranks import processes
from ratel_cli.engine.ranks.launched import launched_rank, num_local_ranks, see_own_gpu
from ratel_cli.engine.ranks.processes import failure_of, first_reporter

LAUNCHED = {"TORCHELASTIC_RUN_ID": "run", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_it_is_what_torchrun_says(launched: pytest.MonkeyPatch) -> None:
    assert (launched_rank(), num_local_ranks()) == (5, 4)
    launched.delenv("TORCHELASTIC_RUN_ID")
    assert (launched_rank(), num_local_ranks()) == (0, 1)


@pytest.mark.parametrize(
    ("visible", "seen"), [(None, "1"), ("4,6,7", "6"), ("GPU-aa,GPU-bb", "GPU-bb"), ("3", "3"), ("", "")]
)
def test_each_sees_one_gpu(launched: pytest.MonkeyPatch, visible: str | None, seen: str) -> None:
    if visible is not None:
        launched.setenv("CUDA_VISIBLE_DEVICES", visible)
    see_own_gpu()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_one_alone_sees_all(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_WORLD_SIZE", "1")
    see_own_gpu()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(("own", "lost", "says"), [(0, 2, True), (1, 2, False), (1, 0, True), (2, 0, False)])
def test_one_of_those_that_are_left_says_it(launched: pytest.MonkeyPatch, own: int, lost: int, says: bool) -> None:
    launched.setenv("RANK", str(own))
    error = failure_of(lost, RuntimeError("Connection closed by peer"))
    assert (error.reported_by == own) is says and error.message == f"rank {lost} has ended"


def test_the_first_to_end_names_who_reports() -> None:
    store = PrefixStore("attempt 0", dist.HashStore())
    assert [first_reporter(store, rank) for rank in (2, 0, 1)] == [2, 2, 2]
    assert first_reporter(PrefixStore("attempt 1", dist.HashStore()), 1) == 1


def test_a_store_that_does_not_answer_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for some time, in which the others may see who has ended."""

    class Lost:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(processes, "_LINGER_SECONDS", 0.01)
    assert first_reporter(Lost(), 1) is None  # type: ignore[arg-type]
