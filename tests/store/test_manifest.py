"""Manifests: every manifest is read as it was written, every damage is noticed, and the newest valid one counts."""

from __future__ import annotations

import json
import random
import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.errors import BadInput, EnvironmentFailure, IntegrityFailure
from ratel_cli.schedule.rules import ADAMW, FROZEN
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.layout import Geometry, StoredBlock
from ratel_cli.store.manifest import (
    EMPTY_PAGE,
    FORMAT_VERSION,
    NO_PREVIOUS,
    GenerationEntry,
    Manifest,
    Progress,
    StoreIdentity,
    choose_manifest,
    decode_manifest,
    encode_manifest,
    page_sha256,
)

COUNT = st.integers(0, 2**53)


def stored(*elements: int) -> tuple[StoredBlock, ...]:
    """Blocks of these sizes: in bf16, in fp32 and frozen by turns."""
    kinds = [(ADAMW.record("bfloat16"), False), (ADAMW.record("float32"), False), (FROZEN.record("bfloat16"), True)]
    return tuple(StoredBlock(size, *kinds[size // 2048 % 3]) for size in elements)


PROGRESS = st.builds(
    Progress, step=COUNT, updates=COUNT, loss_scale=st.floats(0, 2.0**32), good_steps=COUNT, tokens=COUNT
)
FIRST = Manifest(
    store_id=bytes(range(16)),
    generation=1,
    previous_sha256=NO_PREVIOUS,
    identity=StoreIdentity(
        model_hash="m" * 64, config_hash="c" * 64, data_hash="d" * 64, seed=1, software="\x1b[31m\u00e9"
    ),
    geometry=Geometry(
        blocks=stored(4096, *[8192] * 200, 0),
        num_slots=3,
        shares=(3, 1),
        stripe_bytes=4096,
        chunk_elements=2048,
    ),
    progress=Progress(step=0, updates=0, loss_scale=1.0, good_steps=0, tokens=0),
    slot=0,
    pins=(),
    step_in_place=None,
    root_checksum="",
    frozen_checksum="",
    before=None,
)
ENTRIES = st.builds(
    GenerationEntry, slot=st.integers(0, 9), progress=PROGRESS, root_checksum=st.sampled_from(["", "ab" * 16])
)


def following(manifest: Manifest) -> Manifest:
    previous = page_sha256(encode_manifest(manifest))
    return replace(manifest, generation=manifest.generation + 1, previous_sha256=previous)


def with_crc(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def payload_of(manifest: Manifest) -> dict[str, Any]:
    page = encode_manifest(manifest)
    return json.loads(page[page.index(b"{") : page.rindex(b"}") + 1])


def page_with(payload: dict[str, Any], *, version: int = FORMAT_VERSION) -> bytes:
    """The page of the first manifest, with another payload or version."""
    page, text = encode_manifest(FIRST), json.dumps(payload).encode()
    head = page[:8] + struct.pack("<II", version, len(text)) + page[16 : page.index(b"{")]
    return with_crc((head + text).ljust(PAGE_BYTES - 4, b"\0"))


@given(
    progress=PROGRESS,
    slot=st.integers(0, 9),
    pins=st.lists(ENTRIES, max_size=8),
    before=st.none() | ENTRIES,
    in_place=st.none() | COUNT,
    elements=st.lists(st.sampled_from([0, 2048, 4096]), max_size=40),
)
def test_a_manifest_is_decoded_as_it_was_encoded(
    progress: Progress,
    slot: int,
    pins: list[GenerationEntry],
    before: GenerationEntry | None,
    in_place: int | None,
    elements: list[int],
) -> None:
    manifest = replace(
        FIRST,
        progress=progress,
        slot=slot,
        pins=tuple(pins),
        step_in_place=in_place,
        geometry=replace(FIRST.geometry, blocks=stored(*elements)),
        root_checksum="ab" * 16,
        before=before,
    )
    page = encode_manifest(manifest)
    assert len(page) == PAGE_BYTES
    assert decode_manifest(page) == manifest


def test_every_changed_bit_is_noticed() -> None:
    page = encode_manifest(FIRST)
    for bit in [*range(640), *random.Random(0).sample(range(8 * PAGE_BYTES), 500), 8 * PAGE_BYTES - 1]:
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_manifest(bytes(damaged)) is None, bit


def test_every_mixture_of_sectors_is_noticed() -> None:
    old, new = (
        encode_manifest(FIRST),
        encode_manifest(replace(following(FIRST), progress=replace(FIRST.progress, step=1))),
    )
    for mask in range(1, 255):
        mixed = b"".join((new if mask >> i & 1 else old)[512 * i : 512 * (i + 1)] for i in range(8))
        assert decode_manifest(mixed) is None or mixed in (old, new), mask


def test_the_newest_counts() -> None:
    first, second = encode_manifest(FIRST), encode_manifest(following(FIRST))
    assert choose_manifest((EMPTY_PAGE, first)) == (FIRST, False)
    assert choose_manifest((second, first)) == (following(FIRST), False)
    assert choose_manifest((first, second)) == (following(FIRST), False)


def test_if_one_is_torn_the_other_counts() -> None:
    first, second = encode_manifest(FIRST), encode_manifest(following(FIRST))
    assert choose_manifest((second[:2048] + bytes(2048), first)) == (FIRST, True)


def test_before_the_first_commit_there_is_none() -> None:
    assert choose_manifest((EMPTY_PAGE, EMPTY_PAGE)) == (None, False)
    assert choose_manifest((EMPTY_PAGE, encode_manifest(FIRST)[:512].ljust(PAGE_BYTES, b"\0"))) == (None, True)


def test_two_torn_ones_are_an_error() -> None:
    torn = encode_manifest(FIRST)[:-1] + b"?"
    with pytest.raises(IntegrityFailure, match="both manifests"):
        choose_manifest((torn, torn))


def test_a_missing_manifest_between_two_is_noticed() -> None:
    third = following(following(FIRST))
    with pytest.raises(IntegrityFailure, match="generations 1 and 3 do not follow"):
        choose_manifest((encode_manifest(FIRST), encode_manifest(third)))


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, FORMAT_VERSION + 1, 2**32 - 1])
def test_another_format_is_rejected_by_name(version: int) -> None:
    """Formats 1 to 4 were never released."""
    with pytest.raises(
        BadInput, match=f"format_version: the store has format {version}, but this program reads format 5"
    ):
        decode_manifest(page_with(payload_of(FIRST), version=version))


@pytest.mark.parametrize("key", ["shares", "chunk_elements"])
def test_a_missing_key_is_named(key: str) -> None:
    payload = payload_of(FIRST)
    del payload["geometry"][key]
    with pytest.raises(IntegrityFailure, match=f"{key} is missing"):
        decode_manifest(page_with(payload))


def test_another_magic_is_not_a_manifest() -> None:
    assert decode_manifest(with_crc(b"OTHERMAN" + encode_manifest(FIRST)[8:-4])) is None


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("slot", None, "slot is missing"),
        ("slot", "x", "slot is not a whole number"),
        ("pins", 3, "pins is not a list"),
        ("pins", [[0, 0, 0, 1.0, 0, 0, 7]], "the checksum in pins is not text"),
        ("before", 3, "before is not a list"),
        ("root_checksum", 3, "root_checksum is not text"),
        ("progress", [1], "progress is not five numbers"),
        ("identity", [], "expected an object"),
    ],
)
def test_an_unreadable_payload_is_named(key: str, value: object, reason: str) -> None:
    payload = payload_of(FIRST)
    payload.pop(key)
    with pytest.raises(IntegrityFailure, match=reason):
        decode_manifest(page_with(payload if value is None else payload | {key: value}))


def test_a_manifest_that_does_not_fit_is_an_error() -> None:
    pins = tuple(
        GenerationEntry(slot=slot, progress=replace(FIRST.progress, step=2**53), root_checksum="")
        for slot in range(300)
    )
    with pytest.raises(EnvironmentFailure, match="300 saved steps"):
        encode_manifest(replace(FIRST, pins=pins))
