"""Signals to this very process, and a second one to a child, which ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

import pytest

from ratel_cli.errors import Interrupted
from ratel_cli.training.stopping import StopRequest

CHILD = """
import sys, time
from ratel_cli.training.stopping import StopRequest
with StopRequest() as stop:
    print("open", flush=True)
    while stop._received is None:
        time.sleep(0.005)
    print("noted", flush=True)
    try:
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_the_first_signal_is_told_at_the_next_check(number: signal.Signals, name: str, code: int) -> None:
    before = handlers()
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        for _ in range(2):
            with pytest.raises(Interrupted, match=f"stopped by {name}") as raised:
                stop.check()
            assert raised.value.signal_exit_code == code
    assert handlers() == before


def test_without_a_signal_nothing_happens() -> None:
    before = handlers()
    with StopRequest() as stop:
        assert handlers() != before
        stop.check()
    assert handlers() == before
    stop.close()
    assert handlers() == before


def test_the_handlers_of_before_work_again() -> None:
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
            with pytest.raises(Interrupted):
                stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_the_work_raises_passes_through() -> None:
    before = handlers()
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert handlers() == before


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGTERM, 143),
    ],
)
def test_the_second_signal_ends_the_process_at_once(first: signal.Signals, second: signal.Signals, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        child.send_signal(first)
        assert child.stdout.readline() == "noted\n"
        child.send_signal(second)
        assert child.wait(timeout=60) == code
        assert child.stdout.read() == ""
