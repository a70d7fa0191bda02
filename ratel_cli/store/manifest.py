"""The manifest: one page that says which generation of the store is valid, and all that is needed to resume from it.

The manifest of generation g goes to page g % 2 of the first data file, so a torn write can only hurt the new manifest
and leaves the one before it. `choose_manifest` is the reading side: the newest valid manifest counts.
docs/store-format.md has the page byte by byte.

A page: magic 8 | format version 4 | payload length 4 | store id 16 | generation 8 | SHA-256 of the previous page 32 |
payload (JSON) | zeros | CRC-32 of all before it 4. Magic, version and CRC keep their places in every later format, so
that an older program can distinguish "another format" from "torn".

Invariant: `decode_manifest(encode_manifest(m)) == m`, and no page with any changed bit decodes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Final, TypeVar

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.json_fields import JsonFields, checked_integer, checked_list, checked_text, read_as
from ratel_cli.sizes import BLOCK_ALIGNMENT, PAGE_BYTES, VALUE_TYPES
from ratel_cli.store.layout import Field, Geometry, RankSlice, Record, StoredBlock

FORMAT_VERSION: Final = 5
"""Formats 1 to 4 were never released."""
MANIFEST_MAGIC: Final = b"RATELMAN"
_HEAD: Final = struct.Struct("<8sII16sQ32s")
CRC: Final = struct.Struct("<I")
_MAX_PAYLOAD_BYTES: Final = PAGE_BYTES - _HEAD.size - CRC.size
EMPTY_PAGE: Final = bytes(PAGE_BYTES)
NO_PREVIOUS: Final = bytes(32)
_LARGEST: Final = 1 << 53
_MAX_BLOCKS: Final = 1 << 16
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """What a store belongs to. A run can resume only with the same model, settings, data and seed."""

    model_hash: str
    config_hash: str
    data_hash: str
    seed: int
    software: str
    """Versions and instruction set. With other software resuming is valid, but not bit-exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    step: int
    """Steps committed, which is also the position in the data. 0 after the import."""
    updates: int
    """AdamW updates applied. Fewer than steps if float16 skipped some."""
    loss_scale: float
    good_steps: int
    """Steps since the loss scale last changed."""
    tokens: int
    """Tokens trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEntry:
    """What a manifest records of one generation: of the current one, the one before it, and each pinned one."""

    slot: int
    progress: Progress
    root_checksum: str
    """Checksum of the slot's checksum table. Empty: this store has no checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One committed state of the store."""

    store_id: bytes
    generation: int
    """Counts manifests, not steps: pinning a generation also makes a manifest."""
    previous_sha256: bytes
    """SHA-256 of the page of the manifest before this one."""
    identity: StoreIdentity
    geometry: Geometry
    progress: Progress
    """Progress of the current generation."""
    slot: int
    """Slot of the current generation."""
    pins: tuple[GenerationEntry, ...]
    """The pinned generations. Their slots are never overwritten."""
    step_in_place: int | None
    """The step that is overwriting the only slot. While it is set, the slot holds no whole step."""
    root_checksum: str
    """Root of the current generation's checksum table."""
    frozen_checksum: str
    """Root of the frozen region's checksum table, the same in all manifests. Empty: there are no frozen blocks, or no
    checksums."""
    before: GenerationEntry | None
    """The generation before the current one. The next step overwrites its slot unless it is pinned. Until then the
    store can fall back on it."""

    @property
    def current(self) -> GenerationEntry:
        """The current generation."""
        return GenerationEntry(slot=self.slot, progress=self.progress, root_checksum=self.root_checksum)

    def at(self, entry: GenerationEntry) -> Manifest:
        """This manifest with another generation as the current one."""
        return replace(self, slot=entry.slot, progress=entry.progress, root_checksum=entry.root_checksum)


def encode_manifest(manifest: Manifest) -> bytes:
    """The page for a manifest. Raises EnvironmentFailure if the manifest does not fit on a page."""
    payload = json.dumps(
        {
            "identity": asdict(manifest.identity),
            "geometry": _geometry_row(manifest.geometry),
            "progress": _progress_row(manifest.progress),
            "slot": manifest.slot,
            "pins": [_entry_row(entry) for entry in manifest.pins],
            "step_in_place": manifest.step_in_place,
            "root_checksum": manifest.root_checksum,
            "frozen_checksum": manifest.frozen_checksum,
            "before": None if manifest.before is None else _entry_row(manifest.before),
        },
        separators=(",", ":"),
    ).encode("ascii")
    if len(payload) > _MAX_PAYLOAD_BYTES:
        raise EnvironmentFailure(
            f"the store's manifest needs {len(payload)} bytes, but its page has only {_MAX_PAYLOAD_BYTES}: "
            f"{len(manifest.pins)} saved steps, {len(manifest.geometry.blocks)} blocks",
            "save fewer steps: lower save_total_limit",
        )
    head = _HEAD.pack(
        MANIFEST_MAGIC, FORMAT_VERSION, len(payload), manifest.store_id, manifest.generation, manifest.previous_sha256
    )
    body = (head + payload).ljust(PAGE_BYTES - CRC.size, b"\0")
    return body + CRC.pack(zlib.crc32(body))


def decode_manifest(page: bytes) -> Manifest | None:
    """The manifest on a page, or None if the page is torn or damaged.

    Raises BadInput for a page of another format, and IntegrityFailure for an intact page without a readable manifest.
    """
    body, (crc,) = page[: -CRC.size], CRC.unpack(page[-CRC.size :])
    if len(page) != PAGE_BYTES or zlib.crc32(body) != crc:
        return None
    magic, version, payload_bytes, store_id, generation, previous_sha256 = _HEAD.unpack(body[: _HEAD.size])
    if magic != MANIFEST_MAGIC:
        return None
    if version != FORMAT_VERSION:
        raise BadInput(
            f"format_version: the store has format {version}, but this program reads format {FORMAT_VERSION}",
            "resume with the version of Ratel that wrote it, or start over with --resume no",
        )
    try:
        payload = JsonFields(json.loads(body[_HEAD.size : _HEAD.size + payload_bytes]))
        before = payload.value("before")
        return Manifest(
            store_id=store_id,
            generation=generation,
            previous_sha256=previous_sha256,
            identity=read_as(StoreIdentity, payload.value("identity")),
            geometry=_geometry(payload.fields("geometry")),
            progress=_progress(payload.items("progress")),
            slot=payload.integer("slot"),
            pins=tuple(_entry(row, "pins") for row in payload.items("pins")),
            step_in_place=None if payload.value("step_in_place") is None else payload.integer("step_in_place"),
            root_checksum=payload.text("root_checksum"),
            frozen_checksum=payload.text("frozen_checksum"),
            before=None if before is None else _entry(before, "before"),
        )
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as exc:
        raise IntegrityFailure(f"the store's manifest is intact but cannot be read: {exc}") from exc


def choose_manifest(pages: Sequence[bytes]) -> tuple[Manifest | None, bool]:
    """The manifest that counts, or None if no import was committed; and True if a page is damaged.

    A power cut during a commit leaves one damaged and one valid page. The older generation is intact. A cut during the
    first commit leaves one damaged and one empty page: there is no older generation.

    Raises IntegrityFailure if both pages are damaged, or if two valid ones do not follow each other.
    """
    decoded = [(decode_manifest(page), page) for page in pages if page != EMPTY_PAGE]
    valid = sorted(
        ((manifest, page_sha256(page)) for manifest, page in decoded if manifest), key=lambda pair: pair[0].generation
    )
    damaged = len(decoded) - len(valid)
    if damaged == len(pages):
        raise IntegrityFailure(
            "both manifests of the store are damaged: no generation of it can be trusted",
            "start over with --resume no; exported models are not affected",
        )
    if not valid:
        return None, damaged > 0
    newest, _ = valid[-1]
    if len(valid) == 2 and newest.previous_sha256 != valid[0][1]:
        raise IntegrityFailure(
            f"the manifests of generations {valid[0][0].generation} and {newest.generation} do not follow each other: "
            "a drive lost a write that it had confirmed, or files of two stores were mixed",
            "restore a snapshot with `ratel restore CONFIG`, or start over with --resume no; exported models are not "
            "affected",
        )
    return newest, damaged > 0


def first_manifest(store_id: bytes, identity: StoreIdentity, geometry: Geometry) -> Manifest:
    """The manifest of a new store. Raises EnvironmentFailure if a later manifest of it may not fit on its page."""
    first = Manifest(
        store_id=store_id,
        generation=0,
        previous_sha256=NO_PREVIOUS,
        identity=identity,
        geometry=geometry,
        progress=Progress(step=0, updates=0, loss_scale=1.0, good_steps=0, tokens=0),
        slot=0,
        pins=(),
        step_in_place=None,
        root_checksum="",
        frozen_checksum="",
        before=None,
    )
    progress = Progress(step=_LARGEST, updates=_LARGEST, loss_scale=1 / 3, good_steps=_LARGEST, tokens=_LARGEST)
    largest = [
        GenerationEntry(slot=slot, progress=progress, root_checksum="0" * 32) for slot in range(geometry.num_slots)
    ]
    encode_manifest(
        replace(
            first,
            progress=progress,
            pins=tuple(largest[2:]),
            step_in_place=_LARGEST,
            root_checksum="0" * 32,
            frozen_checksum="0" * 32,
            before=largest[0],
        )
    )
    return first


def page_sha256(page: bytes) -> bytes:
    """What the next manifest records of this one."""
    return hashlib.sha256(page).digest()


def _geometry_row(geometry: Geometry) -> dict[str, object]:
    kinds, records = _distinct(geometry.blocks), _distinct(block.record for block in geometry.blocks)
    return {
        "records": [[_field_row(field) for field in record.fields] for record in records],
        "kinds": [
            [block.num_elements, records.index(block.record), block.is_frozen, block.is_in_files] for block in kinds
        ],
        "blocks": _run_lengths([kinds.index(block) for block in geometry.blocks]),
        "num_slots": geometry.num_slots,
        "shares": geometry.shares,
        "stripe_bytes": geometry.stripe_bytes,
        "in_place": geometry.overwrites,
        "chunk_elements": geometry.chunk_elements,
        "slice": [geometry.rank_slice.rank, geometry.rank_slice.size],
        "list_bytes": geometry.list_bytes,
    }


def _geometry(values: JsonFields) -> Geometry:
    records = [_record(row) for row in values.items("records")]
    kinds = [_stored_block(row, records) for row in values.items("kinds")]
    blocks: list[StoredBlock] = []
    runs = values.integers("blocks")
    for count, kind in zip(runs[::2], runs[1::2], strict=True):
        if not 0 <= count <= _MAX_BLOCKS - len(blocks) or not 0 <= kind < len(kinds):
            raise ValueError("blocks is not valid")
        blocks.extend([kinds[kind]] * count)
    shares = values.integers("shares")
    num_slots, stripe_bytes = values.integer("num_slots"), values.integer("stripe_bytes")
    if num_slots < 1 or (num_slots == 1) != values.flag("in_place") or min(shares, default=0) < 1:
        raise ValueError("num_slots, in_place or shares is not valid")
    if stripe_bytes <= 0 or stripe_bytes % PAGE_BYTES:
        raise ValueError("stripe_bytes is not a number of pages")
    chunk_elements = values.integer("chunk_elements")
    if chunk_elements < 0 or chunk_elements % BLOCK_ALIGNMENT:
        raise ValueError("chunk_elements is not valid")
    rank, size = values.integers("slice")
    if not 0 <= rank < size:
        raise ValueError("slice is not valid")
    list_bytes = values.integer("list_bytes")
    if list_bytes < 0 or list_bytes % PAGE_BYTES or any(block.is_in_files for block in blocks) != bool(list_bytes):
        raise ValueError("list_bytes is not valid")
    return Geometry(
        blocks=tuple(blocks),
        num_slots=num_slots,
        shares=tuple(shares),
        stripe_bytes=stripe_bytes,
        chunk_elements=chunk_elements,
        rank_slice=RankSlice(rank, size),
        list_bytes=list_bytes,
    )


def _field_row(field: Field) -> list[str | int]:
    """A field that has as many values in every block has one entry more, their number."""
    return [field.name, field.dtype, field.per, *([] if field.fixed is None else [field.fixed])]


def _record(row: object) -> Record:
    fields: list[Field] = []
    for each in checked_list(row, "records"):
        name, dtype, *sizes = checked_list(each, "a field of records")
        field = Field(
            checked_text(name, "a name in records"),
            VALUE_TYPES[checked_text(dtype, "a type in records")],
            *(checked_integer(size, "a size in records") for size in sizes),
        )
        if not sizes or field.per < 1 or (field.fixed is not None and field.fixed < 1):
            raise ValueError("a size in records is not valid")
        fields.append(field)
    if not fields:
        raise ValueError("a record has no fields")
    return Record(tuple(fields))


def _stored_block(row: object, records: Sequence[Record]) -> StoredBlock:
    elements, record, *flags = checked_list(row, "kinds")
    elements, record = checked_integer(elements, "elements of kinds"), checked_integer(record, "a record of kinds")
    is_frozen, is_in_files = (each is True for each in flags)
    known = [False, False], [True, False], [True, True]
    if elements < 0 or not 0 <= record < len(records) or flags not in known:
        raise ValueError("kinds is not valid")
    return StoredBlock(elements, records[record], is_frozen, is_in_files)


def _distinct(values: Iterable[_Value]) -> list[_Value]:
    """Each value once, in the order in which they first come."""
    return list(dict.fromkeys(values))


def _run_lengths(values: Sequence[int]) -> list[int]:
    """Runs of equal values: count, value, count, value. Layers are alike, so a hundred of them fit on the page."""
    return [number for value, run in groupby(values) for number in (len(list(run)), value)]


def _progress_row(progress: Progress) -> list[int | float]:
    return [progress.step, progress.updates, progress.loss_scale, progress.good_steps, progress.tokens]


def _progress(row: Sequence[object]) -> Progress:
    if len(row) != len(fields(Progress)) or not isinstance(row[2], int | float) or not math.isfinite(row[2]):
        raise ValueError("progress is not five numbers")
    return Progress(
        step=checked_integer(row[0], "step"),
        updates=checked_integer(row[1], "updates"),
        loss_scale=float(row[2]),
        good_steps=checked_integer(row[3], "good_steps"),
        tokens=checked_integer(row[4], "tokens"),
    )


def _entry_row(entry: GenerationEntry) -> list[int | float | str]:
    return [entry.slot, *_progress_row(entry.progress), entry.root_checksum]


def _entry(row: object, key: str) -> GenerationEntry:
    slot, *progress, root = checked_list(row, key)
    return GenerationEntry(
        slot=checked_integer(slot, f"the slot in {key}"),
        progress=_progress(progress),
        root_checksum=checked_text(root, f"the checksum in {key}"),
    )
