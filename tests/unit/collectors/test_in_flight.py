"""Samples in flight, with a generator that completes them when the test allows it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lucidrl.collectors import in_flight
from lucidrl.collectors.config import AsyncConfig
from lucidrl.collectors.groups import Rules
from lucidrl.collectors.in_flight import GroupsInFlight
from lucidrl.collectors.turns import Turns
from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import WorkerError
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.interfaces import Completion

STALL_TIMEOUT_S, LONGER_S = 60.0, 1000.0
TIMEOUTS = ("cluster.call_timeout_s", "policy.generation.step_timeout_s", "cluster.start_timeout_s", "env.timeout_s")


@dataclass
class Clock:
    now: float = 0.0
    tick_s: float = 0.0
    """It advances by so much whenever it is read."""

    def monotonic(self) -> float:
        self.now += self.tick_s
        return self.now


class Prompts:
    """The problems of an environment, one after the other."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts, self._cursor = prompts, 0

    def take(self, number: int) -> list[Prompt]:
        self._cursor += number
        return self._prompts[self._cursor - number : self._cursor]

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor}


class GatedGenerator:
    """Completes requests in another thread, once the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def live(self) -> list[int]:
        return [0]

    def submit(self, number: int, request: Any, done: Any) -> None:
        self._thread.submit(self._complete, request, done)

    def _complete(self, request: Any, done: Any) -> None:
        self.gate.wait()
        ones = torch.ones(2)
        done(Completion(request.request_id, ones.long(), -ones, 0 * ones.long(), False))

    def recover(self) -> bool:
        return False

    def take_idle_s(self) -> list[float]:
        return [0.0]

    def close(self) -> None:
        self.gate.set()
        self._thread.shutdown(cancel_futures=True)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the samples in flight, which stands still unless the test advances it."""
    clock = Clock()
    monkeypatch.setattr(in_flight, "time", clock)
    monkeypatch.setattr(in_flight, "_CHECK_S", 0.01)
    return clock


@pytest.fixture
def generator():
    return GatedGenerator()


@pytest.fixture
def groups(clock, generator):
    env = ArithmeticEnv(ArithmeticConfig())
    with EnvRunner(env, 10.0, max_concurrency=1, on_error="fail") as runner:
        rules = Rules(
            AsyncConfig(max_staleness=1), prompts_per_step=2, samples_per_prompt=2, max_steps=9, rows_per_generator=8
        )
        groups = GroupsInFlight(
            generator,
            runner,
            Prompts(env.prompts()),  # type: ignore[arg-type]
            Turns(embedded_tokenizer(), 512, 1),
            rules,
            num_env_calls=1,
            stall_timeout_s=STALL_TIMEOUT_S,
        )
        yield groups
        groups.close()


def test_a_step_after_a_long_pause_takes_the_groups_that_are_ready(groups, generator, clock):
    generator.gate.set()
    groups.take()
    with groups._changed:  # the next groups are the last ones until a refit
        assert groups._changed.wait_for(lambda: groups.scheduler.num_complete == 2, 30)
    clock.now += LONGER_S
    taken, _ = groups.take()
    assert [len(group) for group in taken] == [2, 2]


def test_a_step_that_waits_without_progress_is_an_error(groups, clock):
    clock.tick_s = 1.0
    waited = r"step 1 has waited for 6\d s without any progress: sample 0 of group 0"
    with pytest.raises(WorkerError, match=waited) as raised:
        groups.take()
    for setting in TIMEOUTS:
        assert setting in str(raised.value)


def test_a_restart_of_a_generator_is_progress_even_if_it_was_slow(groups, generator, clock, monkeypatch):
    num_calls = 0

    def recover() -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            clock.now += LONGER_S
        else:
            generator.gate.set()
        return num_calls == 1

    monkeypatch.setattr(generator, "recover", recover)
    clock.tick_s = 0.02
    groups.take()
    assert num_calls >= 2
