"""Chat children that are forks of one process, which has imported transformers once.

Each conversation of a test is rendered by a process of its own, as in a run. That process runs the same chat_child.py,
but does not spend a second on starting. tests/data/test_chat.py and test_chat_pool.py have children that are started as
a run starts them, and so have all tests that start the program.

The zygote (tests/chat_zygote.py) gets one byte for each child, with three descriptors: a socket, which gets the
child's process number and later its exit code, and the child's ends of its pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ratel_cli.data.text import chat


@contextlib.contextmanager
def forked_chat_children() -> Iterator[None]:
    """A context in which the chat children of this process are forks."""
    forked = SimpleNamespace(Popen=_ForkedChild, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(chat, "subprocess", forked):
        yield


class _ForkedChild:
    """What `ChatRenderer` uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], **_options: object) -> None:
        own, status = socket.socketpair()
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        try:
            socket.send_fds(_zygote(command[-1]), [b"."], [status.fileno(), stdin_read, stdout_write])
        finally:
            status.close()
            os.close(stdin_read)
            os.close(stdout_write)
        self.stdin = os.fdopen(stdin_write, "w", encoding="utf-8")
        self.stdout = os.fdopen(stdout_read, encoding="utf-8")
        self.returncode: int | None = None
        self._status = own.makefile()
        own.close()
        self.pid = int(self._status.readline())

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def communicate(self) -> None:
        """Close the pipes and wait. A pipe that nobody reads any more is closed as well."""
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.wait()


@functools.cache
def _zygote(chat_child: str) -> socket.socket:
    """The socket of the process that forks, which is started by the first one who asks."""
    own, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    program = Path(__file__).with_name("chat_zygote.py")
    process = subprocess.Popen(
        [sys.executable, "-P", str(program), str(its.fileno()), chat_child],
        stdin=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        start_new_session=True,
        cwd="/",  # the directory of the test that asked first will be removed
    )
    its.close()
    atexit.register(_end, own, process)
    return own


def _end(own: socket.socket, process: subprocess.Popen[bytes]) -> None:
    own.close()
    process.wait()
