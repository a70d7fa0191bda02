"""The process that forks the chat children of tests. tests/forked_chat.py starts it, and has what crosses the socket.

Importing transformers takes a chat child a second; here it is imported once. A fork has what a fresh child has: a
session of its own, pipes as stdin and stdout, signals at their defaults, no torch, and nothing of ours but
chat_child.py.

    python -P chat_zygote.py CONTROL CHAT_CHILD     a file descriptor, a path

Invariant: it ends when the tests have closed their end of the control socket.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType

_NUM_DESCRIPTORS = 3


def main() -> None:
    """Fork a chat child for each message of the control socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    chat_child = _load(sys.argv[2])
    for module in ("transformers.utils.chat_template_utils", "jinja2.ext", "jinja2.sandbox"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, _NUM_DESCRIPTORS)
        if not descriptors:
            return
        if os.fork() == 0:
            control.close()
            _in_fork(partial(_keep, chat_child, *descriptors))
        for each in descriptors:
            os.close(each)


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("chat_child", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chat_child"] = module
    spec.loader.exec_module(module)
    return module


def _keep(chat_child: ModuleType, status: int, stdin: int, stdout: int) -> None:
    """Be the parent of a chat child: report its number, then how it ended. It stays a zombie until that was read."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(status)
        _in_fork(partial(_be_chat_child, chat_child, stdin, stdout))
    os.close(stdin)
    os.close(stdout)
    with socket.socket(fileno=status) as reports:
        reports.sendall(b"%d\n" % child)
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        reports.sendall(b"%d\n" % (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status))
        reports.recv(1)


def _be_chat_child(chat_child: ModuleType, stdin: int, stdout: int) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number, each in enumerate((stdin, stdout, nothing)):
        os.dup2(each, number)
        os.close(each)
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
    chat_child.main()
    sys.stdout.flush()


def _in_fork(work: Callable[[], None]) -> None:
    """Do the work and end this process, without what it has inherited to be done at its end."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
