"""A back end in its own thread: in order, without waiting, with every loss logged."""

import logging
import threading
import time

import pytest

from lucidrl.utils.logger.background import BackgroundWriter


class Backend:
    """Collects its calls; an event can block a call."""

    def __init__(self):
        self.seen = []
        self.is_finished = False
        self.gate = threading.Event()

    def finish(self):
        self.is_finished = True


def writer_of(backend, capacity=100, start=None):
    return BackgroundWriter("Tracker", start or (lambda: backend), capacity)


def end(writer, timeout_s=5.0):
    """Seconds that the end took."""
    start = time.monotonic()
    writer.close()
    writer.join(start + timeout_s, timeout_s)
    return time.monotonic() - start


def raise_error(error):
    raise error


def test_calls_arrive_in_order_and_the_back_end_is_finished_last(caplog):
    backend = Backend()
    writer = writer_of(backend)
    for step in range(50):
        writer.put(lambda b, step=step: b.seen.append((step, b.is_finished)), step)
    end(writer)
    assert backend.seen == [(step, False) for step in range(50)]
    assert backend.is_finished
    assert not caplog.records


def test_putting_never_waits_and_what_does_not_fit_is_counted_by_step(caplog):
    backend = Backend()
    writer = writer_of(backend, capacity=3)
    entered = threading.Event()
    writer.put(lambda b: (entered.set(), b.gate.wait()), 0)
    assert entered.wait(60)
    start = time.monotonic()
    for step in range(1, 11):
        writer.put(lambda b, step=step: b.seen.append(step), step)
    assert time.monotonic() - start < 10
    backend.gate.set()
    end(writer)
    assert backend.seen == [1, 2, 3]
    assert writer.losses.count == 7
    assert "Tracker lost 7 of 11 records: steps 4 to 10: more than 3 records were waiting (7)" in caplog.text


def test_a_call_that_raises_loses_its_record_and_no_other(caplog):
    backend = Backend()
    writer = writer_of(backend)
    for step in range(4):
        error = RuntimeError("down")
        writer.put(lambda b, step=step, e=error: b.seen.append(step) if step % 2 else raise_error(e), step)
    end(writer)
    assert backend.seen == [1, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "Tracker lost the record of step 0: it raised RuntimeError('down'); further lost records are only counted",
        "Tracker lost 2 of 4 records: steps 0 to 2: it raised RuntimeError('down') (2)",
    ]


def test_errors_of_endless_variety_make_a_short_list(caplog):
    writer = writer_of(Backend())
    for step in range(1000):
        writer.put(lambda b, step=step: raise_error(ValueError("x" * 10_000 + str(step))), step)
        writer.put(lambda b, step=step: raise_error(ValueError(step)), step)
    end(writer)
    assert len(caplog.records[-1].getMessage()) < 3000
    assert "other reasons" in caplog.text


def test_a_back_end_that_cannot_start_loses_everything_with_a_warning(caplog):
    writer = writer_of(None, start=lambda: raise_error(ConnectionError("no route")))
    for step in range(5):
        writer.put(lambda b: None, step)
    assert end(writer) < 4
    assert "Tracker could not start, the run continues without it: no route" in caplog.text
    assert "Tracker lost 5 of 5 records: steps 0 to 4: it could not start" in caplog.text


@pytest.mark.parametrize("stage", ["start", "write", "finish"])
def test_a_back_end_that_hangs_is_abandoned_at_the_timeout_with_its_losses_logged(stage, caplog):
    forever = threading.Event()
    backend = Backend()
    if stage == "finish":
        backend.finish = forever.wait
    writer = writer_of(backend, start=forever.wait if stage == "start" else None)
    for step in range(3):
        writer.put(lambda b: forever.wait() if stage == "write" else b.seen.append(0), step)
    assert 0.1 < end(writer, timeout_s=0.3) < 2
    if stage == "finish":
        assert "Tracker did not close within 0.3 s; its last records may be missing" in caplog.text
    else:
        assert "Tracker lost 3 of 3 records: steps 0 to 2: not written within 0.3 s (3)" in caplog.text
    forever.set()


def test_a_back_end_that_hung_long_before_the_end_gets_no_second_timeout():
    forever = threading.Event()
    writer = writer_of(Backend())
    writer.put(lambda b: forever.wait(), 1)
    time.sleep(0.6)
    assert end(writer, timeout_s=0.5) < 0.3
    forever.set()


def test_the_cpu_time_of_the_thread_is_measured():
    def work(backend):
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    writer = writer_of(Backend())
    writer.put(work)
    end(writer)
    assert 0.05 <= writer.cpu_s < 1


def test_a_failing_finish_is_a_warning(caplog):
    backend = Backend()
    backend.finish = lambda: raise_error(OSError(28, "No space left on device"))
    with caplog.at_level(logging.WARNING):
        end(writer_of(backend))
    assert "Tracker failed to close: OSError(28, 'No space left on device')" in caplog.text
