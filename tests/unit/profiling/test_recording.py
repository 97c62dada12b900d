"""Requested recordings are written, and errors never stop the process."""

from __future__ import annotations

import logging
import os
import shutil
import threading

import pytest
import torch

from lucidrl.profiling import recording
from lucidrl.profiling.recording import Recording
from lucidrl.profiling.settings import FOLDER_VARIABLE, MEMORY_VARIABLE
from lucidrl.profiling.spans import span
from tests.unit.profiling.reading import read_trace, run_program
from tests.unit.profiling.span_reading import spans_of


@pytest.fixture
def traces(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "there yet"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def files(folder, suffix=".json"):
    return sorted(path for path in folder.iterdir() if "".join(path.suffixes[-2:]).endswith(suffix))


def operator_traces(folder):
    return [path for path in files(folder) if not path.name.endswith(".spans.json")]


def work():
    with span("train"):
        return torch.ones(3) + 1


def test_it_has_the_operators_and_the_spans_of_its_time(traces):
    record = Recording("policy-3")
    record.start()
    work()
    record.stop()
    work()
    trace, spans = files(traces)
    assert trace.name.startswith("policy-3_")
    assert f"_{os.getpid()}_" in trace.name
    assert spans.name == trace.name.replace(".json", ".spans.json")
    content = read_trace(trace)
    names = [event.get("name") for event in content["traceEvents"]]
    assert "aten::add" in names
    assert names.count("train") == 1
    assert content["lucidrl"]["process"] == "policy-3"
    assert spans_of(spans) == ["train"]


def test_starting_and_stopping_twice_does_nothing(traces):
    record = Recording("policy-0")
    record.stop()
    assert not traces.exists()
    for _ in range(2):
        record.start()
    for _ in range(2):
        record.stop()
    assert len(files(traces)) == 2


def test_every_recording_has_separate_files(traces):
    record = Recording("policy-0")
    for _ in range(3):
        record.start()
        record.stop()
    assert len(operator_traces(traces)) == 3


def test_a_process_has_one_recording_at_a_time(traces):
    policy, driver = Recording("policy-0"), Recording("driver", operators=False)
    policy.start()
    driver.start()
    work()
    driver.stop()
    work()
    policy.stop()
    assert {path.name.partition("_")[0] for path in files(traces)} == {"policy-0"}
    (spans,) = traces.glob("*.spans.json")
    assert spans_of(spans) == ["train", "train"]
    driver.start()
    driver.stop()
    assert {path.name.partition("_")[0] for path in files(traces)} == {"policy-0", "driver"}


def test_spans_alone_need_no_profiler(traces):
    record = Recording("driver", operators=False)
    record.start()
    assert not torch.autograd.profiler._is_profiler_enabled
    work()
    record.stop()
    (spans,) = files(traces)
    assert spans_of(spans) == ["train"]


def test_traces_go_to_the_current_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    record = Recording("policy-0")
    record.start()
    monkeypatch.chdir(os.sep)  # the folder is that of the start
    record.stop()
    assert len(files(tmp_path / "traces")) == 2


def test_a_folder_that_cannot_be_made_is_a_warning_for_each_thing_that_is_lost(traces, caplog):
    traces.parent.mkdir()
    traces.touch()
    record = Recording("policy-0")
    with caplog.at_level(logging.WARNING):
        record.start()
        work()
        record.stop()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the traces of policy-0 have no spans",
        "the traces of policy-0 have no operators",
    ]


def test_a_folder_that_is_removed_meanwhile_is_made_again(traces):
    record = Recording("policy-0")
    record.start()
    shutil.rmtree(traces)
    record.stop()
    assert len(operator_traces(traces)) == 1


def test_a_profiler_that_records_already_is_a_warning(traces, caplog):
    record = Recording("policy-0")
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as running,
        caplog.at_level(logging.WARNING),
    ):
        record.start()
        work()
        record.stop()
    assert "have no operators: a torch profiler already records in this process" in caplog.text
    assert any(event.key == "aten::add" for event in running.key_averages())
    (spans,) = files(traces)
    assert spans_of(spans) == ["train"]


@pytest.mark.slow
def test_another_thread_cannot_stop_it_and_does_not_crash(tmp_path):
    """In a separate process: that thread cannot end the profiler."""
    code = """
import threading, torch
from lucidrl.profiling.recording import Recording
record = Recording("policy-0")
record.start()
torch.ones(3) + 1
thread = threading.Thread(target=record.stop)
thread.start()
thread.join()
record.start()
print("alive")
"""
    assert run_program(code, tmp_path).strip() == "alive"


@pytest.mark.slow
def test_a_running_recording_is_written_at_the_end_of_the_program(tmp_path):
    code = "from lucidrl.profiling.recording import Recording; Recording('policy-0').start()"
    run_program(code, tmp_path)
    assert len(files(tmp_path / "traces")) == 2


def test_a_fork_neither_writes_nor_ends_the_recording_of_its_parent(traces):
    record = Recording("policy-0", operators=False)
    record.start()
    child = os.fork()
    if child == 0:
        record.stop()
        own = Recording("child", operators=False)
        own.start()
        own.stop()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    work()
    record.stop()
    child_file, own_file = files(traces)
    assert child_file.name.startswith("child_")
    assert spans_of(own_file) == ["train"]


# With a GPU, as far as that can be told without one


@pytest.fixture
def cuda_calls(monkeypatch):
    """A GPU that records its calls."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all": calls.append(f"history {enabled}")
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    return calls


def test_under_nsight_systems_it_bounds_the_capture(traces, monkeypatch, cuda_calls):
    monkeypatch.setattr(recording, "is_under_nsys", lambda: True)
    record = Recording("policy-0")
    for _ in range(2):
        record.start()
    work()
    for _ in range(2):
        record.stop()
    assert cuda_calls == ["start", "stop"]
    (spans,) = files(traces)
    assert spans_of(spans) == ["train"]


def test_a_memory_snapshot_is_taken_on_request(traces, monkeypatch, cuda_calls):
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    monkeypatch.setattr(recording, "is_under_nsys", lambda: True)
    record = Recording("policy-0")
    record.start()
    record.stop()
    begin, start, stop, path, end = cuda_calls
    assert (begin, start, stop, end) == ("history all", "start", "stop", "history None")
    assert path.startswith(str(traces / "policy-0_"))
    assert path.endswith(".memory.pickle")


@pytest.mark.parametrize(("requested", "operators"), [("0", True), ("1", False)])
def test_no_memory_snapshot_is_taken_without_a_request_or_of_a_driver(
    traces, monkeypatch, cuda_calls, requested, operators
):
    monkeypatch.setenv(MEMORY_VARIABLE, requested)
    monkeypatch.setattr(recording, "is_under_nsys", lambda: True)
    record = Recording("driver", operators=operators)
    record.start()
    record.stop()
    assert not [call for call in cuda_calls if "history" in call]


def test_on_a_cpu_a_memory_snapshot_is_one_sentence(traces, monkeypatch, caplog):
    monkeypatch.setenv(MEMORY_VARIABLE, "1")
    record = Recording("policy-0")
    with caplog.at_level(logging.WARNING):
        record.start()
        record.stop()
    (message,) = caplog.messages
    assert message == "the traces of policy-0 have no memory: a memory snapshot needs a GPU, and there is none"


def test_threads_that_start_at_once_make_one_recording(traces):
    records = [Recording(f"policy-{number}", operators=False) for number in range(8)]
    threads = [threading.Thread(target=record.start) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for record in records:
        record.stop()
    assert len(files(traces)) == 1
