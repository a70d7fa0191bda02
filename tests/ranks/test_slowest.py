"""Which of several ranks the others wait for, and why."""

from __future__ import annotations

from ratel_cli.engine.measure.telemetry import StepTimes
from ratel_cli.engine.ranks.ranks import ALONE, Ranks
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.training.loop import slowest_rank_of
from tests.ranks.threads import together


def times(*, waited: float, busy: Resource) -> StepTimes:
    """Of a step of a rank that `waited` for the others, where `busy` was busy longest but for the network."""
    nothing: dict[Resource, float] = dict.fromkeys(RESOURCES, 0.0)
    return StepTimes(busy={**nothing, "network": 3.0, busy: 2.0}, stalled={**nothing, "network": waited}, spans=())


def test_all_find_the_one_that_waits_least() -> None:
    of_ranks = (times(waited=1.5, busy="compute"), times(waited=0.1, busy="nvme read"), times(waited=1, busy="up"))

    def find(ranks: Ranks) -> tuple[int | None, Resource | None]:
        return slowest_rank_of(ranks, of_ranks[ranks.rank])

    assert together(3, find) == [(1, "nvme read")] * 3


def test_one_alone_waits_for_none() -> None:
    assert slowest_rank_of(ALONE, times(waited=0, busy="compute")) == (None, None)
