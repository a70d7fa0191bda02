"""Charts as SVG text: axes with units, lines, bands, dots; rows of shares. Colours come from the page's style.

A chart is drawn for a width in pixels of the page, so that its text is as large as the text around it: a chart of full
width is drawn twice, for a desktop and for a phone, and the page shows one of them.

Invariant: every text is escaped, and every number in the output is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from ratel_cli.report.page.series import Bin, Scale, step_ticks, ticks
from ratel_cli.units import format_number

WIDE, NARROW, HALF = 1120, 358, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 8, 22
_ROW_HEIGHT, _ROW_GAP = 30, 8
Point = tuple[float, float]
Words = Callable[[float], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One thing in a chart."""

    kind: str
    """The class in the page's style, such as `line` or `line second`."""
    points: tuple[Point, ...] = ()
    """Where it is, in values. A value that is not finite interrupts a line."""
    band: tuple[tuple[float, float, float], ...] = ()
    """Instead: x, low and high."""
    is_dots: bool = False
    label: str = ""
    """Written at the last point."""


def lines_of(bins: Sequence[Bin], *, kind: str = "line") -> list[Drawn]:
    """A line through the means; behind it, where bins have several values, a band from the lowest to the highest."""
    line = Drawn(kind=kind, points=tuple((each.x, each.mean) for each in bins))
    if all(each.num_values == 1 for each in bins):
        return [line]
    band = tuple((each.x, each.low, each.high) for each in bins if math.isfinite(each.mean))
    return [Drawn(kind=kind.replace("line", "band", 1), band=band), line]


def dots(points: Sequence[Point], *, kind: str = "dot", label: str = "") -> Drawn:
    """A dot at each point."""
    return Drawn(kind=kind, points=tuple(points), is_dots=True, label=label)


def rule(y: float, span: Point, *, label: str) -> Drawn:
    """A level, such as a limit, from one x to another."""
    return Drawn(kind="rule", points=((span[0], y), (span[1], y)), label=label)


def chart(
    drawn: Sequence[Drawn],
    *,
    x: Scale,
    y: Scale,
    width: int,
    height: int,
    title: str,
    x_words: Words = format_number,
    y_words: Words = format_number,
    are_steps: bool = True,
) -> str:
    """One chart with its axes. `title` is what a screen reader says."""
    frame = _Frame(x=x, y=y, width=width, height=height)
    most = max(3, width // 90)
    at = step_ticks(math.ceil(x.low), math.floor(x.high), most=most) if are_steps else ticks(x, most=most)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for value in ticks(y, most=max(4, height // 42)):
        place = frame.down(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {place}H{width - _RIGHT}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{place}">{escape(y_words(value))}</text>')
    parts += [frame.x_tick(value, x_words(value)) for value in at]
    if are_steps:
        parts.append(f'<text class="unit" x="{_LEFT - 6}" y="{height - 5}">step</text>')
    for each in drawn:
        parts += _shapes(each, frame)
    return "".join((*parts, "</svg>"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRow:
    """How busy one resource was, and how much it stalled the step."""

    name: str
    busy: tuple[Point, ...]
    """Step, and share from 0 to 1."""
    stalled: tuple[Point, ...]
    words: tuple[str, str]
    """Words to the right: of busy, of stalled."""


def share_rows(rows: Sequence[ShareRow], *, x: Scale, width: int, title: str) -> str:
    """A row for each resource, from 0 to 100 % of the step, above one axis of steps."""
    left, right = (92, 96) if width > NARROW else (78, 62)
    height = len(rows) * (_ROW_HEIGHT + _ROW_GAP) + _BOTTOM
    sides = f'data-left="{left}" data-right="{right}"'
    parts = [f'<svg viewBox="0 0 {width} {height}" {sides} role="img" aria-label="{escape(title)}">']
    for number, row in enumerate(rows):
        top = number * (_ROW_HEIGHT + _ROW_GAP) + 2
        frame = _Frame(
            x=x,
            y=Scale(low=0, high=1),
            width=width,
            height=top + _ROW_HEIGHT,
            top=top,
            bottom=0,
            left=left,
            right=right,
        )
        base, middle = top + _ROW_HEIGHT, top + _ROW_HEIGHT / 2
        parts.append(
            f'<rect class="track" x="{left}" y="{top}" width="{width - left - right}" height="{_ROW_HEIGHT}"/>'
        )
        parts.append(f'<text class="name" x="0" y="{middle}">{escape(row.name)}</text>')
        for kind, points in (("busy", row.busy), ("stalled", row.stalled)):
            if any(value > 0 for _, value in points):
                parts.append(f'<path class="{kind}" d="{frame.area(points)}"/>')
        busy, stalled = row.words
        shift = 7 if stalled else 0
        parts.append(f'<text class="value" x="{width - right + 8}" y="{middle - shift}">{escape(busy)}</text>')
        if stalled:
            parts.append(f'<text class="value stall" x="{width - right + 8}" y="{middle + 7}">{escape(stalled)}</text>')
        parts.append(f'<path class="grid" d="M{left} {base}H{width - right}"/>')
    axis = _Frame(x=x, y=Scale(low=0, high=1), width=width, height=height, left=left, right=right)
    most = max(3, width // 90)
    parts.append(f'<text class="unit" x="{left - 6}" y="{height - 5}">step</text>')
    parts += [
        axis.x_tick(each, format_number(each)) for each in step_ticks(math.ceil(x.low), math.floor(x.high), most=most)
    ]
    return "".join((*parts, "</svg>"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Maps values to pixels."""

    x: Scale
    y: Scale
    width: int
    height: float
    left: int = _LEFT
    right: int = _RIGHT
    top: float = _TOP
    bottom: int = _BOTTOM

    def across(self, value: float) -> float:
        return _rounded(self.left + self.x.place(value) * (self.width - self.left - self.right))

    def down(self, value: float) -> float:
        return _rounded(self.height - self.bottom - self.y.place(value) * (self.height - self.bottom - self.top))

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.across(x)} {self.down(y)}" for x, y in points)

    def area(self, points: Sequence[Point]) -> str:
        """The path of the area from the base up to the points. One point is as wide as the frame."""
        if len(points) == 1:
            points = [(self.x.low, points[0][1]), (self.x.high, points[0][1])]
        base = self.y.low
        return self.path([(points[0][0], base), *points, (points[-1][0], base)]) + "Z"

    def x_tick(self, value: float, words: str) -> str:
        place = self.across(value)
        is_last = place > self.width - self.right - 12
        anchor = ' style="text-anchor:end"' if is_last else ""
        where = self.width - self.right if is_last else place
        return (
            f'<path class="mark" d="M{place} {self.height - _BOTTOM}v4"/>'
            f'<text class="tick x" x="{where}" y="{self.height - 5}"{anchor}>{escape(words)}</text>'
        )


def _shapes(drawn: Drawn, frame: _Frame) -> Iterator[str]:
    kind = escape(drawn.kind)
    if drawn.band:
        outline = [(x, high) for x, _, high in drawn.band] + [(x, low) for x, low, _ in reversed(drawn.band)]
        yield f'<path class="{kind}" d="{frame.path(outline)}Z"/>'
    elif drawn.is_dots:
        finite = [point for point in drawn.points if _is_finite(point)]
        yield from (_circle(frame, point, kind=kind) for point in finite)
    else:
        for is_finite, run in groupby(drawn.points, key=_is_finite):
            points = list(run)
            if is_finite and len(points) > 1:
                yield f'<path class="{kind}" d="{frame.path(points)}"/>'
            elif is_finite:
                yield _circle(frame, points[0], kind=kind.replace("line", "dot"))
    if drawn.label and drawn.points and _is_finite(drawn.points[-1]):
        x, y = drawn.points[-1]
        above = frame.down(y) - 6
        place = above if above > 12 else frame.down(y) + 14
        yield f'<text class="label {kind}" x="{frame.across(x)}" y="{place}">{escape(drawn.label)}</text>'


def _circle(frame: _Frame, point: Point, *, kind: str) -> str:
    return f'<circle class="{kind}" cx="{frame.across(point[0])}" cy="{frame.down(point[1])}" r="2.5"/>'


def _is_finite(point: Point) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _rounded(pixels: float) -> float:
    """Tenths of a pixel, and never far outside the chart."""
    return round(min(max(pixels, -1e4), 1e4), 1)
