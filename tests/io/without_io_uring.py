"""A process in which io_uring is forbidden: transfers use threads, with one notice.

Usage, at the top of the repository: python -m tests.io.without_io_uring FILE. Fails with an AssertionError. Or, with
`ratel` and its arguments in place of FILE, for a command in such a process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

from ratel_cli.cli import app as command_line
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.queue import Extent, open_queue

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL_WITH = 0x7FFF0000, 0x00050000
ERROR = "TEST_IO_URING_ERROR"
"""In the environment: the number of the error with which a command's calls fail."""
_IO_URING_SETUP = 425  # the same number on every architecture


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("constant", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


def forbid_io_uring(error: int = errno.EPERM) -> None:
    """Install a system call filter under which io_uring_setup fails with this error: EPERM as in Docker and podman, or
    ENOSYS as where the filter does not know the call."""
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_WORD, 0, 0, 0),  # the number of the system call
        _Instruction(_JUMP_IF_EQUAL, 0, 1, _IO_URING_SETUP),
        _Instruction(_RETURN, 0, 0, _FAIL_WITH | error),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(instructions), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    if sys.argv[1] == "ratel":
        forbid_io_uring(int(os.environ.get(ERROR, errno.EPERM)))
        sys.exit(command_line.main(sys.argv[2:]))
    forbid_io_uring()
    notices: list[str] = []
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    with open_queue("auto", notice=notices.append) as queue, BufferPool(None) as pool:
        assert queue.engine == "threads"
        memory = pool.lease(1 << 20, "test").memory
        memory[:] = bytes(range(256)) * 4096
        queue.write([Extent(fd=fd, offset=0, memory=memory)]).wait()
        assert Path(sys.argv[1]).read_bytes() == memory
    os.close(fd)
    assert len(notices) == 1 and "io_uring is not available here: Operation not permitted" in notices[0], notices
    try:
        open_queue("io_uring", notice=notices.append)
    except EnvironmentFailure as failure:
        assert isinstance(failure.__cause__, OSError) and failure.hint is not None
    else:
        raise AssertionError("io_uring was opened although it is forbidden")
    assert len(notices) == 1


if __name__ == "__main__":
    main()
