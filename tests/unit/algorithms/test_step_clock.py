"""The clock of the training loop: phases add up to the step, and every process has its share."""

from __future__ import annotations

import time

import pytest

from lucidrl.algorithms.step_clock import StepClock, phases_of, slowest_rank
from lucidrl.profiling.spans import span
from lucidrl.profiling.worker_times import CallTimes, WorkerTimes, worker_clock


def test_a_lap_holds_the_phases_since_the_restart():
    with span("before"):
        pass
    clock = StepClock()
    with span("inside"):
        pass
    lap = clock.lap()
    assert lap.keys() == {"step_s", "inside_s"}
    assert lap["step_s"] >= lap["inside_s"] >= 0


def test_exclusive_phases_sum_to_the_whole_step():
    clock = StepClock()
    with span("rollout"):
        with span("generate"):
            time.sleep(0.004)
        with span("environment"), span("reward"):
            time.sleep(0.002)
    with span("train"), span("forward"):
        time.sleep(0.003)
    lap = clock.lap()
    with span("validate"), span("generate"), span("curriculum"):
        time.sleep(0.002)
    time.sleep(0.001)
    times = clock.end()["time"]
    phases = times["exclusive"]
    assert sum(phases.values()) == pytest.approx(times["whole_step_s"], abs=1e-6)
    assert phases["generation_s"] == pytest.approx(lap["generate_s"], abs=1e-6)
    assert phases["validation_s"] >= 0.002  # with all phases inside it
    assert phases["other_s"] >= 0.001
    assert not phases.keys() & {"generate_s", "curriculum_s", "validate_s"}
    assert times["busy"] == {"driver_s": times["whole_step_s"]}


def rank(forward: float, communication: float) -> CallTimes:
    exclusive = {("train", "train"): 0.1, ("train", "forward"): forward, ("train", "communication"): communication}
    return CallTimes(sum(exclusive.values()), exclusive, {"forward": (forward, 3), "train": (1.0, 1)})


def test_the_slowest_rank_splits_the_time_in_which_the_driver_waited():
    ranks = {"policy-0": WorkerTimes(), "policy-1": WorkerTimes(), "generation-0": WorkerTimes(call_s=9.0)}
    ranks["policy-0"].add(rank(forward=1.0, communication=3.0))
    ranks["policy-1"].add(rank(forward=3.0, communication=1.0))
    slowest = slowest_rank(ranks)
    assert slowest is ranks["policy-1"]
    phases = phases_of({("train", "train"): 4.5, ("rollout", "generate"): 2.0}, slowest)
    assert phases == pytest.approx({"generation": 2.0, "forward": 3.0, "communication": 1.0, "training": 0.5})


def test_the_split_never_exceeds_what_the_driver_measured():
    slowest = WorkerTimes()
    slowest.add(rank(forward=3.0, communication=1.0))
    phases = phases_of({("train", "train"): 2.0}, slowest)
    assert phases == pytest.approx({"forward": 1.5, "communication": 0.5, "training": 0.0})


def test_times_of_workers_are_in_the_metrics_of_their_step():
    clock = StepClock()
    worker_clock.add("policy-0", rank(forward=1e-3, communication=3e-3))
    worker_clock.add("policy-1", rank(forward=2e-3, communication=2e-3))
    worker_clock.add("env-0", CallTimes(1e-4))
    with worker_clock.waiting():
        time.sleep(0.2)
    lap = clock.lap()
    assert lap["forward_s"] == 2e-3  # of the slowest rank: the driver has no such span
    worker_clock.add("policy-0", CallTimes(1e-3))  # such as a checkpoint, after the training step
    times = clock.end()["time"]
    assert times["busy"]["policy-0_s"] == pytest.approx(0.1 + 1e-3 + 1e-3)
    assert times["busy"]["env-0_s"] == 1e-4
    assert times["communication"] == pytest.approx({"policy-0_s": 3e-3, "policy-1_s": 2e-3})
    assert times["busy"]["driver_s"] < times["whole_step_s"] - 0.19
    clock.restart()
    assert clock.end()["time"]["busy"].keys() == {"driver_s"}


def test_the_cost_of_observing_counts_logger_and_spans_of_the_step():
    logged = iter([5.0, 5.02, 5.5])
    clock = StepClock(lambda: next(logged))
    for _ in range(1000):
        with span("train"):
            pass
    with worker_clock.waiting():
        time.sleep(0.1)
    metrics = clock.end()
    overhead_s = metrics["observe"]["overhead_pct"] / 100 * metrics["time"]["whole_step_s"]
    assert 0.02 + 1000 * clock._span_s <= overhead_s < 0.02 + 1000 * clock._span_s + 0.1
    clock.restart()
    metrics = clock.end()
    # What was logged between the two steps counts for the second.
    assert metrics["observe"]["overhead_pct"] / 100 * metrics["time"]["whole_step_s"] >= 0.48
