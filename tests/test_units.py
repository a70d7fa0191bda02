"""Sizes, counts and times: read exactly and printed with three digits, also around every bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli import units
from ratel_cli.units import (
    GIB,
    KIB,
    MIB,
    align_up,
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_rate_number,
    format_seconds,
    format_token_rate,
    format_traffic,
    format_wait,
    meter,
    parse_bytes,
    sparkline,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4097, 4097),
        ("0", 0),
        ("1073741824", 2**30),
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("  1.5GiB ", 3 * GIB // 2),
        ("500MB", 500 * 10**6),
        ("500m", 500 * 10**6),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("7B", 7),
        ("2TiB", 2**41),
        ("2t", 2 * 10**12),
        # With floating point, these would be one too low.
        ("0.29GB", 290_000_000),
        ("1.001KB", 1001),
        ("4.35TB", 4_350_000_000_000),
        ("9007199254740993", 2**53 + 1),
        ("0.3B", 0),
    ],
)
def test_parse(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "-1", "1e9", "1,5GB", "1 2", "24XB", "1.GiB", ".5", "1GiB/s", "0x10", "inf", "\u0661"]
)
def test_texts_that_are_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write it like 24GiB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**80))
def test_whole_bytes_are_exact(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == parse_bytes(num_bytes) == num_bytes
    assert parse_bytes(f"{num_bytes}GiB") == num_bytes * GIB


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (KIB + 1, "1.00 KiB"),
        (9.994 * KIB, "9.99 KiB"),
        (9.996 * KIB, "10.0 KiB"),
        (99.94 * KIB, "99.9 KiB"),
        (99.96 * KIB, "100 KiB"),
        (1023 * KIB, "1023 KiB"),
        (MIB - 1, "1.00 MiB"),
        (MIB, "1.00 MiB"),
        (3 * GIB // 2, "1.50 GiB"),
        (GIB - 1, "1.00 GiB"),
        (2**40 - 1, "1.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-3 * MIB, "-3.00 MiB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (512, "512"),
        (999, "999"),
        (1000, "1.00K"),
        (1001, "1.00K"),
        (9_996, "10.0K"),
        (999_499, "999K"),
        (999_500, "1.00M"),
        (350_000_000, "350M"),
        (1_100_048_384, "1.10B"),
        (999_999_999, "1.00B"),
        (2.5e12, "2.50T"),
        (12_345e12, "12345T"),
    ],
)
def test_format_count(count: float, text: str) -> None:
    assert format_count(count) == text


@given(st.floats(min_value=1000, max_value=9e14))
def test_three_digits_and_no_more(value: float) -> None:
    for text in (format_count(value), format_bytes(value)):
        digits = re.sub(r"[^0-9]", "", text)
        assert len(digits) == 3 or (len(digits) == 4 and "." not in text), text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.0042, "4.20 ms"),
        (0.0994, "99.4 ms"),
        (0.0995, "0.10 s"),
        (0.12, "0.12 s"),
        (9.996, "10.0 s"),
        (99.4, "99.4 s"),
        (99.5, "1 min 40 s"),
        (250, "4 min 10 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (3 * 3600 + 5 * 60, "3 h 05 min"),
        (48 * 3600 - 1, "47 h 59 min"),
        (48 * 3600, "2 d 0 h"),
        (52 * 3600, "2 d 4 h"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "alignment", "aligned"),
    [(0, 4096, 0), (1, 4096, 4096), (4095, 4096, 4096), (4096, 4096, 4096), (4097, 4096, 8192), (7, 1, 7)],
)
def test_align_up(value: int, alignment: int, aligned: int) -> None:
    assert align_up(value, alignment) == aligned


@pytest.mark.parametrize(
    ("count", "nouns", "text"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (2, ("step",), "2 steps"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_counted(count: int, nouns: tuple[str, ...], text: str) -> None:
    assert counted(count, *nouns) == text


@pytest.mark.parametrize(
    ("form", "values", "texts"),
    [
        (format_flops, (0, 999, 1e3, 26.8e6), "0 FLOP, 999 FLOP, 1.00 KFLOP, 26.8 MFLOP"),
        (
            format_flops,
            (1.07e9, 999.6e9, 275e12, 3e15, 4e18),
            "1.07 GFLOP, 1.00 TFLOP, 275 TFLOP, 3.00 PFLOP, 4000 PFLOP",
        ),
        (format_traffic, (0, 999, 1e3, 60.5e6, 14.4e9), "0 B, 999 B, 1.00 KB, 60.5 MB, 14.4 GB"),
        (format_traffic, (999.4e9, 1e12, 15.1e15, 2e18), "999 GB, 1.00 TB, 15.1 PB, 2000 PB"),
        (format_rate, (0, 36.2e6, 2.1e9, 1.01e12), "0 B/s, 36.2 MB/s, 2.10 GB/s, 1.01 TB/s"),
        (format_wait, (0, 0.4, 1.6, 99.4, 99.6, 250, 7500), "0 s, 0 s, 2 s, 99 s, 1 min 40 s, 4 min 10 s, 2 h 05 min"),
    ],
)
def test_flops_and_what_moves_are_in_decimal_units_and_a_wait_is_in_whole_seconds(
    form: Callable[[float], str], values: tuple[float, ...], texts: str
) -> None:
    assert ", ".join(map(form, values)) == texts


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0"),
        (3.21654, "3.217"),
        (512, "512"),
        (999.96, "1000"),
        (1000, "1000"),
        (1701.4, "1701"),
        (508070, "508070"),
    ],
)
def test_a_token_rate_has_no_exponent(rate: float, text: str) -> None:
    assert format_rate_number(rate) == text
    assert format_token_rate(rate) == f"{text} tokens/s"


@pytest.mark.parametrize(
    ("share", "width", "filled"),
    [(0, 10, 0), (0.5, 10, 5), (1, 10, 10), (-1, 4, 0), (7, 4, 4), (0.5, 0, 0), (0.99, 1, 1)],
)
def test_a_meter_is_as_wide_as_it_should_be(share: float, width: int, filled: int) -> None:
    assert meter(share, width, ascii_only=True) == ("#" * filled, "-" * (width - filled))
    assert meter(share, width) == ("\u2501" * filled, "\u2500" * (width - filled))


def test_a_sparkline_goes_from_the_least_to_the_greatest() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0]) == "\u2581"
    assert sparkline([2.0, 2.0]) == "\u2581\u2581"
    assert sparkline([0.0, 7.0, 3.5, 1.0]) == "\u2581\u2588\u2585\u2582"
    assert sparkline([0.0, 7.0, 1.0], ascii_only=True) == "_#."


def test_no_other_file_makes_units_by_hand() -> None:
    """A quantity in a message goes through `units`: nothing is divided by 1e9 where it is printed."""
    package = Path(units.__file__).parent
    found = {
        path.name: re.findall(r"\{[^{}'\x22]* / 1e\d+[^{}'\x22]*:[^{}'\x22]*\}", path.read_text(encoding="utf-8"))
        for path in package.rglob("*.py")
    }
    assert {name: texts for name, texts in found.items() if texts} == {}
