"""Renders many conversations at once: with one child process, and when there are many of them with one for each core.

Invariants: answers come in the order of the questions, and the first error is that of the first conversation that has
one, so that the number of children changes nothing. A child that starts takes a second: small data has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import Protocol

from ratel_cli.closing import Closing
from ratel_cli.data.text.chat import ChatRenderer, RenderedChat
from ratel_cli.data.text.drafts import ChatDraft, Unusable, unless_unusable
from ratel_cli.errors import EnvironmentFailure

ALONE = 2048
"""Conversations that a child renders in the time that it takes to start."""
_AT_ONCE = 32  # conversations that a child gets together

Answers = list[RenderedChat | Unusable]


class Begin(Protocol):
    """Starts a child, as `ChatRenderer` does."""

    def __call__(self, *, begun: Callable[[ChatRenderer], None], notice: Callable[[str], None]) -> ChatRenderer: ...


class Rendering:
    """Conversations that are being rendered."""

    def __init__(self, parts: Sequence[Future[Answers]]) -> None:
        self._parts = parts

    def answers(self) -> Answers:
        """Wait for the text of each conversation, or why it has none. Raises what `ChatRenderer.render` raises."""
        return [answer for part in self._parts for answer in part.result()]


class ChatPool(Closing):
    """Up to `most` children; all but the first start when `alone` conversations were asked for.

    `notice` gets each remark for the user once.
    """

    def __init__(self, begin: Begin, *, most: int, notice: Callable[[str], None], alone: int = ALONE) -> None:
        """Start the first child. Raises EnvironmentFailure if it does not start."""
        self._begin = begin
        self._notice = notice
        self._told: set[str] = set()
        self._num_further = most - 1
        self._num_before_further = alone
        self._lock = Lock()
        self._is_closed = False
        self._children: list[ChatRenderer] = []
        self._free = SimpleQueue[ChatRenderer | None]()
        """Children without work; None: one more may start."""
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="ratel-chat")
        try:
            self._free.put(begin(begun=self._register, notice=self._tell))
        except BaseException:
            self.close()
            raise

    def start(self, drafts: Sequence[ChatDraft], *, locate: Callable[[ChatDraft], bool]) -> Rendering:
        """Have conversations rendered. `locate`: whether the parts of one that are trained are to be found."""
        self._num_before_further -= len(drafts)
        if self._num_before_further < 0:
            while self._num_further:
                self._num_further -= 1
                self._free.put(None)
        questions = [(draft, locate(draft)) for draft in drafts]
        parts = [questions[first : first + _AT_ONCE] for first in range(0, len(questions), _AT_ONCE)]
        return Rendering([self._threads.submit(self._render, part) for part in parts])

    def close(self) -> None:
        """End all children, even in the middle of a template. Idempotent."""
        with self._lock:
            self._is_closed = True
            for child in self._children:
                child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def _render(self, questions: Sequence[tuple[ChatDraft, bool]]) -> Answers:
        child = self._free_child()
        try:
            return [unless_unusable(partial(child.render, draft, locate=locate)) for draft, locate in questions]
        finally:
            self._free.put(child)

    def _free_child(self) -> ChatRenderer:
        while (child := self._free.get()) is None:
            try:
                return self._begin(begun=self._register, notice=self._tell)
            except EnvironmentFailure:
                pass  # no memory for one more, or the pool is being closed: the first does the work
        return child

    def _register(self, child: ChatRenderer) -> None:
        """Note a child before it is ready, so that `close` need not wait for it."""
        with self._lock:
            if self._is_closed:
                child.kill()
            self._children.append(child)

    def _tell(self, text: str) -> None:
        with self._lock:
            is_new = text not in self._told
            self._told.add(text)
        if is_new:
            self._notice(text)
