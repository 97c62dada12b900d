"""A monitor sees this machine, loses no snapshot, and is never in the way."""

import itertools
import logging
import math
import subprocess
import sys
import threading
import time
import types
import weakref

import psutil
import pytest

from lucidrl.errors import ConfigError
from lucidrl.utils.logger import monitor as monitor_module
from lucidrl.utils.logger.interface import LoggerInterface
from lucidrl.utils.logger.monitor import LocalMonitorLogger, Monitor

NAMES = {"metric_prefix": "ray", "step_metric": "ray/ray_step"}


class Memory(LoggerInterface):
    """Keeps every call; `before` is run first, and may raise or wait."""

    def __init__(self, before=lambda: None):
        self.calls = []
        self.before = before

    def log_metrics(self, metrics, step, prefix="", step_metric=None):
        self.before()
        self.calls.append((metrics, step, prefix, step_metric))

    def log_hyperparams(self, params):
        raise AssertionError("would replace those of the run")

    @property
    def numbers(self):
        return [metrics["number"] for metrics, *_ in self.calls]


class Counting(Monitor):
    """Numbers its snapshots; calls `before` first, which may raise or wait."""

    def __init__(self, collection_interval, flush_interval, parent_logger=None, before=lambda: None):
        super().__init__(collection_interval, flush_interval, parent_logger=parent_logger, **NAMES)
        self.count = itertools.count()
        self.before = before

    def _collect(self, metrics=False, sku=False):
        self.before()
        return {"number": next(self.count)}


def wait_until(condition, timeout_s=60.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.005)


def monitor_threads():
    return [thread for thread in threading.enumerate() if thread.name == "lucidrl-monitor"]


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    assert not monitor_threads()


def test_snapshots_reach_the_parent_with_prefix_and_step_metric():
    parent = Memory()
    monitor = Counting(0.01, 0.02, parent)
    monitor.start()
    wait_until(lambda: len(parent.calls) >= 3)
    monitor.stop()
    assert parent.numbers == list(range(len(parent.calls)))
    for metrics, step, prefix, step_metric in parent.calls:
        assert metrics.keys() == {"number", "ray/ray_step"}
        assert metrics["ray/ray_step"] == step / 1000
        assert (prefix, step_metric) == ("ray", "ray/ray_step")


def test_steps_are_milliseconds_and_never_collide():
    monitor = Counting(1e-6, 60)
    monitor.start()
    time.sleep(0.2)
    monitor.stop()
    time.sleep(0.1)
    monitor.start()
    wait_until(lambda: len(monitor.metrics_buffer) > 300)
    monitor.stop()
    steps = [snapshot["step"] for snapshot in monitor.metrics_buffer]
    assert all(earlier < later for earlier, later in itertools.pairwise(steps))


def test_steps_tell_the_time_since_the_first_start():
    monitor = Counting(0.25, 60)
    monitor.start()
    wait_until(lambda: len(monitor.metrics_buffer) == 3)
    monitor.stop()
    first, second, third = (snapshot["step"] for snapshot in monitor.metrics_buffer)
    assert 0 <= first < 250 <= second < third
    assert 500 <= third < 1500


def test_snapshots_are_handed_over_at_the_flush_interval_and_at_the_end():
    parent = Memory()
    monitor = Counting(0.01, 0.3, parent)
    monitor.start()
    wait_until(lambda: len(monitor.metrics_buffer) >= 3)
    assert not parent.calls
    wait_until(lambda: len(parent.calls) >= 10)
    monitor.stop()
    assert parent.numbers == list(range(next(monitor.count)))


def test_what_a_failing_parent_did_not_take_stays_for_the_next_time(caplog):
    calls = itertools.count()

    def fail_at_times():
        if next(calls) % 3 == 2:
            raise RuntimeError("tracker is down")

    parent = Memory(fail_at_times)
    monitor = Counting(0.01, 0.01, parent)
    monitor.start()
    wait_until(lambda: len(parent.calls) >= 10)
    monitor.stop()
    monitor.flush()
    assert parent.numbers == list(range(len(parent.calls)))
    assert len(parent.calls) >= next(monitor.count) - 1
    assert [record.getMessage() for record in caplog.records] == [
        "machine metrics are kept for later, the logger failed: RuntimeError('tracker is down')"
    ]


def test_snapshots_continue_and_are_kept_while_another_thread_flushes():
    goes_on, is_waiting = threading.Event(), threading.Event()

    def wait():
        is_waiting.set()
        assert goes_on.wait(60)

    parent = Memory(wait)
    monitor = Counting(0.01, 60, parent)
    monitor.start()
    wait_until(lambda: monitor.metrics_buffer)
    flusher = threading.Thread(target=monitor.flush)
    flusher.start()
    assert is_waiting.wait(60)
    monitor.flush()  # returns at once: the other one takes everything
    seen = len(monitor.metrics_buffer)
    wait_until(lambda: len(monitor.metrics_buffer) > seen + 3)
    goes_on.set()
    flusher.join()
    monitor.stop()
    assert parent.numbers == list(range(next(monitor.count)))


def test_a_full_buffer_drops_the_oldest_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(monitor_module, "_MOST_SNAPSHOTS", 5)
    parent = Memory(lambda: 1 / 0)
    monitor = Counting(0.001, 60, parent)
    monitor.start()
    wait_until(lambda: monitor.metrics_buffer and monitor.metrics_buffer[-1]["metrics"]["number"] > 20)
    assert len(monitor.metrics_buffer) == 5
    monitor.stop()
    assert len([record for record in caplog.records if "are dropped" in record.getMessage()]) == 1


def test_a_snapshot_that_falls_out_while_it_is_handed_over_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr(monitor_module, "_MOST_SNAPSHOTS", 3)
    parent = Memory()
    monitor = Counting(60, 60, parent)
    monitor._first_start_s = time.monotonic()
    for _ in range(3):
        monitor._take_snapshot()

    def take_one():
        parent.before = lambda: None
        monitor._take_snapshot()

    parent.before = take_one
    monitor.flush()
    assert parent.numbers == [0, 1, 2, 3]


def test_without_a_parent_the_snapshots_stay():
    monitor = Counting(0.01, 0.01)
    monitor.start()
    wait_until(lambda: len(monitor.metrics_buffer) >= 5)
    monitor.stop()
    assert [snapshot["metrics"]["number"] for snapshot in monitor.metrics_buffer][:5] == [0, 1, 2, 3, 4]


def test_a_look_that_fails_costs_one_warning_and_the_next_are_taken(caplog):
    collections = itertools.count()

    def fail_first():
        if next(collections) < 3:
            raise OSError("driver is resting")

    monitor = Counting(0.01, 60, before=fail_first)
    monitor.start()
    wait_until(lambda: monitor.metrics_buffer)
    monitor.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "machine metrics cannot be read for now: OSError('driver is resting')"
    ]


def test_start_and_stop_may_be_called_in_any_order():
    before = monitor_threads()
    monitor = Counting(0.01, 60)
    monitor.stop()
    for _ in range(2):
        monitor.start()
        monitor.start()
        assert len(monitor_threads()) == len(before) + 1
        monitor.stop()
        monitor.stop()
        assert monitor_threads() == before
    assert monitor.metrics_buffer


def test_stop_does_not_wait_for_the_interval():
    monitor = Counting(60, 60)
    monitor.start()
    wait_until(lambda: monitor.metrics_buffer)
    start = time.monotonic()
    monitor.stop()
    assert time.monotonic() - start < 20


def test_stop_gives_up_on_a_look_that_hangs_and_hands_over_what_there_is():
    collections, is_hanging, release = itertools.count(), threading.Event(), threading.Event()

    def hang_second():
        if next(collections) == 1:
            is_hanging.set()
            assert release.wait(60)

    parent = Memory()
    monitor = Counting(0.01, 60, parent, before=hang_second)
    monitor.start()
    assert is_hanging.wait(60)
    start = time.monotonic()
    monitor.stop()
    assert time.monotonic() - start < 45
    assert parent.numbers == [0]
    (abandoned,) = monitor_threads()
    monitor.start()  # the abandoned thread does not resume
    release.set()
    abandoned.join(5)
    assert not abandoned.is_alive()
    assert len(monitor_threads()) == 1
    monitor.stop()


def test_a_deleted_parent_ends_the_monitor_silently(caplog):
    parent = Memory()
    monitor = Counting(0.01, 0.01, weakref.proxy(parent))
    monitor.start()
    calls = parent.calls
    wait_until(lambda: calls)
    del parent
    wait_until(lambda: not monitor_threads())
    monitor.stop()
    assert not caplog.records


def test_a_parent_that_dies_in_the_monitors_own_thread_can_stop_it_there():
    inside, dropped, stopped = threading.Event(), threading.Event(), threading.Event()

    def hold():
        inside.set()
        assert dropped.wait(5)

    parent = Memory(hold)
    monitor = Counting(0.01, 0.01, weakref.proxy(parent))

    def end():
        monitor.stop()
        stopped.set()

    weakref.finalize(parent, end)
    monitor.start()
    assert inside.wait(5)
    del parent
    dropped.set()
    assert stopped.wait(5)
    wait_until(lambda: not monitor_threads())


def test_a_process_with_a_running_monitor_exits():
    code = """
import time
from lucidrl.utils.logger.monitor import LocalMonitorLogger
monitor = LocalMonitorLogger(0.01, 60, "ray", "ray/ray_step")
monitor.start()
time.sleep(0.3)
assert monitor.metrics_buffer
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf, "often"])
@pytest.mark.parametrize("name", ["collection_interval", "flush_interval"])
def test_an_interval_that_is_none_is_refused_by_name(name, interval):
    intervals = {"collection_interval": 1, "flush_interval": 1, name: interval}
    with pytest.raises(ConfigError, match=name):
        LocalMonitorLogger(**intervals, **NAMES)


@pytest.fixture
def local():
    return LocalMonitorLogger(10, 10, **NAMES)


def test_this_machine_is_node_0(local, caplog):
    with caplog.at_level(logging.INFO):
        metrics = local._collect_metrics()
    memory = psutil.virtual_memory()
    assert metrics["node.0.mem_total_gb"] == memory.total / 1024**3
    assert metrics["node.0.mem_gb"] == pytest.approx(memory.used / 1024**3, abs=1.0)
    assert 0 <= metrics["node.0.cpu.util"] <= 100
    assert not caplog.records  # a machine without GPUs is no reason to say anything


def test_cpu_use_is_that_since_the_last_look_and_at_the_first_of_a_thread_that_of_a_moment(local, monkeypatch):
    windows = []
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: windows.append(interval) or 5.0)

    def collect_twice():
        local._collect_metrics()
        local._collect_metrics()

    collect_twice()
    thread = threading.Thread(target=collect_twice)
    thread.start()
    thread.join()
    assert windows == [0.1, None, 0.1, None]


class NVMLError(Exception):
    """Of the stand-in for pynvml."""


def fake_pynvml(**changes):
    """The part of pynvml that is used, for a machine with two GPUs; the second hides its use, as one under MIG does."""

    def use(gpu):
        if gpu == "gpu 1":
            raise NVMLError("Not Supported")
        return types.SimpleNamespace(gpu=75, memory=10)

    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu {index}",
        "nvmlDeviceGetUtilizationRates": use,
        "nvmlDeviceGetMemoryInfo": lambda gpu: types.SimpleNamespace(used=3 * 2**30, free=0, total=8 * 2**30),
        "nvmlDeviceGetName": lambda gpu: "NVIDIA H100 80GB HBM3",
    }
    module = types.ModuleType("pynvml")
    vars(module).update(functions | changes)
    return module


def gpu_part(found):
    return {name: value for name, value in found.items() if ".gpu." in name}


def test_gpus_are_seen_through_nvml(local, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml())
    assert gpu_part(local._collect_metrics()) == {
        "node.0.gpu.0.util": 75,
        "node.0.gpu.0.mem_gb": 3.0,
        "node.0.gpu.1.mem_gb": 3.0,
    }
    assert local._collect_gpu_sku() == {
        "node.0.gpu.0.type": "NVIDIA H100 80GB HBM3",
        "node.0.gpu.1.type": "NVIDIA H100 80GB HBM3",
    }


def test_a_gpu_that_is_lost_takes_no_other_with_it(local, monkeypatch):
    def handle(index):
        if index == 1:
            raise NVMLError("GPU is lost")
        return "gpu 0"

    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml(nvmlDeviceGetHandleByIndex=handle))
    assert gpu_part(local._collect_metrics()).keys() == {"node.0.gpu.0.util", "node.0.gpu.0.mem_gb"}


def no_driver():
    raise NVMLError("Driver Not Loaded")


@pytest.mark.parametrize("module", [None, fake_pynvml(nvmlInit=no_driver)], ids=["no pynvml", "no driver"])
def test_without_nvml_the_rest_is_still_seen(local, monkeypatch, caplog, module):
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        metrics = local._collect_metrics()
    assert metrics.keys() == {"node.0.cpu.util", "node.0.mem_gb", "node.0.mem_total_gb"}
    assert not caplog.records


def test_models_of_gpus_are_named_once_in_the_log_and_are_no_metrics(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", fake_pynvml())
    parent = Memory()
    local = LocalMonitorLogger(0.01, 0.01, parent_logger=parent, **NAMES)
    with caplog.at_level(logging.INFO):
        local.start()
        wait_until(lambda: len(parent.calls) >= 3)
        local.stop()
    assert [record.getMessage() for record in caplog.records] == ["GPUs seen: 2 x NVIDIA H100 80GB HBM3"]
    for metrics, *_ in parent.calls:
        assert all(isinstance(value, int | float) for value in metrics.values())
