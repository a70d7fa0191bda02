"""Parsing and printing of quantities, for configs, messages and tables.

Invariant: inside Ratel, bytes are ints and times are floats in seconds. Units such as GiB exist only here, for what
people read and write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_TRAFFIC_UNITS = (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6))

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


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as `3.5GB/s`. Raises ValueError for other texts."""
    size, slash, second = text.partition("/")
    if slash + second.strip() != "/s":
        raise ValueError(f"{text!r} is not a rate; write it like 3.5GB/s")
    return float(parse_bytes(size))


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three significant digits: `1.50 GiB`."""
    if abs(num_bytes) < KIB:
        return f"{num_bytes:.0f} B"
    value, units = num_bytes / KIB, ["KiB", "MiB", "GiB", "TiB"]
    while round(abs(value)) >= KIB and len(units) > 1:
        value /= KIB
        units.pop(0)
    return f"{_three_digits(value)} {units[0]}"


def byte_unit(num_bytes: float) -> tuple[str, int]:
    """A unit of memory in which these bytes are neither a huge nor a tiny number."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)


def traffic_unit(num_bytes: float) -> tuple[str, int]:
    """A unit of what moves or is written in which these bytes are neither a huge nor a tiny number."""
    return next((each for each in _TRAFFIC_UNITS if num_bytes >= each[1]), _TRAFFIC_UNITS[-1])


def parameter_words(number: int, num_trained: int | None) -> str:
    """A number of parameters, and how many of them are trained if not all (None) are."""
    words = f"{format_count(number)} parameters"
    return words if num_trained is None or num_trained == number else f"{words} ({format_count(num_trained)} trained)"


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


def format_traffic(num_bytes: float) -> str:
    """Bytes that move or are written, in decimal units as drives are rated: `14.4 GB`, `60.5 MB`, `15.1 PB`."""
    number, unit = _scaled(num_bytes, ["B", "KB", "MB", "GB", "TB", "PB"])
    return f"{number} {unit}"


def format_rate(bytes_per_second: float) -> str:
    """A rate in decimal units: `2.10 GB/s`."""
    return f"{format_traffic(bytes_per_second)}/s"


def format_token_rate(tokens_per_second: float) -> str:
    """Tokens per second with their unit: `3.217 tokens/s`, `508070 tokens/s`."""
    return f"{format_rate_number(tokens_per_second)} tokens/s"


def format_rate_number(per_second: float) -> str:
    """Tokens per second where the unit stands elsewhere, without an exponent: `3.217`, `508070`."""
    return f"{per_second:.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def format_loss(value: float | None) -> str:
    """A loss, a norm or a reward: `2.3457`, `128.4`."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def format_number(value: float) -> str:
    """A number of an axis or a figure, short: `0.25`, `1200`, `2e-5`, `1.5M`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    if size >= 1e4:
        for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= factor:
                return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def format_wait(seconds: float) -> str:
    """A time that passes while one looks on, in whole seconds: `12 s`, `4 min 10 s`, `3 h 05 min`."""
    return f"{seconds:.0f} s" if seconds < 99.5 else format_seconds(seconds)


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """A count with its noun: `1 step`, `2 steps`. The plural ends in s unless it is given."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def align_down(value: int, alignment: int) -> int:
    """The greatest multiple of `alignment` that is at most `value`."""
    return value // alignment * alignment


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def meter(share: float, width: int, *, ascii_only: bool = False) -> tuple[str, str]:
    """A bar of `width` characters in two parts, the filled and the empty one. `share` is from 0 to 1."""
    filled = round(min(1.0, max(0.0, share)) * width)
    full, empty = ("#", "-") if ascii_only else ("\u2501", "\u2500")
    return full * filled, empty * (width - filled)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """A curve with one character for each value, from the least to the greatest."""
    heights = "_.-:=+*#" if ascii_only else "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
    if not values:
        return ""
    least, span = min(values), max(values) - min(values)
    return "".join(heights[round((value - least) / span * (len(heights) - 1)) if span else 0] for value in values)


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
