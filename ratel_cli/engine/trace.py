"""`run/trace.json`: what each resource did and when, for ui.perfetto.dev and chrome://tracing.

`run.finetune` opens it when asked to, and hands it the spans of `engine.telemetry` step by step.
Invariants: after every step the file is whole JSON, so that a killed run leaves its trace; slices of one
track never overlap; both ends of an arrow lie in slices, the tip not before the tail. A trace that
cannot be written is no reason to stop training: one warning, and training goes on.

One track for the steps and one for each resource; arrows from what was done to what waited for it:

    weights read (-> copied up)            -> forward, backward of the block
    backward (-> its gradient copied down) -> first optimizer group of the block
    states read -> optimizer group -> group written
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

from ratel_cli.engine.telemetry import RESOURCES, Resource, Span
from ratel_cli.planning.placement import Stage
from ratel_cli.units import MIB

_Event = dict[str, object]
_Key = tuple[Resource, Stage, int, int]

_PROCESS = 1
_TRACKS = {name: track for track, name in enumerate(("step", *RESOURCES), start=1)}
"""Counted from 1: for viewers, thread 0 is the processor at rest."""
_CLOSING = b"\n]}\n"


class TraceFile:
    """Draws the first steps of a run: `max_steps`, or as many as `max_bytes` hold, give or take a step."""

    def __init__(
        self, path: Path, *, warn: Callable[[str], None], max_steps: int = 50, max_bytes: int = 256 * MIB
    ) -> None:
        self._path = path
        self._warn = warn
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._num_steps = 0
        self._drawing = _Drawing()
        self._num_bytes = 0
        """Without what closes the JSON."""
        self._file: FileIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a step is with the operating system when `write_step` returns.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            self._give_up(error)
        self._put(b'{"displayTimeUnit": "ms", "traceEvents": [\n' + _lines(_tracks()))

    def write_step(self, step: int, spans: Sequence[Span], *, start: float, end: float) -> None:
        """Draw a step, and the spans that became known with it: some may be the tail of the step before."""
        if self._file is None:
            return
        if self._num_steps == self._max_steps or self._num_bytes >= self._max_bytes:
            self._warn(f"{self._path}: ends before step {step}; it holds what a viewer can show")
            self.close()
            return
        self._put(b",\n" + _lines(self._drawing.step(step, spans, start=start, end=end)))
        self._num_steps += 1

    def close(self) -> None:
        """Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(self, text: bytes) -> None:
        """Append, over what closes the JSON, and close it again."""
        if self._file is None:
            return
        try:
            _write_at(self._file, self._num_bytes, text + _CLOSING)
            self._num_bytes += len(text)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was there before has its place on the disk
                self._file.truncate(self._num_bytes)
                _write_at(self._file, self._num_bytes, _CLOSING)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path}: cannot be written ({error.strerror}); training goes on without it")
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A place on a track, in whole microseconds since the trace began, at least one of them long."""

    track: int
    begin: int
    end: int


class _Drawing:
    """Turns spans into events. It remembers what arrows may still start from, and how far each track is drawn."""

    def __init__(self) -> None:
        self._origin: float | None = None
        self._reached = dict.fromkeys(_TRACKS.values(), 0)
        self._done: dict[_Key, _Slice] = {}
        self._num_arrows = 0

    def step(self, step: int, spans: Sequence[Span], *, start: float, end: float) -> list[_Event]:
        if self._origin is None:
            self._origin = min([start, *(span.start for span in spans)])
        events = [_slice_event(f"step {step}", "step", self._place("step", start, end), {"step": step})]
        # By their ends: what an arrow starts from is placed before what it points to.
        for span in sorted(spans, key=lambda span: (span.end, span.start)):
            place = self._place(span.resource, span.start, span.end)
            details: _Event = {"block": span.block, "stage": span.stage, "group": span.part, "step": step}
            events.append(_slice_event(span.label, span.resource, place, details))
            for cause in _causes(span):
                events += self._arrow(self._done.pop(cause, None), place)
            self._done[span.resource, span.stage, span.block, span.part] = place
        return events

    def _place(self, name: str, start: float, end: float) -> _Slice:
        # Transfers overlap when several are queued, and viewers nest or drop slices that do. A drive serves who
        # came first, so each is drawn from where the one before ended; its end is where it was. What is
        # left of nothing is drawn as one microsecond, so that its arrows have something to hold on to.
        track = _TRACKS[name]
        begin = max(self._microseconds(start), self._reached[track])
        self._reached[track] = max(self._microseconds(end), begin + 1)
        return _Slice(track=track, begin=begin, end=self._reached[track])

    def _arrow(self, source: _Slice | None, target: _Slice) -> list[_Event]:
        """Both ends or none: viewers count an arrow that hangs in the air, or points to the past, as an error."""
        if source is None:
            return []
        # From the last microsecond: the end of a slice may be the beginning of the next. Rounding, and tracks that
        # are drawn late, may have moved the source a little, or altogether, behind the target.
        leaves = min(source.end - 1, target.begin)
        if leaves < source.begin:
            return []
        self._num_arrows += 1
        common: _Event = {"name": "then", "cat": "flow", "id": self._num_arrows, "pid": _PROCESS}
        return [
            {**common, "ph": "s", "tid": source.track, "ts": leaves},
            # "bp": the arrow ends in the slice around it, not in the one that follows.
            {**common, "ph": "f", "bp": "e", "tid": target.track, "ts": target.begin},
        ]

    def _microseconds(self, seconds: float) -> int:
        assert self._origin is not None
        return round((seconds - self._origin) * 1e6)


def _causes(span: Span) -> tuple[_Key, ...]:
    """What the span had to wait for."""
    stage, block, part = span.stage, span.block, span.part
    if span.resource == "up":
        return (("nvme read", stage, block, part),)
    if span.resource == "compute":
        return ("nvme read", stage, block, part), ("up", stage, block, part)
    if span.resource == "down" and stage == "backward":
        return (("compute", "backward", block, 0),)
    if span.resource == "optimizer":
        return ("compute", "backward", block, 0), ("down", "backward", block, 0), ("nvme read", stage, block, part)
    if span.resource == "nvme write":
        return (("optimizer", stage, block, part),)
    return ()


def _tracks() -> list[_Event]:
    """Names of the tracks, and their order."""
    events = [_naming("process_name", _TRACKS["step"], {"name": "ratel"})]
    for name, track in _TRACKS.items():
        events.append(_naming("thread_name", track, {"name": name}))
        events.append(_naming("thread_sort_index", track, {"sort_index": track}))
    return events


def _naming(what: str, track: int, details: _Event) -> _Event:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": details}


def _slice_event(label: str, category: str, place: _Slice, details: _Event) -> _Event:
    return {
        "name": label,
        "cat": category,
        "ph": "X",
        "pid": _PROCESS,
        "tid": place.track,
        "ts": place.begin,
        "dur": place.end - place.begin,
        "args": details,
    }


def _lines(events: Sequence[_Event]) -> bytes:
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()


def _write_at(file: FileIO, offset: int, text: bytes) -> None:
    written = 0
    while written < len(text):  # a disk that is nearly full takes a part
        written += os.pwrite(file.fileno(), text[written:], offset + written)
