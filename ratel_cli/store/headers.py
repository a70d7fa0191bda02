"""The header of each data file: two pages for manifests, and one page that identifies the file.

The manifests live in the first file. The other files leave these two pages zero. The identification says to which store
a file belongs and which number it has there, so swapped, missing and foreign directories are noticed before use.

Invariant: `existing_store` gives a reason for every file that holds, or may hold, somebody's work. Files without a
reason are empty, or left over from an import that was never committed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ratel_cli.errors import BadInput, EnvironmentFailure, RatelError
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.barrier import Barrier
from ratel_cli.store.layout import HEADER_BYTES, IDENTIFICATION_OFFSET, NUM_MANIFESTS
from ratel_cli.store.lock import DATA_FILE_NAME
from ratel_cli.store.manifest import (
    CRC,
    EMPTY_PAGE,
    FORMAT_VERSION,
    MANIFEST_MAGIC,
    Manifest,
    choose_manifest,
    decode_manifest,
)
from ratel_cli.units import counted

_MAGIC: Final = b"RATELDAT"
_IDENTIFICATION: Final = struct.Struct("<8sI16sII")
_ORDER_HINT: Final = "name the directories in the order that they had when the store was made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identification:
    """Which file of which store this is."""

    store_id: bytes
    file_index: int
    num_files: int

    def page(self) -> bytes:
        """The page as it is stored.

        Magic, format version, store id, index, number of files, zeros, CRC-32 of all before it.
        """
        fields = _IDENTIFICATION.pack(_MAGIC, FORMAT_VERSION, self.store_id, self.file_index, self.num_files)
        body = fields.ljust(PAGE_BYTES - CRC.size, b"\0")
        return body + CRC.pack(zlib.crc32(body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of one file as it was read."""

    path: Path
    manifest_pages: tuple[bytes, bytes]
    identification: Identification | None
    """Which file of which store this is; None if that page is missing or damaged."""
    is_blank: bool
    """True if all three pages are zero. A missing or empty file counts as blank."""
    is_foreign: bool
    """True if a page begins with something that Ratel never writes there, not even in a torn write."""


def read_header(path: Path) -> Header:
    """Read a data file's header, or what there is of it. Raises EnvironmentFailure if the file cannot be read."""
    pages = _read_pages(path)
    return Header(
        path=path,
        manifest_pages=(pages[0], pages[1]),
        identification=_identification(pages[NUM_MANIFESTS]),
        is_blank=all(page == EMPTY_PAGE for page in pages),
        is_foreign=any(
            page[: len(magic)] not in (magic, bytes(len(magic)))
            for page, magic in zip(pages, (MANIFEST_MAGIC, MANIFEST_MAGIC, _MAGIC), strict=True)
        ),
    )


def stored_id(directory: Path) -> bytes | None:
    """The id of the store that has its first file in a directory. A copy has the id too. None if there is none."""
    try:
        found = read_header(directory / DATA_FILE_NAME).identification
    except RatelError:
        return None
    return None if found is None else found.store_id


def existing_store(headers: Sequence[Header]) -> str | None:
    """Why these files must not be replaced unless the user asks for it. None: nothing would be lost."""
    found = [header.identification for header in headers if header.identification is not None]
    firsts = {identification.store_id for identification in found if identification.file_index == 0}
    for header in headers:
        if header.is_blank:
            continue
        if header.is_foreign:
            return f"{header.path} is not a data file of Ratel, or is damaged"
        try:
            is_committed = choose_manifest(header.manifest_pages)[0] is not None
        except RatelError:
            is_committed = True  # damaged or of another format, but somebody's
        if is_committed:
            return f"there is a store in {header.path.parent}"
        # Without an identification and a manifest: left by a power cut while the file was being made.
        if header.identification is not None and header.identification.store_id not in firsts:
            return f"{header.path} belongs to a store whose first directory is not in storage.paths"
    return None


def check_membership(headers: Sequence[Header], manifest: Manifest) -> None:
    """Raise BadInput unless the files are those of the manifest, in its order."""
    num_files = len(manifest.geometry.shares)
    if len(headers) != num_files:
        raise BadInput(
            f"storage.paths names {counted(len(headers), 'directory', 'directories')}, but the store has {num_files}"
        )
    for index, header in enumerate(headers):
        found = header.identification
        if found is None:
            raise BadInput(f"{header.path} is not a data file of Ratel, or is damaged", "check storage.paths")
        if found.store_id != manifest.store_id:
            raise BadInput(f"storage.paths: {headers[0].path} and {header.path} belong to different stores")
        if found.file_index != index:
            raise BadInput(_misplaced(header.path, found.file_index, index), _ORDER_HINT)


def check_first(headers: Sequence[Header]) -> None:
    """Raise BadInput if the first file cannot hold the manifests, because it is another file of a store."""
    found = headers[0].identification
    if found is not None and found.file_index != 0:
        raise BadInput(_misplaced(headers[0].path, found.file_index, 0), _ORDER_HINT)


def check_ours(headers: Sequence[Header]) -> None:
    """Raise BadInput if nothing in a file's header is Ratel's: a file of the user's has that name."""
    for header in headers:
        if header.is_foreign and header.identification is None:
            raise BadInput(
                f"{header.path} is not a data file of Ratel, or its first pages are damaged",
                "move the file away, so that a store can be made there; or set storage.paths to another directory",
            )


def erase_headers(fds: Sequence[int], headers: Sequence[Header], page: memoryview, barrier: Barrier) -> None:
    """Erase the headers, in an order that never shows a damaged store or half a store. In phases:

    1 the manifests, the newest of each file last: until then the store is whole, from then on there is none
    2 the identifications, the first file's last: no file ever belongs to a store whose first file is missing

    `page` is an aligned page, which is zeroed. Raises OSError.
    """
    page[:] = EMPTY_PAGE
    for fd, header in zip(fds, headers, strict=True):
        for place in sorted(range(NUM_MANIFESTS), key=lambda place: _generation(header.manifest_pages[place])):
            barrier.write_through(fd, place * PAGE_BYTES, page)
    found = [(header.identification.file_index if header.identification else 0) for header in headers]
    for index in sorted(range(len(headers)), key=lambda index: -found[index]):
        barrier.write_through(fds[index], IDENTIFICATION_OFFSET, page)


def _misplaced(path: Path, file_index: int, index: int) -> str:
    return f"storage.paths: {path} is file {file_index + 1} of its store, but is named as file {index + 1}"


def _generation(page: bytes) -> int:
    try:
        manifest = decode_manifest(page)
    except RatelError:
        manifest = None
    return manifest.generation if manifest else 0


def _identification(page: bytes) -> Identification | None:
    body, (crc,) = page[: -CRC.size], CRC.unpack(page[-CRC.size :])
    magic, _, store_id, file_index, num_files = _IDENTIFICATION.unpack(body[: _IDENTIFICATION.size])
    if zlib.crc32(body) != crc or magic != _MAGIC:
        return None
    return Identification(store_id=store_id, file_index=file_index, num_files=num_files)


def _read_pages(path: Path) -> list[bytes]:
    content = b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                content = file.read(HEADER_BYTES)
    except OSError as exc:
        raise EnvironmentFailure(f"{path}: cannot be read: {exc.strerror}", "check storage.paths") from exc
    content = content.ljust(HEADER_BYTES, b"\0")
    return [content[start : start + PAGE_BYTES] for start in range(0, HEADER_BYTES, PAGE_BYTES)]
