"""Trace files are complete or absent, and name their process."""

from __future__ import annotations

import json
import os
import socket
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucidrl.errors import ConfigError
from lucidrl.profiling.spans import recorded
from lucidrl.profiling.trace_files import ProcessName, _signed, check_folder, check_template, filled, write_trace
from tests.unit.profiling.reading import ranges_of, read_trace, run_program


@pytest.fixture
def recording():
    """A profiler with one range, and the wall-clock times around it."""
    process = ProcessName('the worker\'s "name"')
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        before_ns = time.time_ns()
        with recorded("work"):
            torch.ones(3)
        after_ns = time.time_ns()
    return profiler, process, before_ns, after_ns


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_names_its_process_and_is_alone_in_its_folder(recording, tmp_path, name):
    profiler, process, *_ = recording
    path = tmp_path / "new" / name
    write_trace(profiler, path, process)
    trace = read_trace(path)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name" and e["pid"] == os.getpid()]
    assert names == [process.name]
    about = trace["lucidrl"]
    assert (about["process"], about["pid"], about["host"]) == (process.name, os.getpid(), socket.gethostname())
    assert list(path.parent.iterdir()) == [path]


def test_the_anchor_converts_a_range_to_wall_clock_time(recording, tmp_path):
    profiler, process, before_ns, after_ns = recording
    write_trace(profiler, tmp_path / "trace.json", process)
    anchor = read_trace(tmp_path / "trace.json")["lucidrl"]["anchor"]
    (work,) = ranges_of(tmp_path / "trace.json")
    began_ns = anchor["unix_time_ns"] + (work.begin - anchor["ts_us"]) * 1000
    assert before_ns - 1e6 < began_ns < after_ns + 1e6


@pytest.mark.slow
def test_a_full_disk_raises_and_keeps_the_older_trace(tmp_path):
    code = """if True:
        import pathlib, resource, torch
        from torch.profiler import ProfilerActivity, profile
        from lucidrl.profiling.trace_files import ProcessName, write_trace

        process = ProcessName("worker")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(1000):
                torch.ones(3)
        path = pathlib.Path("trace.json")
        path.write_text("older")
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            write_trace(profiler, path, process)
        except OSError as error:
            print(error)
        assert path.read_text() == "older"
        assert list(pathlib.Path().iterdir()) == [path]
    """
    assert run_program(code, tmp_path).strip() == "the trace is not complete; perhaps the disk is full"


def test_placeholders_are_filled_in_and_doubled_braces_stay():
    assert check_template("{host}/{pid}_{worker_idx}_{{x}}.json") == {"host", "pid", "worker_idx"}
    path = filled("{host}/{pid}_{worker_idx}_{{x}}.json", 3)
    assert path.is_absolute()
    assert path.parts[-2:] == (socket.gethostname(), f"{os.getpid()}_3_{{x}}.json")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (
            "{rank}.json",
            r"save_path='{rank}.json' has the unknown placeholder {rank}; use {worker_idx}, {pid}, {host}, and",
        ),
        ("{}.json", r"has the unknown placeholder {}"),
        ("{pid.real}.json", r"has the unknown placeholder {pid.real}"),
        ("{worker_idx.json", r"save_path='{worker_idx.json' cannot be read: .*; use {worker_idx}"),
        ("{pid:05d}.json", r"formats a placeholder, which is not supported"),
        ("{pid!r}.json", r"formats a placeholder, which is not supported"),
    ],
)
def test_other_placeholders_are_refused(template, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_template(template)


def test_a_folder_that_cannot_be_written_is_refused_by_the_name_of_its_setting(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"traces cannot be written to .*/file/below \(.*\); set there to another folder"
    ):
        check_folder(tmp_path / "file" / "below", "there")
    check_folder(tmp_path / "new" / "below", "there")
    assert list((tmp_path / "new" / "below").iterdir()) == []


def test_a_trace_may_describe_any_number_of_gpus_and_process_groups(tmp_path):
    process = ProcessName("policy-0")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiler.add_metadata_json("distributedInfo", json.dumps({"pg_config": [{"ranks": list(range(64))}] * 50}))
        torch.ones(3)
    write_trace(profiler, tmp_path / "trace.json", process)
    assert read_trace(tmp_path / "trace.json")["lucidrl"]["process"] == "policy-0"


def test_a_truncated_trace_is_refused():
    """As the library leaves it on a full disk, if it leaves anything."""
    half = b'{"baseTimeNanoseconds": 1, "traceEvents": [ {"name": "x"'
    with pytest.raises(OSError, match="not complete"):
        _signed(half, ProcessName("worker"))
    assert b'"worker"' in _signed(half + b"}]}", ProcessName("worker"))
