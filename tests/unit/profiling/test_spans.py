"""Spans time phases: nested, in threads, through exceptions and forks."""

import json
import os
import runpy
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucidrl.profiling import spans
from lucidrl.profiling.spans import SpanRecorder


def test_totals_add_up_by_name_and_are_drained_once():
    recorder = SpanRecorder()
    for _ in range(3):
        with recorder.span("train"):
            time.sleep(0.002)
    total = recorder.drain()["train"]
    assert total.count == 3
    assert 0.006 <= total.seconds < 60
    assert recorder.drain() == {}


def test_a_span_that_raises_is_still_timed():
    recorder = SpanRecorder()
    with pytest.raises(RuntimeError), recorder.span("train"):
        raise RuntimeError
    assert recorder.drain()["train"].count == 1


def test_single_spans_have_a_thread_and_a_wall_clock_start():
    recorder = SpanRecorder()
    recorder.keep_spans(10)
    before_ns = time.time_ns()
    with recorder.span("step"), recorder.span("train"):
        time.sleep(0.001)
    inner, outer = recorder.take_spans()
    assert (outer.name, inner.name) == ("step", "train")
    assert outer.thread == inner.thread == threading.get_native_id()
    assert outer.start_ns <= inner.start_ns
    assert inner.start_ns + inner.duration_ns <= outer.start_ns + outer.duration_ns
    assert abs(outer.start_ns - before_ns) < 1e8
    assert recorder.take_spans() == []


def test_the_buffer_keeps_the_newest_and_is_off_by_default():
    recorder = SpanRecorder()
    with recorder.span("unseen"):
        pass
    recorder.keep_spans(2)
    for name in "abc":
        with recorder.span(name):
            pass
    assert [span.name for span in recorder.take_spans()] == ["b", "c"]
    recorder.keep_spans(0)
    with recorder.span("unseen"):
        pass
    assert recorder.take_spans() == []


def test_threads_lose_no_span():
    recorder = SpanRecorder()
    recorder.keep_spans(10_000)

    def work():
        for _ in range(500):
            with recorder.span("outer"), recorder.span("inner"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    with recorder.span("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recorder.drain()["inner"].count == 2000
    assert sum(span.name == "inner" for span in recorder.take_spans()) == 2000


def test_a_span_inside_one_of_the_same_name_counts_once():
    recorder = SpanRecorder()
    recorder.keep_spans(10)
    with recorder.span("train"), recorder.span("forward"), recorder.span("train"):
        time.sleep(0.002)
    assert [span.name for span in recorder.take_spans()] == ["forward", "train"]
    assert recorder.drain()["train"].count == 1


def test_a_span_of_the_same_name_in_another_thread_counts_for_itself():
    recorder = SpanRecorder()

    def work():
        with recorder.span("train"):
            pass

    with recorder.span("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorder.drain()["train"].count == 2


def test_spans_show_up_in_a_trace_of_torchs_profiler_nested_as_they_are(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with spans.span("step"), spans.span("train"):
            torch.ones(3)
        with pytest.raises(RuntimeError), spans.span("fails"):
            raise RuntimeError
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {event["name"]: event for event in events if event.get("cat") == "user_annotation"}
    assert found.keys() >= {"step", "train", "fails"}
    step, train = found["step"], found["train"]
    assert step["ts"] <= train["ts"]
    assert train["ts"] + train["dur"] <= step["ts"] + step["dur"]
    assert train["tid"] == threading.get_native_id()


def test_spans_are_nvtx_ranges_where_nsight_systems_runs_the_process(monkeypatch):
    pushed = []
    monkeypatch.setattr(spans, "_emits_nvtx", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    with spans.span("step"), spans.span("train"):
        pass
    assert pushed == ["step", "train", "end", "end"]


@pytest.mark.parametrize(("is_run_by_it", "has_gpu"), [(True, True), (True, False), (False, True)])
def test_nsight_systems_is_noticed_when_the_program_begins(monkeypatch, is_run_by_it, has_gpu):
    if is_run_by_it:
        monkeypatch.setenv(spans.NSYS_SESSION, "1")
    else:
        monkeypatch.delenv(spans.NSYS_SESSION, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    fresh = runpy.run_path(spans.__file__)
    assert fresh["is_under_nsys"]() is fresh["_emits_nvtx"] is (is_run_by_it and has_gpu)


def test_a_forked_child_forgets_the_single_spans_of_its_parent():
    recorder = SpanRecorder()
    recorder.keep_spans(10)
    with recorder.span("parent"):
        pass
    recorder.reset()
    assert recorder.take_spans() == []


def test_a_timed_function_keeps_its_name():
    @SpanRecorder().span("train")
    def run(): ...

    assert run.__name__ == "run"


def test_an_open_span_counts_when_it_ends():
    recorder = SpanRecorder()
    with recorder.span("step"):
        assert recorder.drain() == {}
    assert recorder.drain()["step"].count == 1


def test_exclusive_times_count_every_moment_once():
    recorder = SpanRecorder()
    recorder.keep_spans(10)
    with recorder.span("rollout"):
        with recorder.span("generate"), recorder.span("forward"):
            time.sleep(0.002)
        with recorder.span("rollout"):  # counts once
            time.sleep(0.002)
        with recorder.span("generate"):
            time.sleep(0.001)
    durations = {span.name: span.duration_ns / 1e9 for span in recorder.take_spans()}
    exclusive = recorder.take_exclusive()
    assert exclusive.keys() == {("rollout", name) for name in ("rollout", "generate", "forward")}
    assert sum(exclusive.values()) == pytest.approx(durations["rollout"], abs=1e-6)
    assert exclusive["rollout", "forward"] == pytest.approx(durations["forward"], abs=1e-6)
    assert exclusive["rollout", "rollout"] >= 0.002
    assert recorder.take_exclusive() == {}


def test_exclusive_times_are_those_of_the_thread_that_takes_them():
    recorder = SpanRecorder()

    def work():
        with recorder.span("background"):
            pass

    with recorder.span("step"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorder.take_exclusive().keys() == {("step", "step")}
    assert recorder.totals().keys() == {"step", "background"}


def test_a_span_that_is_open_when_times_are_taken_counts_whole_at_its_end():
    recorder = SpanRecorder()
    with recorder.span("step"):
        with recorder.span("train"):
            pass
        first = recorder.take_exclusive()
        time.sleep(0.002)
    second = recorder.take_exclusive()
    assert (first.keys(), second.keys()) == ({("step", "train")}, {("step", "step")})
    total = recorder.drain()["step"].seconds
    assert sum(first.values()) + sum(second.values()) == pytest.approx(total, abs=1e-6)


def test_a_forked_child_starts_from_nothing_even_if_the_lock_was_held():
    spans.recorder.reset()
    with spans.span("parent"):
        pass
    with spans.recorder._lock:
        child = os.fork()
        if child == 0:
            with spans.span("child"):
                pass
            os._exit(0 if spans.recorder.drain().keys() == {"child"} else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert spans.recorder.drain().keys() == {"parent"}
