"""A profiler that records some rollouts of a worker."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lucidrl.errors import ConfigError
from lucidrl.profiling.hook import ProfileSettings, _ProfilerHook, started_profiler
from lucidrl.profiling.spans import recorded
from tests.unit.profiling.reading import counts_of, read_trace


def made(hook, number, meanwhile=lambda: None):
    """Makes this number of rollouts."""
    for _ in range(number):
        hook.before_rollout()
        with recorded("rollout"):
            torch.ones(3)
            meanwhile()
        hook({})


@pytest.mark.parametrize(
    ("num_rollouts", "warmup_rollouts", "num_recorded"), [(1, 0, 1), (2, 0, 2), (3, 1, 2), (3, 2, 1)]
)
def test_exactly_the_rollouts_after_the_warm_up_are_recorded(tmp_path, num_rollouts, warmup_rollouts, num_recorded):
    path = tmp_path / "trace.json"
    settings = ProfileSettings(num_rollouts=num_rollouts, warmup_rollouts=warmup_rollouts, save_path=path)
    hook = _ProfilerHook(settings.checked(1))
    made(hook, num_rollouts - 1)
    assert not path.exists()
    assert not hook.is_done
    made(hook, 3)
    assert hook.is_done
    assert counts_of(path) == {"rollout": num_recorded}


def test_stop_writes_the_rollouts_so_far(tmp_path):
    path = tmp_path / "trace.json"
    hook = _ProfilerHook(ProfileSettings(num_rollouts=9, warmup_rollouts=1, save_path=path).checked(1))
    made(hook, 3)
    hook.stop()
    path.rename(tmp_path / "first.json")
    hook.stop()
    made(hook, 9)
    assert counts_of(tmp_path / "first.json") == {"rollout": 2}
    assert not path.exists()


def test_nothing_is_written_if_nothing_was_recorded(tmp_path):
    hook = _ProfilerHook(ProfileSettings(warmup_rollouts=1, save_path=tmp_path / "trace.json").checked(1))
    made(hook, 1)
    hook.stop()
    assert hook.is_done
    assert list(tmp_path.iterdir()) == []


def test_a_worker_fills_in_its_own_number_and_name(tmp_path):
    settings = ProfileSettings(
        workers=[0, 3], num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.gz"
    )
    made(_ProfilerHook(settings.checked(4), 3, "gatherer"), 1)
    assert read_trace(tmp_path / "3.gz")["lucidrl"]["process"] == "gatherer 3"


def test_a_path_is_relative_to_the_folder_of_the_call(tmp_path, monkeypatch):
    here = tmp_path / "{here}"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = ProfileSettings(num_rollouts=1, warmup_rollouts=0).checked(1)
    monkeypatch.chdir("/")
    made(_ProfilerHook(settings), 1)
    (trace,) = (here / "traces").iterdir()
    assert trace.name.endswith(f"_{os.getpid()}_worker_0.json")


def test_shapes_stacks_and_memory_are_recorded_only_on_request(tmp_path):
    def arguments(**options):
        path = tmp_path / "trace.json"
        settings = ProfileSettings(num_rollouts=1, warmup_rollouts=0, save_path=path, **options)
        made(_ProfilerHook(settings.checked(1)), 1)
        events = read_trace(path)["traceEvents"]
        return {name for event in events for name in event.get("args", {})}, {event.get("cat") for event in events}

    names, kinds = arguments()
    assert "Input Dims" not in names
    assert "python_function" not in kinds
    assert "Bytes" not in names
    names, kinds = arguments(record_shapes=True, with_stack=True, profile_memory=True)
    assert {"Input Dims", "Bytes"} <= names
    assert "python_function" in kinds


def test_on_trace_ready_replaces_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken = []
    settings = ProfileSettings(num_rollouts=1, warmup_rollouts=0, on_trace_ready=taken.append).checked(1)
    made(_ProfilerHook(settings), 2)
    assert list(tmp_path.iterdir()) == []
    (profiler,) = taken
    assert "rollout" in {event.key for event in profiler.key_averages()}


def test_an_error_of_on_trace_ready_does_not_stop_rollouts(caplog):
    def fail(profiler):
        raise ValueError("no room")

    made(_ProfilerHook(ProfileSettings(num_rollouts=1, warmup_rollouts=0, on_trace_ready=fail).checked(1)), 2)
    assert "the callback on_trace_ready raised; collection continues" in caplog.text
    assert "no room" in caplog.text


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    settings = ProfileSettings(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "below" / "trace.json").checked(
        1
    )
    (tmp_path / "below").rmdir()
    (tmp_path / "below").touch()
    made(_ProfilerHook(settings), 2)
    assert "the trace of collector worker 0 is lost:" in caplog.text
    assert str(tmp_path / "below" / "trace.json") in caplog.text


def test_another_running_profiler_is_a_warning_in_a_rollout(tmp_path, caplog):
    hook = _ProfilerHook(ProfileSettings(warmup_rollouts=0, save_path=tmp_path / "trace.json").checked(1))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made(hook, 2)
        with pytest.raises(ConfigError, match="a torch profiler already records in this process"):
            started_profiler()
    assert hook.is_done
    assert (
        "no trace of collector worker 0 will be written: a torch profiler already records in this process"
        in caplog.text
    )
    assert "rollout" in {event.key for event in profiler.key_averages()}


def test_stop_of_another_thread_lets_the_rollout_thread_write(tmp_path):
    path = tmp_path / "trace.json"
    hook = _ProfilerHook(ProfileSettings(num_rollouts=9, warmup_rollouts=0, save_path=path).checked(1))
    made(hook, 1)
    thread = threading.Thread(target=hook.stop)
    thread.start()
    thread.join()
    assert not hook.is_done
    hook.before_rollout()
    assert hook.is_done
    assert counts_of(path) == {"rollout": 1}


def test_stop_of_another_thread_during_a_rollout_includes_that_rollout(tmp_path):
    path = tmp_path / "trace.json"
    hook = _ProfilerHook(ProfileSettings(num_rollouts=9, warmup_rollouts=0, save_path=path).checked(1))

    def stop_elsewhere():
        thread = threading.Thread(target=hook.stop)
        thread.start()
        thread.join()

    made(hook, 1, stop_elsewhere)
    assert hook.is_done
    assert counts_of(path) == {"rollout": 1}


def test_the_trace_of_a_thread_that_has_ended_is_lost_with_a_warning(tmp_path, caplog):
    hook = _ProfilerHook(
        ProfileSettings(num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "trace.json").checked(1)
    )
    thread = threading.Thread(target=made, args=(hook, 1))
    thread.start()
    thread.join()
    hook.stop()
    assert "the trace of collector worker 0 is lost: the thread that made the rollouts has ended" in caplog.text
    started_profiler().stop()  # the next one can record


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_rollouts": 0}, "num_rollouts: 0 is not valid: Input should be greater than 0"),
        (
            {"warmup_rollouts": -1},
            "warmup_rollouts: -1 is not valid: Input should be greater than or equal to 0",
        ),
        ({"num_rollouts": 2, "warmup_rollouts": 2}, "warmup_rollouts=2 of num_rollouts=2 leaves nothing to record"),
        ({"activities": []}, "activities: .* is not valid: .*at least 1 item"),
        ({"activities": ["cpu"]}, "activities: 'cpu' is not valid: Input should be an instance of .*ProfilerActivity"),
        ({"workers": []}, "workers: .* is not valid: .*at least 1 item"),
        ({"workers": [2]}, "workers has 2, but workers are numbered from 0 to 1"),
        ({"workers": [0, -1]}, "workers has -1, but workers are numbered from 0 to 1"),
        ({"workers": ["0"]}, "workers: '0' is not valid: Input should be a valid integer"),
        ({"workers": [1, 1]}, r"workers=\[1, 1\] has a worker twice; list each once"),
        ({"save_path": "{rank}.json"}, r"save_path='{rank}.json' has the unknown placeholder {rank}; use {worker_idx}"),
        (
            {"workers": [0, 1], "save_path": "trace.json"},
            "save_path='trace.json' is the same for 2 workers; put {worker",
        ),
        ({"workers": [0, 1], "save_path": "{host}.json"}, "is the same for 2 workers"),
        ({"save_path": "folder"}, "save_path='folder' is a folder; use a file name"),
        ({"save_path": "file/trace.json"}, r"traces cannot be written to .*/file .*; set save_path to another folder"),
    ],
)
def test_settings_that_cannot_be_recorded_or_written_are_refused(tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=sentence):
        ProfileSettings(**options).checked(2)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can be recorded here")
def test_an_activity_that_this_machine_cannot_record_is_refused():
    with pytest.raises(ConfigError, match="activities has CUDA, which this machine cannot record; leave it out"):
        started_profiler([ProfilerActivity.CPU, ProfilerActivity.CUDA])


def test_folders_named_after_a_process_are_made_by_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    settings = ProfileSettings(
        num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "a" / "{pid}" / "t.json"
    ).checked(1)
    assert list((tmp_path / "a").iterdir()) == []
    made(_ProfilerHook(settings), 1)
    assert f"the trace of collector worker 0 is in {tmp_path}/a/{os.getpid()}/t.json" in caplog.text


MISFITS = {
    "workers": [0, iter([0]), [True], [0.0], ["0"]],
    "num_rollouts": [2.5, float("inf"), "3", None],
    "warmup_rollouts": [0.5, None],
    "save_path": [5, b"trace.json", "new/", "a\0b.json", "a" * 300],
    "activities": [ProfilerActivity.CPU, iter([ProfilerActivity.CPU])],
    "on_trace_ready": [5],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in MISFITS.items() for value in values])
def test_options_of_a_wrong_type_are_refused_by_name(tmp_path, monkeypatch, name, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{name}"):
        ProfileSettings(**{name: value}).checked(num_workers=2)


def test_an_end_within_the_warm_up_is_logged(caplog):
    hook = _ProfilerHook(ProfileSettings(num_rollouts=9, warmup_rollouts=5))
    hook.before_rollout()
    hook(None)
    hook.stop()
    hook.stop()
    assert caplog.text.count("it stopped after 1 of 5 warm-up rollouts") == 1


def test_every_option_reaches_torchs_profiler(monkeypatch):
    passed = {}
    monkeypatch.setattr("lucidrl.profiling.hook.started_profiler", lambda activities, **options: passed.update(options))
    names = ("record_shapes", "profile_memory", "with_stack", "with_flops")
    settings = ProfileSettings(num_rollouts=1, warmup_rollouts=0, **dict.fromkeys(names, True))
    _ProfilerHook(settings).before_rollout()
    assert passed == dict.fromkeys(names, True)


def test_the_kineto_library_is_silenced(monkeypatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    started_profiler().stop()
    assert os.environ["KINETO_LOG_LEVEL"] == "6"


def test_a_fork_of_the_process_neither_stops_nor_writes_what_its_parent_records(tmp_path):
    hook = _ProfilerHook(ProfileSettings(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "trace.json"))
    hook.before_rollout()
    child = os.fork()
    if child == 0:
        hook.stop()
        os._exit(int((tmp_path / "trace.json").exists()))
    _, status = os.waitpid(child, 0)
    assert status == 0
    hook(None)
    assert (tmp_path / "trace.json").exists()
