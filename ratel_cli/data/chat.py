"""Renders conversations with a model's chat template in a child process; see `chat_child` for the reasons.

Invariants: a template can neither hang the run nor exhaust its memory. The child does not outlive the renderer, and if
this process is killed, the child ends too: its input ends, or its time runs out.

The child is a plain subprocess and not a spawned worker of `multiprocessing`. A spawned worker imports the caller's
`__main__` again, which may run a user's script or map torch (more than the limit of the address space) before the limit
is set, and it leaves a resource tracker process behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ratel_cli.closing import Closing
from ratel_cli.data.formats import ChatDraft, Unusable
from ratel_cli.errors import BadInput, EnvironmentFailure, excerpt, printable

LIMIT_SECONDS = 10.0
"""The most time for one conversation. Some milliseconds are usual."""

_START_SECONDS = 120  # importing transformers takes 1 s on an idle machine
_LIMIT_BYTES = 2 << 30  # address space; the child has mapped 0.2 GB before the first template


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """The text of a conversation and the characters [start, end) of each assistant turn."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer(Closing):
    """The child process that renders one template, which gets `variables` (names of special tokens) as well.

    `limit_seconds` is the most time for one conversation, `limit_bytes` the most address space of the child.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, object],
        *,
        limit_seconds: float = LIMIT_SECONDS,
        limit_bytes: int = _LIMIT_BYTES,
    ) -> None:
        """Start the child. Raises EnvironmentFailure if it does not start."""
        self._limit_seconds = limit_seconds
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("chat_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the run, which then closes the renderer
        )
        setup = {
            "template": template,
            "variables": dict(variables),
            "limit_seconds": limit_seconds,
            "limit_bytes": limit_bytes,
            "start_seconds": _START_SECONDS,
        }
        try:
            reply = self._ask(setup)
            reason = self._exit_reason() if reply is None else reply.get("error")
            if reason is not None:
                message = f"the process that renders chat templates did not start: {excerpt(str(reason))}"
                raise EnvironmentFailure(message)
        except BaseException:
            self.close()
            raise

    def render(self, draft: ChatDraft, *, locate_turns: bool) -> RenderedChat:
        """Render one conversation. Without `locate_turns` the result has no spans.

        Raises Unusable if the template fails on this conversation, BadInput if it takes too long or ends the child.
        """
        try:
            reply = self._ask({"messages": draft.messages, "tools": draft.tools, "locate_turns": locate_turns})
        except (TypeError, ValueError) as error:  # a parquet row may hold dates or bytes in further keys
            raise Unusable(f"a message contains a value that JSON cannot represent: {printable(str(error))}") from error
        if reply is None:
            raise self._death()
        if "error" in reply:
            raise Unusable(printable(str(reply["error"])))
        spans = cast(list[list[int]], reply["spans"])
        return RenderedChat(text=cast(str, reply["text"]), spans=tuple((start, end) for start, end in spans))

    def close(self) -> None:
        """End the child, even in the middle of a template. Idempotent."""
        assert self._child.stdin is not None
        if not self._child.stdin.closed:
            self._child.kill()
            self._child.communicate()  # closes the pipes and waits

    def _ask(self, request: dict[str, object]) -> dict[str, object] | None:
        """Send one line and read one line; None if the child died."""
        line = json.dumps(request)
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            print(line, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            return None
        reply = self._child.stdout.readline()
        return cast(dict[str, object], json.loads(reply)) if reply.endswith("\n") else None

    def _death(self) -> BadInput:
        if self._child.wait() == -signal.SIGALRM:
            return BadInput(
                f"the chat template did not finish one conversation within {self._limit_seconds:g} s",
                hint="it may have an endless loop: check chat_template in the base model's tokenizer files",
            )
        return BadInput(
            f"the process that renders chat templates ended: {self._exit_reason()}",
            hint="check chat_template in the base model's tokenizer files",
        )

    def _exit_reason(self) -> str:
        code = self._child.wait()
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
