"""Where a logical address lies in a set of files: striping, as pure arithmetic.

Used by `store` and `scratch`, which put one file on each NVMe drive. Logical addresses run from 0;
consecutive stripes go to the files in turn, so a large transfer keeps every drive busy.

Invariant: `StripeMap.pieces` is a bijection between logical bytes and bytes behind the files'
headers, and it yields the ranges in logical order, so a caller can walk its memory beside them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Consecutive bytes of one file."""

    file_index: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StripeMap:
    """The rule by which a logical address range is spread over `num_files` files."""

    num_files: int
    stripe_bytes: int
    header_bytes: int

    def __post_init__(self) -> None:
        assert self.num_files > 0 and self.stripe_bytes > 0 and self.header_bytes >= 0

    def pieces(self, offset: int, num_bytes: int) -> tuple[FileRange, ...]:
        """The file ranges that hold logical bytes ``[offset, offset + num_bytes)``, in order."""
        assert offset >= 0 and num_bytes >= 0
        if num_bytes == 0:
            return ()
        if self.num_files == 1:  # stripes of one file are neighbours: no reason to cut
            return (FileRange(file_index=0, offset=self.header_bytes + offset, num_bytes=num_bytes),)
        ranges: list[FileRange] = []
        position, end = offset, offset + num_bytes
        while position < end:
            stripe, inside = divmod(position, self.stripe_bytes)
            row, file_index = divmod(stripe, self.num_files)
            length = min(self.stripe_bytes - inside, end - position)
            file_offset = self.header_bytes + row * self.stripe_bytes + inside
            ranges.append(FileRange(file_index=file_index, offset=file_offset, num_bytes=length))
            position += length
        return tuple(ranges)

    def file_bytes(self, logical_bytes: int) -> tuple[int, ...]:
        """The size of each file, header included, when `logical_bytes` are stored."""
        full_stripes, rest = divmod(logical_bytes, self.stripe_bytes)
        rows, extra_files = divmod(full_stripes, self.num_files)
        sizes: list[int] = []
        for file_index in range(self.num_files):
            payload = (rows + (file_index < extra_files)) * self.stripe_bytes
            sizes.append(self.header_bytes + payload + (rest if file_index == extra_files else 0))
        return tuple(sizes)
