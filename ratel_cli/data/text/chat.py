"""Renders conversations with a model's chat template in a child process; see `chat_child` for the reasons.

Invariants: a template can neither hang the run nor exhaust its memory. The child does not outlive the renderer, and if
this process is killed, the child ends too: its input ends, or its time runs out.

The child is a plain subprocess and not a spawned worker of `multiprocessing`. A spawned worker imports the caller's
`__main__` again, which may run a user's script or map torch (more than the limit of the address space) before the limit
is set, and it leaves a resource tracker process behind.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ratel_cli.closing import Closing
from ratel_cli.data.files.remarks import Remark
from ratel_cli.data.text.chat_child import ChatMessage
from ratel_cli.data.text.drafts import ChatDraft, Unusable
from ratel_cli.errors import BadInput, EnvironmentFailure, excerpt, printable

LIMIT_SECONDS = 10.0
"""The most time for one conversation. Some milliseconds are usual."""

SLOW_SECONDS = 2.0
"""After this time for one conversation the user gets to know what the run waits for."""
_START_SECONDS = 120  # importing transformers takes 1 s on an idle machine
_LIMIT_BYTES = 2 << 30  # address space; the child has mapped 0.2 GB before the first template


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """The text of a conversation, and which of its characters were asked for."""

    text: str
    spans: tuple[tuple[int, int] | None, ...]
    """Characters [start, end) of each part, in order; None for the words of a message that were not found."""
    quiet: tuple[int | None, ...]
    """For each part None, or where it begins behind the prompt for an answer without reasoning."""
    muted: tuple[tuple[int, int], ...]
    """Characters of the turns that have no loss, whatever part they are in."""
    remarks: tuple[Remark, ...]
    """What the conversation has and the text has not, such as tool calls."""
    skips_header: bool
    """Whether the template has no generation prompt, so that turns begin behind their headers."""


class ChatRenderer(Closing):
    """The child process that renders one template, which gets `variables` (names of special tokens) as well.

    `tool_template` is for conversations with tools; None: the same. `marks`: the tokens that stand for themselves in a
    text; `stops`: those of them that end what a model writes.
    `limit_seconds` is the most time for one conversation, `limit_bytes` the most address space of the child. After
    `slow_seconds` for one conversation `notice` gets a remark for the user, once.
    """

    def __init__(
        self,
        template: str,
        variables: Mapping[str, object],
        *,
        tool_template: str | None = None,
        marks: Sequence[str] = (),
        stops: Sequence[str] = (),
        notice: Callable[[str], None] = lambda text: None,
        begun: Callable[[ChatRenderer], None] = lambda renderer: None,
        limit_seconds: float = LIMIT_SECONDS,
        slow_seconds: float = SLOW_SECONDS,
        limit_bytes: int = _LIMIT_BYTES,
    ) -> None:
        """Start the child. Raises EnvironmentFailure if it does not start.

        `begun` gets the renderer before it is ready, to `kill` it from another thread.
        """
        self._notice = notice
        self._is_known_slow = True  # starting the child is slow
        self._limit_seconds = limit_seconds
        self._slow_seconds = slow_seconds
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("chat_child.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the run, which then closes the renderer
        )
        setup: dict[str, object] = {
            "template": template,
            "tool_template": tool_template,
            "variables": dict(variables),
            "marks": list(marks),
            "stops": list(stops),
            "limit_seconds": limit_seconds,
            "limit_bytes": limit_bytes,
            "start_seconds": _START_SECONDS,
        }
        try:
            begun(self)
            reply = self._ask(setup)
            reason = self._exit_reason() if reply is None else reply.get("error")
            if reason is not None:
                message = f"the process that renders chat templates did not start: {excerpt(str(reason))}"
                raise EnvironmentFailure(message)
            self._is_known_slow = False
        except BaseException:
            self.close()
            raise

    def render(self, draft: ChatDraft, *, locate: bool) -> RenderedChat:
        """Render one conversation and, with `locate`, find the parts of it that the draft wants trained.

        These are the words of its `located_messages`, if it names messages to train; what follows the prompt, if it
        has one; else the assistant turns. Muted turns are found in any case.
        Raises Unusable if the template fails on this conversation, BadInput if it takes too long or ends the child.
        """
        muted = [index for index in draft.muted if draft.messages[index]["role"] == "assistant"]
        wanted = _wanted(draft) if locate else None
        reply = self._answer(
            {
                "messages": draft.messages,
                "tools": draft.tools,
                "variables": dict(draft.variables),
                "locate": wanted,
                "muted": [] if draft.trained is not None else muted,
            }
        )
        spans = cast(list[list[int] | None], reply["spans"])
        return RenderedChat(
            text=cast(str, reply["text"]),
            spans=tuple(None if span is None else (span[0], span[1]) for span in spans),
            quiet=tuple(cast(list[int | None], reply["quiet"])),
            muted=tuple((first, end) for first, end in cast(list[list[int]], reply["muted"])),
            remarks=tuple((kind, what) for kind, what in cast(list[tuple[str, str]], reply["remarks"])),
            skips_header=bool(reply["skips_header"]),
        )

    def render_prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Render one conversation with the prompt for its next turn. Raises what `render` raises."""
        reply = self._answer(
            {"messages": list(messages), "tools": None, "variables": {}, "locate": {"what": "prompt"}, "muted": []}
        )
        return cast(str, reply["text"])

    def kill(self) -> None:
        """End the child, so that a thread that waits for it goes on. `close` is still needed."""
        self._child.kill()

    def close(self) -> None:
        """End the child, even in the middle of a template. Idempotent."""
        assert self._child.stdin is not None
        if not self._child.stdin.closed:
            self._child.kill()
            self._child.communicate()  # closes the pipes and waits

    def _answer(self, request: dict[str, object]) -> dict[str, object]:
        """The reply to a request about one conversation."""
        try:
            reply = self._ask(request)
        except (TypeError, ValueError) as error:  # a parquet row may hold dates or bytes in further keys
            raise Unusable(f"a message contains a value that JSON cannot represent: {printable(str(error))}") from error
        if reply is None:
            hint = "check chat_template in the base model's tokenizer files"
            if self._child.wait() == -signal.SIGALRM:
                message = f"the chat template did not finish one conversation within {self._limit_seconds:g} s"
                raise BadInput(message, f"it may have an endless loop: {hint}")
            raise BadInput(f"the process that renders chat templates ended: {self._exit_reason()}", hint)
        if "error" in reply:
            raise Unusable(printable(str(reply["error"])))
        return reply

    def _ask(self, request: dict[str, object]) -> dict[str, object] | None:
        """Send one line and read one line; None if the child died."""
        line = json.dumps(request)
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            print(line, file=self._child.stdin, flush=True)
        except BrokenPipeError:
            return None
        if not (self._is_known_slow or select.select([self._child.stdout], [], [], self._slow_seconds)[0]):
            self._is_known_slow = True
            self._notice(
                "the chat template takes long for one conversation; it is stopped after "
                f"{self._limit_seconds:g} s, and the run with it"
            )
        reply = self._child.stdout.readline()
        return cast(dict[str, object], json.loads(reply)) if reply.endswith("\n") else None

    def _exit_reason(self) -> str:
        code = self._child.wait()
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def located_messages(draft: ChatDraft) -> tuple[int, ...]:
    """The messages of a draft whose words are located: those that have loss, and those whose EOS token may have it."""
    assert draft.trained is not None
    return draft.trained if draft.train_on_eos in ("turn", "none") else tuple(range(len(draft.messages)))


def _wanted(draft: ChatDraft) -> dict[str, object]:
    """What the child should locate. The EOS token behind a message may have loss though its words have none."""
    if draft.completion_from is not None:
        return {"what": "from", "message": draft.completion_from}
    if draft.trained is not None:
        return {"what": "words", "messages": list(located_messages(draft))}
    return {"what": "turns"}
