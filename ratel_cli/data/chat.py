"""Renders conversations with a model's chat template, safely: see `chat_child.py` for how and why.

For `data/encode.py`. Invariant: a template can neither hang the run nor exhaust its memory; the child is gone
when the renderer is closed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from ratel_cli.data.formats import ChatDraft, Unusable
from ratel_cli.errors import BadInput, EnvironmentFailure, printable

LIMIT_SECONDS = 10.0
"""For one conversation; some milliseconds are usual."""

_START_SECONDS = 120  # importing transformers takes 1 s on an idle machine
_LIMIT_BYTES = 2 << 30  # the child has 0.2 GB mapped before the first template


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """The text of a conversation and the characters [start, end) of each assistant turn."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Owns the rendering process."""

    def __init__(
        self,
        template: str,
        variables: Mapping[str, object],
        *,
        limit_seconds: float = LIMIT_SECONDS,
        limit_bytes: int = _LIMIT_BYTES,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        script = Path(__file__).with_name("chat_child.py")
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            encoding="utf-8",
        )
        setup = {
            "template": template,
            "variables": dict(variables),
            "limit_seconds": limit_seconds,
            "limit_bytes": limit_bytes,
            "start_seconds": _START_SECONDS,
        }
        if self._ask(setup) is None:
            complaint = self._last_complaint()
            self.close()
            raise EnvironmentFailure(f"the process that renders chat templates does not start: {complaint}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def render(self, draft: ChatDraft, *, locate_turns: bool) -> RenderedChat:
        """Raises Unusable when the template refuses this conversation, BadInput when it does not end."""
        try:
            reply = self._ask({"messages": draft.messages, "tools": draft.tools, "spans": locate_turns})
        except (TypeError, ValueError) as error:  # a parquet row may hold a date or bytes beside the content
            raise Unusable(f"a message holds what JSON cannot: {error}") from error
        if reply is None:
            raise self._death()
        if "error" in reply:
            raise Unusable(printable(str(reply["error"])))
        spans = cast(list[list[int]], reply["spans"])
        return RenderedChat(text=cast(str, reply["text"]), spans=tuple((start, end) for start, end in spans))

    def close(self) -> None:
        """Ends the child, which may be in the middle of a template."""
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # a request that the dead child never read
        self._complaints.close()

    def _ask(self, request: dict[str, object]) -> dict[str, object] | None:
        """One line there, one line back; None when the child died."""
        line = json.dumps(request) + "\n"
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self._child.stdout.readline()
        return cast(dict[str, object], json.loads(answer)) if answer.endswith("\n") else None

    def _death(self) -> BadInput:
        if self._child.wait() == -signal.SIGALRM:
            return BadInput(
                f"the chat template did not finish one conversation within {self._limit_seconds:g} s",
                hint="it may loop without end; check chat_template in the tokenizer's files",
            )
        return BadInput(f"the chat template ended its process: {self._last_complaint()}")

    def _last_complaint(self) -> str:
        code = self._child.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode("utf-8", "replace").strip().splitlines()
        return printable(lines[-1])[:200] if lines else f"exit status {code}"
