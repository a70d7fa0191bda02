"""Host memory for saved tensors that stay there and are never written (SSDTrain, section III-A).

    1. first step   buffers are made as tensors ask for them, within the limit; what is given back serves again
    2. settle       ends the first step: from now on there are these buffers and no more

So host memory, which is pinned where a GPU computes, is taken once. A tensor that finds no buffer goes to the drives.

Invariants: the buffers never pass the limit, and after `settle` no buffer is made.
"""

from __future__ import annotations

from ratel_cli.closing import Closing
from ratel_cli.io.buffers import BufferPool, Lease
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.units import align_up


class ResidentBuffers(Closing):
    """Buffers of a pool that are leased until the object is closed."""

    def __init__(self, pool: BufferPool, limit_bytes: int) -> None:
        """`limit_bytes`: of all buffers, each in whole pages."""
        self._pool, self._limit_bytes = pool, limit_bytes
        self._leases: list[Lease] = []
        self._is_settled = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(lease.num_bytes for lease in self._leases)

    @property
    def is_in_use(self) -> bool:
        """Whether a tensor has one."""
        return any(lease.num_users > 1 for lease in self._leases)

    def take(self, num_bytes: int) -> Lease | None:
        """A buffer of at least `num_bytes`, which serves again when its user has released it; None if there is no
        memory. Raises DoesNotFit as the pool does."""
        size_bytes = align_up(num_bytes, PAGE_BYTES)
        fitting = [each for each in self._leases if each.num_users == 1 and each.num_bytes >= size_bytes]
        smallest = min(fitting, key=lambda each: each.num_bytes, default=None)
        may_grow = not self._is_settled and self.num_bytes + size_bytes <= self._limit_bytes
        if may_grow and (smallest is None or smallest.num_bytes > size_bytes):
            smallest = self._pool.lease(size_bytes, "saved tensors that stay in RAM")
            self._leases.append(smallest)
        return None if smallest is None else smallest.share()

    def settle(self) -> None:
        """The first step has ended. Idempotent."""
        self._is_settled = True

    def close(self) -> None:
        """Give the buffers back to the pool, once no tensor has them. Idempotent."""
        while self._leases:
            self._leases.pop().release()
