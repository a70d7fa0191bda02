"""Which rank this process is, before torch is imported."""

from __future__ import annotations

import os

from ratel_cli.errors import BadInput, EnvironmentFailure

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class OfAllRanks(BadInput):
    """An error that all ranks raise, and the first one says."""

    is_reported_here = property(lambda self: launched_rank() == 0)


class RankLost(EnvironmentFailure):
    """Another rank has ended, or does not answer."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__(
            f"rank {rank} {what}",
            "what it has printed says why; the same command resumes from the last step that all ranks have",
        )
        self.rank = rank

    @property
    def is_reported_here(self) -> bool:
        """Whether this rank says so: one of those that are left does."""
        return launched_rank() == (1 if self.rank == 0 else 0)


class RanksEnded(Exception):
    """The ranks that a command has started have ended, and have said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def num_local_ranks() -> int:
    """How many ranks torchrun has started on this machine; 1 if it has not started this process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def see_own_gpu() -> None:
    """Of several ranks on a machine, let each see one GPU: of those that are visible, the one with its number. Call it
    before torch is imported."""
    if num_local_ranks() == 1:
        return
    number, visible = int(os.environ["LOCAL_RANK"]), os.environ.get(_VISIBLE)
    if visible is None:
        os.environ[_VISIBLE] = str(number)
    elif len(devices := visible.split(",")) > number:
        os.environ[_VISIBLE] = devices[number]


def launched_rank() -> int:
    """The rank that torchrun has given this process; 0 if torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
