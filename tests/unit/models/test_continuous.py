"""Requests that separate replicas complete at any time."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import WorkerError
from lucidrl.models.generation import continuous
from lucidrl.models.generation.continuous import ContinuousGenerator
from lucidrl.models.generation.interfaces import Completion, GenerationRequest
from lucidrl.models.generation.replica import Replica


def _sleep_and_complete_nothing() -> list[Completion]:
    time.sleep(0.001)
    return []


class EndlessReplicas:
    """One replica, whose slices end without a completion."""

    policy_version, ready = 0, (0,)

    def __init__(self) -> None:
        self.pool = self
        self.workers = [SimpleNamespace(number=0, loss=None, succeeded=lambda: None)]
        self.on_loss: Any = None
        self._thread = ThreadPoolExecutor(1)

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        return self._thread.submit(_sleep_and_complete_nothing)

    def recover(self) -> bool:
        return False


def test_a_replica_that_completes_nothing_is_an_error():
    times: dict[str, float] = {"step_timeout_s": 9, "first_timeout_s": 9, "stall_timeout_s": 0.1}
    generator = ContinuousGenerator(EndlessReplicas(), pad_id=0, **times)  # type: ignore[arg-type]
    rows = BatchedDataDict({"input_ids": torch.ones(2, 3).long(), "input_lengths": torch.tensor([3, 3])})
    waited = r"have completed no prompt for \d+ s, and 2 of 2 are open; look into logs"
    with pytest.raises(WorkerError, match=waited) as raised:
        generator.generate(rows)
    generator.close()
    for setting in ("cluster.call_timeout_s", "policy.generation.step_timeout_s", "cluster.start_timeout_s"):
        assert setting in str(raised.value)


class SlowlyRestartedReplicas(EndlessReplicas):
    """One replica, which was restarted for longer than any timeout; it completes its requests two checks later."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self._clock, self._num_checks = clock, 0
        self._open: list[GenerationRequest] = []

    def recover(self) -> bool:
        self._num_checks += 1
        if self._num_checks == 1:
            self._clock.now += 1000
        return self._num_checks == 1

    def submit(self, number: int, method: str, new: Any, *args: Any, **options: Any) -> Future[Any]:
        self._open += new
        return self._thread.submit(self._complete)

    def _complete(self) -> list[Completion]:
        if self._num_checks < 3:
            return _sleep_and_complete_nothing()
        done, self._open = self._open, []
        ones = torch.ones(1)
        return [Completion(one.request_id, ones.long(), -ones, 0 * ones.long(), False) for one in done]


def test_a_replica_has_the_whole_timeout_after_a_slow_restart(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(continuous, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(continuous, "_CHECK_S", 0.01)
    replicas = SlowlyRestartedReplicas(clock)
    times: dict[str, float] = {"step_timeout_s": 9, "first_timeout_s": 9, "stall_timeout_s": 60}
    generator = ContinuousGenerator(replicas, pad_id=0, **times)  # type: ignore[arg-type]
    rows = BatchedDataDict({"input_ids": torch.ones(2, 3).long(), "input_lengths": torch.tensor([3, 3])})
    assert generator.generate(rows)["output_ids"].shape == (2, 4)
    generator.close()


class IdleReplicas(EndlessReplicas):
    """One replica without a request; records its calls, which must be methods of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.workers = [SimpleNamespace(number=0, loss=None, run=self._run)]

    def each(self, work: Any, workers: Any) -> list[Any]:
        return [work(worker) for worker in workers]

    def update_weights(self, version: int) -> None:
        self.calls.append("refit")

    def _run(self, method: str, *, timeout_s: float, phase: str) -> None:
        assert callable(getattr(Replica, method)), method
        self.calls.append(phase)


def test_an_idle_replica_must_answer_before_a_refit():
    replicas = IdleReplicas()
    times: dict[str, float] = {"step_timeout_s": 9, "first_timeout_s": 9, "stall_timeout_s": 9}
    generator = ContinuousGenerator(replicas, pad_id=0, **times)  # type: ignore[arg-type]
    generator.update_weights(1)
    assert replicas.calls == ["a liveness check", "refit"]


def test_ctrl_c_while_a_loss_is_reported_ends_the_call_and_is_no_failure_of_the_generator():
    replicas, failures = EndlessReplicas(), []
    times: dict[str, float] = {"step_timeout_s": 9, "first_timeout_s": 9, "stall_timeout_s": 9}
    generator = ContinuousGenerator(replicas, pad_id=0, **times)  # type: ignore[arg-type]
    generator.on_failure = failures.append

    def raising(error: BaseException) -> Any:
        def on_lost(number: int) -> None:
            raise error

        return on_lost

    generator.on_lost = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        replicas.on_loss(replicas.workers[0])
    assert failures == []
    generator.on_lost = raising(problem := RuntimeError("a bug"))
    replicas.on_loss(replicas.workers[0])
    assert failures == [problem]
