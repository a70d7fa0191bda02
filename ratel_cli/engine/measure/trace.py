"""`run/trace.json`: when each resource worked, for ui.perfetto.dev and chrome://tracing.

The file is an array of trace events (Chrome's "JSON Array Format"). It has one track for the steps and one for each
resource. Arrows lead from work to the work that waited for it:

    weights read (-> uploaded)          -> forward, backward of the block
    backward (-> gradient downloaded)   -> first optimizer group of the block
    states read -> optimizer group -> group written

Invariants: after every step the file lacks only the closing bracket. Viewers accept that, so a killed run leaves a
usable trace. Slices of one track never overlap. Both ends of an arrow lie in slices, and it never points back in time.
If the trace cannot be written, training continues without it, after one warning.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ratel_cli.closing import Closing
from ratel_cli.engine.measure.telemetry import Span
from ratel_cli.planning.time.step_time import RESOURCES, Resource
from ratel_cli.schedule.uses import Stage
from ratel_cli.units import MIB

_Event = dict[str, object]
_Key = tuple[Resource, Stage, int, int]

_PROCESS = 1
_TRACKS = {name: track for track, name in enumerate(("step", *RESOURCES), start=1)}
"""Numbers of the tracks, from 1: viewers take thread 0 for the idle processor."""


class TraceFile(Closing):
    """Draws the first steps of a run: at most `max_steps`, and none after the file has reached `max_bytes`."""

    def __init__(
        self, path: Path, *, warn: Callable[[str], None], max_steps: int = 50, max_bytes: int = 256 * MIB
    ) -> None:
        self._path = path
        self._warn = warn
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._num_steps = 0
        self._num_bytes = 0
        """Bytes that hold whole events."""
        self._drawing = _Drawing()
        self._file: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Never through a link: what it leads to is not the run's.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.fdopen(os.open(path, flags, 0o666), "wb")
        except OSError as error:
            self._give_up(error)
        self._append(b"[\n" + _lines(_tracks()))

    def write_step(self, step: int, spans: Sequence[Span], *, start: float, end: float) -> None:
        """Draw a step and the spans that were recorded with it; some may belong to the end of the step before."""
        if self._file is None:
            return
        if self._num_steps == self._max_steps or self._num_bytes >= self._max_bytes:
            self._warn(f"{self._path}: ends before step {step}; a longer trace would be too large for a viewer")
            self.close()
            return
        self._append(b",\n" + _lines(self._drawing.step(step, spans, start=start, end=end)))
        self._num_steps += 1

    def close(self) -> None:
        """End the array and close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError), file:
                file.write(b"\n]\n")

    def _append(self, text: bytes) -> None:
        """Hand whole events to the operating system."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
            self._num_bytes += len(text)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        with contextlib.suppress(OSError):
            os.truncate(self._path, self._num_bytes)  # a full disk takes part of an event
        self._warn(f"{self._path}: cannot be written ({error.strerror}); training continues without it")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A place on a track: from `begin` to `end`, in whole microseconds since the trace began, at least 1 long."""

    track: int
    begin: int
    end: int


class _Drawing:
    """Turns spans into events. It remembers where arrows may still start, and how far each track is drawn."""

    def __init__(self) -> None:
        self._origin: float | None = None
        self._drawn_to = dict.fromkeys(_TRACKS.values(), 0)
        self._sources: dict[_Key, _Slice] = {}
        self._num_arrows = 0

    def step(self, step: int, spans: Sequence[Span], *, start: float, end: float) -> list[_Event]:
        """The events of one step."""
        if self._origin is None:
            self._origin = min([start, *(span.start for span in spans)])
        events = [_slice_event(f"step {step}", "step", self._place("step", start, end), {"step": step})]
        # In the order of their ends: the source of an arrow is placed before its target.
        for span in sorted(spans, key=lambda span: (span.end, span.start)):
            label, place = span.label, self._place(span.resource, span.start, span.end)
            details: _Event = {"block": label.block, "stage": label.stage, "group": label.group, "step": step}
            events.append(_slice_event(label.text, span.resource, place, details))
            for cause in _causes(span):
                events += self._arrow(self._sources.pop(cause, None), place)
            self._sources[span.resource, label.stage, label.block, label.group] = place
        return events

    def _place(self, name: str, start: float, end: float) -> _Slice:
        # Queued transfers overlap, and viewers nest or drop slices that overlap. A drive serves requests in their
        # order, so each slice starts no earlier than the one before it ends; its end is the true one. A slice of
        # which nothing is left is drawn 1 microsecond long, so that arrows can end in it.
        track = _TRACKS[name]
        begin = max(self._microseconds(start), self._drawn_to[track])
        self._drawn_to[track] = max(self._microseconds(end), begin + 1)
        return _Slice(track=track, begin=begin, end=self._drawn_to[track])

    def _arrow(self, source: _Slice | None, target: _Slice) -> list[_Event]:
        """Both ends of an arrow, or nothing: viewers report an arrow without a source, or back in time, as an error."""
        if source is None:
            return []
        # It leaves in the last microsecond: the end of a slice may be the start of the next one. Rounding, and tracks
        # that are drawn late, may have moved the source behind the target, a little or altogether.
        leaves = min(source.end - 1, target.begin)
        if leaves < source.begin:
            return []
        self._num_arrows += 1
        common: _Event = {"name": "then", "cat": "flow", "id": self._num_arrows, "pid": _PROCESS}
        return [
            {**common, "ph": "s", "tid": source.track, "ts": leaves},
            # "bp": the arrow ends in the slice around it, not in the next one.
            {**common, "ph": "f", "bp": "e", "tid": target.track, "ts": target.begin},
        ]

    def _microseconds(self, seconds: float) -> int:
        assert self._origin is not None
        return round((seconds - self._origin) * 1e6)


def _causes(span: Span) -> tuple[_Key, ...]:
    """The work that the span had to wait for."""
    stage, block, group = span.label.stage, span.label.block, span.label.group
    match span.resource:
        case "up":
            return (("nvme read", stage, block, group),)
        case "compute":
            return ("nvme read", stage, block, group), ("up", stage, block, group)
        case "down" if stage == "backward":
            return (("compute", "backward", block, 0),)
        case "optimizer":
            gradient: tuple[_Key, ...] = ("compute", "backward", block, 0), ("down", "backward", block, 0)
            return (*gradient, ("nvme read", stage, block, group))
        case "nvme write":
            return (("optimizer", stage, block, group),)
    return ()


def _tracks() -> list[_Event]:
    """Names of the tracks, and their order."""
    events = [_metadata("process_name", _TRACKS["step"], {"name": "ratel"})]
    for name, track in _TRACKS.items():
        events.append(_metadata("thread_name", track, {"name": name}))
        events.append(_metadata("thread_sort_index", track, {"sort_index": track}))
    return events


def _metadata(what: str, track: int, details: _Event) -> _Event:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": details}


def _slice_event(label: str, category: str, place: _Slice, details: _Event) -> _Event:
    where: _Event = {"pid": _PROCESS, "tid": place.track, "ts": place.begin, "dur": place.end - place.begin}
    return {"name": label, "cat": category, "ph": "X", **where, "args": details}


def _lines(events: Sequence[_Event]) -> bytes:
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
