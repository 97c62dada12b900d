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
from lucidrl.models.generation.continuous import ContinuousGenerator
from lucidrl.models.generation.interfaces import Completion
from lucidrl.models.generation.replica import Replica


def _sleep_and_complete_nothing() -> list[Completion]:
    time.sleep(0.001)
    return []


class EndlessReplicas:
    """One replica, whose slices end without a completion."""

    policy_version, ready = 0, (0,)

    def __init__(self) -> None:
        self.pool = self
        self.workers = [SimpleNamespace(number=0, loss=None)]
        self.on_loss: Any = None
        self._thread = ThreadPoolExecutor(1)

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        return self._thread.submit(_sleep_and_complete_nothing)

    def recover(self) -> None: ...


def test_a_replica_that_completes_nothing_is_an_error():
    times: dict[str, float] = {"step_timeout_s": 9, "first_timeout_s": 9, "stall_timeout_s": 0.1}
    generator = ContinuousGenerator(EndlessReplicas(), pad_id=0, **times)  # type: ignore[arg-type]
    rows = BatchedDataDict({"input_ids": torch.ones(2, 3).long(), "input_lengths": torch.tensor([3, 3])})
    with pytest.raises(WorkerError, match=r"have completed no prompt for \d+ s, and 2 of 2 are open; look into logs"):
        generator.generate(rows)
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
