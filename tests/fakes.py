"""Fakes that tests pass to the code under test, instead of patching it, and small helpers.

`FaultyQueue` is an I/O queue that fails on purpose: the real queue and the real lane of the threads' engine, with the
call to the kernel replaced. Faults are given by the number of the call, counted from 0 over both directions. With the
default depth of 1 the calls of a direction are made in the order in which they were submitted.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import LanedQueue
from ratel_cli.io.requests import Direction
from ratel_cli.io.threads import ThreadedLane, transfer_with_kernel
from ratel_cli.io.views import VALUE_DTYPES, view
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.layout import Field

REQUEST_BYTES = 16 * PAGE_BYTES
"""Small, so that a few bytes are cut into many requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one call. Fields may be combined. The delay comes first."""

    delay_seconds: float = 0.0
    hangs: bool = False  # until release(); as in the kernel, the file stays open and locked until then
    error_number: int | None = None  # raised as OSError: errno.EIO, errno.ENOSPC, errno.EAGAIN ...
    failure: Exception | None = None  # raised as it is: a bug in a worker thread
    short_bytes: int | None = None  # only this many bytes are moved
    flipped_bit: int | None = None  # of the bytes moved: wrong in memory after a read, on the drive after a write
    misplaced_bytes: int = 0  # the bytes are read or written this much further in the file
    dropped: bool = False  # nothing is moved, but success is reported: stale bytes stay


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to a FaultyQueue, faulty or not."""

    direction: Direction
    fd: int
    offset: int
    num_bytes: int


class FaultyQueue(LanedQueue):
    """An IoQueue over real files, or over `files`, a map from descriptors to contents that need not exist on disk.

    `faults` maps the number of a call to its fault. Every call from number `from_call` on has the fault `lasting`.
    `shuffle_seed` delays calls at random, so that with a depth above 1 they complete in another order than they were
    submitted in.
    """

    def __init__(
        self,
        faults: Mapping[int, Fault] | None = None,
        *,
        from_call: int = 0,
        lasting: Fault | None = None,
        files: dict[int, bytearray] | None = None,
        shuffle_seed: int | None = None,
        request_bytes: int = 1 << 20,
        depth: int = 1,
        timeout_seconds: float = 10.0,
    ) -> None:
        self.calls: list[Call] = []
        self._faults = dict(faults or {})
        self._from_call = from_call
        self._lasting = lasting
        self._files = files if files is not None else {}
        self._random = random.Random(shuffle_seed) if shuffle_seed is not None else None
        self._lock = Lock()
        self._released = Event()
        super().__init__(
            "threads",
            lambda direction: ThreadedLane(
                direction, depth=depth, timeout_seconds=timeout_seconds, transfer=self._transfer
            ),
            request_bytes=request_bytes,
        )

    def release(self) -> None:
        """Let every call that hangs continue."""
        self._released.set()

    def _transfer(self, direction: Direction, fd: int, memory: memoryview, offset: int) -> int:
        with self._lock:
            number = len(self.calls)
            self.calls.append(Call(direction=direction, fd=fd, offset=offset, num_bytes=len(memory)))
            lasting = self._lasting if number >= self._from_call else None
            fault = self._faults.get(number, lasting or Fault())
            delay_seconds = fault.delay_seconds + (self._random.uniform(0, 0.003) if self._random else 0.0)
        if delay_seconds:
            time.sleep(delay_seconds)
        if not fault.hangs:
            return self._move(fault, direction, fd, memory, offset)
        held = fd if fd in self._files else os.dup(fd)
        try:
            self._released.wait()
            return self._move(fault, direction, held, memory, offset)
        finally:
            if held != fd:
                os.close(held)

    def _move(self, fault: Fault, direction: Direction, fd: int, memory: memoryview, offset: int) -> int:
        if fault.error_number is not None:
            raise OSError(fault.error_number, os.strerror(fault.error_number))
        if fault.failure is not None:
            raise fault.failure
        part = memory if fault.short_bytes is None else memory[: fault.short_bytes]
        if fault.dropped:
            return len(part)
        if fault.flipped_bit is not None and direction == "write":
            part = _copy_of(part)  # others may be reading the memory
            _flip(part, fault.flipped_bit)
        offset += fault.misplaced_bytes
        if fd not in self._files:
            num_bytes = transfer_with_kernel(direction, fd, part, offset)
        else:
            with self._lock:
                num_bytes = _transfer_in_memory(self._files[fd], direction, part, offset)
        if fault.flipped_bit is not None and direction == "read":
            _flip(part, fault.flipped_bit)
        return num_bytes


def _copy_of(memory: memoryview) -> memoryview:
    """A copy on pages of its own, for O_DIRECT."""
    copy = memoryview(mmap.mmap(-1, len(memory)))
    copy[:] = memory
    return copy


def _flip(memory: memoryview, bit: int) -> None:
    memory[bit // 8 % len(memory)] ^= 1 << bit % 8


class FaultyBarrier(Barrier):
    """A drive that makes bytes durable, except in one call. A second try would report a false success.

    `failing_call` is the number of the call that fails, from 0. `fails` names the method whose next call fails.
    """

    def __init__(self, failing_call: int | None = None) -> None:
        self.fails: str | None = None
        self.calls: list[str] = []
        self._failing_call = failing_call

    def sync(self, fd: int) -> None:
        self._call("sync")
        super().sync(fd)

    def write_through(self, fd: int, offset: int, page: memoryview) -> None:
        self._call("write_through")
        super().write_through(fd, offset, page)

    def _call(self, name: str) -> None:
        number = len(self.calls)
        self.calls.append(name)
        if name == self.fails or number == self._failing_call:
            self.fails = None
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def _transfer_in_memory(contents: bytearray, direction: Direction, memory: memoryview, offset: int) -> int:
    if direction == "read":
        found = contents[offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)
    contents.extend(bytes(max(0, offset + len(memory) - len(contents))))
    contents[offset : offset + len(memory)] = memory
    return len(memory)


def open_direct(path: Path) -> int:
    """Open a file with O_DIRECT where the file system has it, so that the kernel checks the alignment."""
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def filled(pool: BufferPool, contents: bytes) -> memoryview:
    """A leased buffer with these contents."""
    memory = pool.lease(len(contents), "test").memory
    memory[:] = contents
    return memory


@contextmanager
def directory_in_memory(otherwise: Path) -> Iterator[Path]:
    """A directory on tmpfs if there is one, else `otherwise`. For tests that open thousands of stores."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="ratel-test-", dir=shared) as name:
        yield Path(name)


def values_of(memory: memoryview, field: Field) -> torch.Tensor:
    """Memory as the values of a field."""
    return view(memory, VALUE_DTYPES[field.dtype])
