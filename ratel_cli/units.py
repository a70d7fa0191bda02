"""Parsing and printing of quantities, for configs, messages and tables.

Invariant: inside Ratel, bytes are ints and times are floats in seconds. Units such as GiB exist only here, for what
people read and write.
"""

from __future__ import annotations

import re
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """The bytes of a size such as `24GiB` or `500MB`; a plain number is bytes. Raises ValueError for other texts."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size; write it like 24GiB, 500MB or 1073741824")
    return int(Fraction(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three significant digits: `1.50 GiB`."""
    if abs(num_bytes) < KIB:
        return f"{num_bytes:.0f} B"
    value, units = num_bytes / KIB, ["KiB", "MiB", "GiB", "TiB"]
    while round(abs(value)) >= KIB and len(units) > 1:
        value /= KIB
        units.pop(0)
    return f"{_three_digits(value)} {units[0]}"


def format_count(count: float) -> str:
    """A large count in decimal units with three significant digits: `1.10B`, `350M`, `512`."""
    number, unit = _scaled(count, ["", "K", "M", "B", "T"])
    return f"{number}{unit}"


def format_flops(flops: float) -> str:
    """Floating-point operations in decimal units with three significant digits: `26.8 MFLOP`, `1.07 GFLOP`."""
    number, unit = _scaled(flops, ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"])
    return f"{number} {unit}"


def format_seconds(seconds: float) -> str:
    """A time in fitting units: `4.20 ms`, `0.12 s`, `4 min 10 s`, `3 h 05 min`, `2 d 4 h`."""
    if seconds < 0.0995:
        return f"{_three_digits(seconds * 1000)} ms"
    if seconds < 99.5:
        return f"{_three_digits(seconds)} s"
    minutes, whole_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {whole_seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """A count with its noun: `1 step`, `2 steps`. The plural ends in s unless it is given."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def _scaled(count: float, units: list[str]) -> tuple[str, str]:
    """The number with three digits, and its unit; each unit is 1000 times the one before, and the first is 1."""
    if abs(count) < 1000:
        return f"{count:.0f}", units[0]
    power, value = 1, count / 1000
    while round(abs(value)) >= 1000 and power + 1 < len(units):
        power, value = power + 1, value / 1000
    return _three_digits(value), units[power]


def _three_digits(value: float) -> str:
    """A number below 1024 with three significant digits. At the bounds, rounding would add a digit."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
