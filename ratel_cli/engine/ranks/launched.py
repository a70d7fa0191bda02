"""Which rank this process is, before torch is imported."""

from __future__ import annotations

import os

from ratel_cli.errors import BadInput

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class OfAllRanks(BadInput):
    """Bad input that all ranks find."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.reported_by = 0


class RanksEnded(Exception):
    """The ranks that a command has started have ended, and have said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_local_ranks() -> int:
    """How many ranks torchrun has started on this machine; 1 if it has not started this process."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_launched() else 1


def local_rank() -> int:
    """The number of this rank on its machine; 0 if torchrun has not started this process."""
    return int(os.environ["LOCAL_RANK"]) if is_launched() else 0


def restart_count() -> int:
    """How often torchrun has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def see_own_gpu() -> None:
    """Let each of several ranks on a machine see one GPU: of those that are visible, the one with its local rank's
    number. Call it before torch is imported."""
    if num_local_ranks() == 1:
        return
    number, visible = local_rank(), os.environ.get(_VISIBLE)
    if visible is None:
        os.environ[_VISIBLE] = str(number)
    elif len(devices := visible.split(",")) > number:
        os.environ[_VISIBLE] = devices[number]


def num_launched_ranks() -> int:
    """How many ranks torchrun has started on all machines; 1 if it has not started this process."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def launched_rank() -> int:
    """The rank that torchrun has given this process; 0 if torchrun has not started it."""
    return int(os.environ["RANK"]) if is_launched() else 0
