"""Spans are on disk soon after they end, even if the process is killed."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lucidrl.profiling.recording import SpanFile
from lucidrl.profiling.spans import recorder, span
from lucidrl.profiling.trace_files import ProcessName
from tests.unit.profiling.span_reading import events_of, spans_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "not there yet" / "driver.spans.json"


@pytest.fixture
def file(path):
    file = SpanFile(path, ProcessName("driver"))
    yield file
    file.close()


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def files_of_at_most(size_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_spans_are_written_while_the_file_is_open(file, path):
    with span("generate"):
        pass
    wait_for(lambda: spans_of(path) == ["generate"])
    with span("train"):
        pass
    wait_for(lambda: spans_of(path) == ["generate", "train"])


def test_a_closed_file_is_json_with_the_rest_in_it(file, path):
    with span("train"):
        pass
    file.close()
    file.close()
    assert path.read_text().endswith("]\n")
    assert spans_of(path) == ["train"]


def test_nothing_is_kept_after_the_end(file, path):
    file.close()
    with span("late"):
        pass
    assert recorder.take_spans() == []
    assert spans_of(path) == []


def test_it_names_its_process_and_uses_unix_time(file, path):
    before_us = time.time_ns() / 1000
    with span("train"):
        time.sleep(0.01)
    file.close()
    name, anchor, *others, end = events_of(path)
    (train,) = (event for event in others if event["ph"] == "X")
    (thread,) = (event for event in others if event["name"] == "thread_name")
    assert (name["name"], name["args"], name["pid"]) == ("process_name", {"name": "driver"}, os.getpid())
    assert anchor["name"] == "lucidrl"
    assert anchor["args"]["process"] == "driver"
    assert anchor["args"]["anchor"]["ts_us"] == anchor["args"]["anchor"]["unix_time_ns"] / 1000
    assert abs(train["ts"] - before_us) < 1e6
    assert 10_000 <= train["dur"] < 1e6
    assert train["tid"] == thread["tid"] == threading.get_native_id()
    assert thread["args"] == {"name": threading.current_thread().name}
    assert end["name"] == "ended"


def test_it_counts_the_memory_of_its_process_and_what_the_process_counts(file, path):
    recorder.count("waiting", 3)
    file.close()
    recorder.count("waiting", 4)  # no file keeps it
    values = {event["name"]: event["args"]["value"] for event in events_of(path) if event["ph"] == "C"}
    assert values.keys() == {"waiting", "memory of the process (MB)", "CPU of the process (%)"}
    assert values["waiting"] == 3
    assert 10 < values["memory of the process (MB)"] < 1e6


@pytest.mark.slow
def test_a_killed_process_leaves_the_spans_that_ended_before(path):
    code = (
        "import os, signal, time; from pathlib import Path\n"
        "from lucidrl.profiling.recording import SpanFile\n"
        "from lucidrl.profiling.spans import span\n"
        "from lucidrl.profiling.trace_files import ProcessName\n"
        f"file = SpanFile(Path({str(path)!r}), ProcessName('rank'))\n"
        "with span('before'): pass\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == -signal.SIGKILL
    assert spans_of(path) == ["before"]


def test_a_full_disk_is_one_warning_and_spans_continue(path, caplog):
    with files_of_at_most(1000), caplog.at_level(logging.WARNING):
        file = SpanFile(path, ProcessName("policy-0"))
        for _ in range(3):
            for _ in range(20):
                with span("train"):
                    pass
            time.sleep(0.15)
        file.close()
    (record,) = caplog.records
    assert "all further spans of policy-0 are lost" in record.getMessage()
    assert str(path) in record.getMessage()
    json.loads(path.read_text())  # what there is ends with a whole span


def test_a_disk_that_takes_only_a_part_is_full(path, caplog):
    with files_of_at_most(1000), caplog.at_level(logging.WARNING):
        file = SpanFile(path, ProcessName("policy-0"))
        for _ in range(20):
            with span("train"):
                pass
        file.close()  # all of them in one write, of which the beginning fits
    assert "no space left" in caplog.text


def test_a_file_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        SpanFile(tmp_path / "file" / "spans.json", ProcessName("driver"))


def test_the_file_is_whole_at_any_moment_and_on_a_full_disk(file, path):
    with span("generate"):
        pass
    wait_for(lambda: spans_of(path) == ["generate"])
    assert json.loads(path.read_text())
    with files_of_at_most(path.stat().st_size + 50):
        for _ in range(3):
            with span("train"):
                pass
        file.close()
    assert [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"] == ["generate"]
