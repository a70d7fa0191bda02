"""Any bytes on a manifest page, even with the right CRC, give a manifest, None or a RatelError."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.errors import RatelError
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.headers import Header, existing_store
from ratel_cli.store.manifest import EMPTY_PAGE, Manifest, choose_manifest, decode_manifest, encode_manifest
from tests.store.test_manifest import FIRST, following, page_with, payload_of, with_crc
from tests.tiers import examples

QUICK = examples(200)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**400])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
PAYLOAD = payload_of(FIRST)
PLACES = [(key,) for key in PAYLOAD] + [(key, inner) for key in ("identity", "geometry") for inner in PAYLOAD[key]]


def attempt(page: bytes) -> Manifest | None:
    try:
        return decode_manifest(page)
    except RatelError as error:
        assert error.exit_code in (2, 4)
        return None


@QUICK
@given(place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_in_the_payload(place: tuple[str, ...], value: object) -> None:
    payload = payload_of(FIRST)
    target = payload
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    manifest = attempt(page_with(payload))
    if manifest is not None:
        assert attempt(encode_manifest(manifest)) == manifest


@QUICK
@given(text=st.binary(max_size=PAGE_BYTES - 76) | st.sampled_from([b"[" * 4_000, b'{"a":' * 700]))
def test_any_payload(text: bytes) -> None:
    head = encode_manifest(FIRST)[:72]
    body = head[:12] + struct.pack("<I", len(text)) + head[16:] + text
    assert attempt(with_crc(body.ljust(PAGE_BYTES - 4, b"\0"))) is None


@QUICK
@given(page=st.binary(max_size=100).map(lambda start: start.ljust(PAGE_BYTES - 4, b"\0")), right_crc=st.booleans())
def test_any_page(page: bytes, right_crc: bool) -> None:
    assert attempt(with_crc(page) if right_crc else page + b"\1\2\3\4") is None


@QUICK
@given(length=st.integers(0, 2**32 - 1))
def test_any_length_of_the_payload(length: int) -> None:
    page = encode_manifest(FIRST)[:-4]
    attempt(with_crc(page[:12] + struct.pack("<I", length) + page[16:]))


@pytest.mark.parametrize("damage", ["cut", "bits", "sectors"])
@examples(100)
@given(data=st.data())
def test_any_damage_to_two_pages(damage: str, data: st.DataObject) -> None:
    """Of two valid pages one is damaged: the other one counts, whichever it is."""
    pages = [encode_manifest(following(FIRST)), encode_manifest(FIRST)]
    which = data.draw(st.integers(0, 1))
    pages[which] = damaged(pages[which], damage, data)
    manifest, is_damaged = choose_manifest(pages)
    assert manifest == (FIRST if which == 0 else following(FIRST))
    assert is_damaged == (pages[which] != EMPTY_PAGE)
    assert must_not_be_replaced(pages)


def damaged(page: bytes, damage: str, data: st.DataObject) -> bytes:
    if damage == "cut":
        return page[: data.draw(st.integers(0, 600))].ljust(PAGE_BYTES, b"\0")
    if damage == "bits":
        bit = data.draw(st.integers(0, 8 * PAGE_BYTES - 1))
        return page[: bit // 8] + bytes([page[bit // 8] ^ 1 << bit % 8]) + page[bit // 8 + 1 :]
    first = data.draw(st.integers(0, 1))  # this payload ends in the second sector
    return page[: 512 * first] + bytes(512) + page[512 * (first + 1) :]


def must_not_be_replaced(pages: Sequence[bytes]) -> bool:
    """True if `existing_store` finds a store in a file with these manifests."""
    header = Header(
        path=Path("store/ratel.store"),
        manifest_pages=(pages[0], pages[1]),
        identification=None,
        is_blank=False,
        is_foreign=False,
    )
    return existing_store([header]) is not None
