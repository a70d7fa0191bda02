"""What the tensor cache (engine/cache/tensor_cache.py) knows of saved tensors: values without behaviour of their
own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ratel_cli.engine.cache.offloader import Offloaded, TensorLayout
from ratel_cli.engine.device.device import Moment


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
    num_bytes: int = 0
    """What may leave of what it saves."""
    is_read_ahead: bool = False
    """Whether the reads of all its entries were started."""


@dataclass(slots=True)
class Moved:
    """What went away of one forward, to host memory or to the drives."""

    num_bytes: int = 0
    waits: list[tuple[Moment, Moment]] = field(default_factory=list)
    """One pair for each stall of its backward: when the computing before it was done, and when the tensor was back."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds for which computing waited."""
        return sum(arrived() - computed() for computed, arrived in self.waits)


@dataclass(slots=True, eq=False)
class SavedPass:
    """One forward, and what is known of it."""

    began: Moment
    scope: SavedScope
    number: int = 0
    """Number of its micro-batch in a schedule."""
    saved_bytes: int = 0
    """What may leave of what it saves."""
    in_memory: Moved = field(default_factory=Moved)
    on_drives: Moved = field(default_factory=Moved)
    ended: Moment | None = None
    """When its forward ended."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When its writes began and ended."""

    @property
    def num_bytes(self) -> int:
        """What went away."""
        return self.in_memory.num_bytes + self.on_drives.num_bytes

    @property
    def forward_seconds(self) -> float:
        return 0.0 if self.ended is None else self.ended() - self.began()


@dataclass(slots=True, eq=False, kw_only=True)
class SavedStorage(Offloaded):
    """The storage of saved tensors."""

    known: StorageWeakRef
    """Weak reference to the storage. As long as it exists, no other storage has the same address."""
    version: int
    scope: SavedScope
    of_pass: SavedPass
    tensor: torch.Tensor | None
    """A tensor that has the storage, while that is in its place."""
    restored: torch.Tensor | None = None
    """Its bytes, flat uint8 `[bytes]`, when they are back."""
    num_users: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.known.cdata, self.version

    @property
    def num_bytes(self) -> int:
        return self.sizes[0]

    @property
    def moved(self) -> Moved:
        """What its pass has moved to where the storage goes: host memory or the drives."""
        return self.of_pass.in_memory if self.place is None else self.of_pass.on_drives

    @property
    def is_away(self) -> bool:
        """Whether it must come back to be used."""
        return self.tensor is None and self.restored is None

    @property
    def is_on_drives(self) -> bool:
        """Whether only the drives have its bytes."""
        return self.is_away and not self.uploads and self.lease is None


class SavedTensor:
    """What autograd has of a tensor. It stays where it is, unless it is a `SavedView`."""

    def __init__(self, tensor: torch.Tensor, scope: SavedScope | None = None) -> None:
        """`scope`: the one that saves it; None if it is not one of a forward's activations."""
        self.scope = scope
        self._tensor, self._version = tensor.detach(), tensor._version

    def unchanged(self) -> torch.Tensor:
        """The tensor; an empty one of a `SavedView`. Raises RuntimeError, as torch does, if it was changed in place."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation"
            )
        return self._tensor


class SavedView(SavedTensor):
    """What autograd has of a tensor in the cache."""

    def __init__(self, entry: SavedStorage, tensor: torch.Tensor, given_up: deque[SavedStorage]) -> None:
        """`given_up` gets the entry when autograd needs the tensor no more."""
        self.entry, self.layout, self._given_up = entry, TensorLayout.of(tensor), given_up
        entry.num_users += 1
        super().__init__(tensor, entry.scope)
        self._tensor.data = tensor.new_empty(0)  # still counts the tensor's changes, and holds none of its memory

    def __del__(self) -> None:
        self._given_up.append(self.entry)  # at any moment: the next call of the cache looks at it
