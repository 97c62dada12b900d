"""What the training loops share: stopping on request."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from lucidrl.algorithms.loop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_to_stop_and_says_so(number):
    messages = []
    with StopRequest(messages.append) as stop:
        assert not stop.is_set
        os.kill(os.getpid(), number)
        assert stop.is_set
    assert len(messages) == 1
    assert number.name in messages[0]
    assert "saving" in messages[0]


def test_the_second_signal_interrupts_at_once():
    with StopRequest(lambda message: None):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_from_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(RuntimeError), StopRequest(lambda message: None):
        raise RuntimeError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_of_the_main_thread_it_is_never_set():
    found = []

    def use():
        with StopRequest(found.append) as stop:
            found.append(stop.is_set)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest(lambda message: None) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>"), OSError(5, "Input/output error")],
    ids=["in the middle of a write", "the terminal is closed"],
)
def test_a_signal_that_cannot_be_announced_still_stops(error):
    def fail(message):
        raise error

    with StopRequest(fail) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set
