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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_raised_at_every_later_check(number: signal.Signals, code: int) -> None:
    before = handlers()
    with StopRequest() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        for _ in range(2):
            with pytest.raises(Interrupted, match=r"^Stopped\. Run the same command again\.$") as raised:
                stop.check()
            assert raised.value.exit_code == code
    assert handlers() == before


@pytest.mark.parametrize(
    ("must_resume", "message"),
    [
        (False, "Stopped at step 42 (saved). Run the same command to continue."),
        (True, "Stopped at step 42 (saved). Run the same command with --resume auto to continue."),
    ],
)
def test_the_message_names_the_step_that_is_saved(must_resume: bool, message: str) -> None:
    with StopRequest() as stop:
        stop.saved_step = 42
        stop.must_resume = must_resume
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted) as raised:
            stop.check()
    assert raised.value.message == message


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
        assert child.wait(timeout=300) == code
        assert child.stdout.read() == ""
