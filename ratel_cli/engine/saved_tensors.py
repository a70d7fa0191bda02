"""What the tensor cache (engine/tensor_cache.py) knows of saved tensors: values without behaviour of their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.engine.device.device import Download
from ratel_cli.io.buffers import Lease
from ratel_cli.io.scratch import ScratchPlace
from ratel_cli.io.tickets import Ticket


@dataclass(slots=True)
class CacheCounts:
    """Bytes since the cache was opened."""

    stayed: int = 0
    """Saved, and left where they were."""
    resident: int = 0
    """Downloaded to host memory and left there."""
    written: int = 0
    read: int = 0
    forwarded: int = 0
    """Restored from a buffer, before or while they were written."""


@dataclass(slots=True, eq=False)
class SavedScope:
    """What one block of one pass saves."""

    before: SavedScope | None
    entries: list[SavedStorage] = field(default_factory=list)
    is_fetched: bool = False


@dataclass(slots=True, eq=False)
class SavedPass:
    """One forward, and what is known of it."""

    began: float
    scope: SavedScope
    number: int = 0
    """Of its micro-batch, in a schedule."""
    saved_bytes: int = 0
    """What went away, to host memory or to the drives."""
    drive_bytes: int = 0
    """What of it went to the drives."""
    seconds: float | None = None
    """What its forward took."""
    stalled_seconds: float = 0.0
    """For which its backward waited for reads."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When its writes began and ended."""


@dataclass(slots=True, eq=False)
class SavedStorage:
    """The storage of saved tensors."""

    known: StorageWeakRef
    """As long as it is there, no other storage has the same address."""
    version: int
    num_bytes: int
    scope: SavedScope
    of_pass: SavedPass
    tensor: torch.Tensor | None
    """One that has the storage, while it is in its place or is back."""
    lease: Lease | None
    download: Download | None
    place: ScratchPlace | None
    """On the drives; None where host memory has it."""
    write: Ticket | None = None
    read: Ticket | None = None
    num_users: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.known.cdata, self.version


class SavedView:
    """What autograd has of a tensor in the cache."""

    def __init__(self, entry: SavedStorage, tensor: torch.Tensor, given_up: deque[SavedStorage]) -> None:
        """`given_up` gets the entry when autograd needs the tensor no more."""
        self.entry, self._given_up = entry, given_up
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        entry.num_users += 1

    def __del__(self) -> None:
        self._given_up.append(self.entry)  # at any moment: the next call of the cache looks at it


class StayingTensor:
    """What autograd has of a tensor that stays."""

    def __init__(self, tensor: torch.Tensor, scope: SavedScope | None = None) -> None:
        """`scope`: the one that saves it; None if it is not one of a forward's activations."""
        self.scope = scope
        self._tensor, self._version = tensor.detach(), tensor._version

    def unchanged(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError, as torch does, if it was changed in place."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        return self._tensor
