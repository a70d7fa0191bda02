"""Which rank this process is, before torch is imported."""

from __future__ import annotations

import os

from ratel_cli.errors import BadInput, EnvironmentFailure


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


def launched_rank() -> int:
    """The rank that torchrun has given this process; 0 if torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0
