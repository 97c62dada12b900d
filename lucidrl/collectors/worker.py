"""`CollectorWorker`: a `Collector` in a process of its own, which does what its driver asks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from lucidrl.collectors import parts
from lucidrl.collectors.parts import Weights
from lucidrl.collectors.profile import SentTrace, TraceOutbox
from lucidrl.collectors.single import Collector
from lucidrl.envs.arrays import Key
from lucidrl.envs.stacked import EnvSpecs
from lucidrl.profiling.hook import ProfileSettings
from lucidrl.utils.random_state import seed_everything

_DRIVER_GONE_S = 0.1
"""A driver that is killed closes its connections one by one."""


@dataclass(frozen=True)
class Past:
    """What a restarted worker continues from."""

    state: Mapping[str, Any] | None = None
    """Of the collector, after its last answer."""
    calls: Mapping[str, bytes] | None = None
    """Methods that changed how it collects, with their last arguments."""


@dataclass(frozen=True)
class Started:
    """What a worker's start returns."""

    pid: int
    specs: bytes
    """`EnvSpecs` by cloudpickle: a spec may be of a class that only the program knows."""


@dataclass(frozen=True)
class Batch:
    """A batch in host memory."""

    entries: dict[Key, torch.Tensor]
    batch_size: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What every call of a worker returns."""

    value: Any
    state: Mapping[str, Any]
    """Of the collector."""
    is_recording: bool
    """Whether a trace is still to be written."""
    traces: Sequence[SentTrace]
    """Written since the last answer, if the driver is to save them."""


class CollectorWorker:
    """Runs in a process of its own.

    Args:
        base_seed: of everything that is not seeded by `seed`; workers have different streams of it.
        sends_traces: whether traces are for the driver to save, which may be on another machine.
    """

    def __init__(self, base_seed: int, sends_traces: bool):
        logging.getLogger(parts.__name__).setLevel(logging.ERROR)  # the driver warns, once for all workers
        self._base_seed = base_seed
        self._traces = TraceOutbox() if sends_traces else None
        self._collector: Collector | None = None
        self._failure: BaseException | None = None

    def start(self, shared: bytes, own: bytes, stream: int, past: Past) -> Answer:
        """Make the collector; the answer is `Started`.

        Args:
            shared, own: arguments of the collector, by cloudpickle.
            stream: of the base seed.
        """
        seed_everything(self._base_seed, stream)
        self._collector = Collector(**cloudpickle.loads(shared), **cloudpickle.loads(own))
        if past.state is not None:
            self._collector.load_state_dict(past.state)
        for method, args in (past.calls or {}).items():
            self.call(method, args)
        return self._answer(Started(os.getpid(), cloudpickle.dumps(EnvSpecs.of(self._collector.env))))

    def collect(self, num_frames: int, num_frames_before: int, newer: tuple[Weights, int] | None) -> Answer:
        """Collect a `Batch`.

        After an error with a trace to send, the answer is None: the next call raises the error.

        Args:
            num_frames_before: frames that all workers together were asked for before; decides whether to act at random.
            newer: weights and their version, if they are newer than those of the last call.
        """
        if self._failure is not None:
            raise self._failure
        collector = self._made()
        if newer is not None:  # here only: a batch is of one version
            weights, version = newer
            collector.update_policy_weights_(weights or None, version=version)
        collector.num_frames = num_frames_before
        try:
            batch = collector.rollout(num_frames)
        except BaseException as error:
            if self._traces is None or not self._traces.is_waiting:
                raise
            self._failure = error
            return self._answer(None)
        entries: dict[Key, Any] = dict(batch.items(include_nested=True, leaves_only=True))
        return self._answer(Batch(entries, tuple(batch.batch_size)))

    def call(self, method: str, args: bytes) -> Answer:
        """Call a method of the collector; its arguments are by cloudpickle, so that functions may be among them."""
        arguments = cloudpickle.loads(args)
        if method == "start_profile" and self._traces is not None:
            arguments = self._with_sent_trace(*arguments)
        return self._answer(parts.call_method(self._made(), method, arguments))

    def seed(self, seed: int) -> Answer:
        """Seed the env and everything else in the process; the answer is the first seed that is not used by it."""
        random.seed(seed)
        np.random.seed(seed)
        return self._answer(self._made().set_seed(seed))

    def shutdown(self) -> None:
        collector = self._collector
        if collector is None:
            return
        # A trace that the driver is to save has no receiver any more; and without a driver, this process is killed at
        # any moment and would leave half a file.
        if collector.is_profiled and (self._traces is not None or _driver_is_gone()):
            collector.forget_profile()
        collector.shutdown()

    def _made(self) -> Collector:
        assert self._collector is not None, "the driver calls `start` first"
        return self._collector

    def _answer(self, value: Any) -> Answer:
        collector = self._made()
        traces = self._traces.take() if self._traces is not None else ()
        return Answer(value, collector.state_dict(), collector.is_profiled, traces)

    def _with_sent_trace(self, settings: ProfileSettings, worker_idx: int) -> tuple[ProfileSettings, int]:
        assert self._traces is not None
        return self._traces.redirected(settings, worker_idx), worker_idx


def _driver_is_gone() -> bool:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join(_DRIVER_GONE_S)
    return not driver.is_alive()
