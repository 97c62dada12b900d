"""What an actor of a Ray collector runs: an ordinary `Collector`, as its driver asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle

from lucidrl.collectors.parts import Weights
from lucidrl.collectors.sent_traces import SentTrace, TraceOutbox
from lucidrl.collectors.single import Collector
from lucidrl.collectors.worker_main import Call, CollectorWorker, Command, prepare_process
from lucidrl.distributed.child_main import Raised, describe_error
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.node_agent import end_with_node
from lucidrl.distributed.launchers.rank_main import Returned
from lucidrl.distributed.launchers.ray_words import own_node_name
from lucidrl.profiling.hook import ProfileSettings

_LOSS_S = 60.0
"""After so long without its node, an actor has been given up, and replaced if it may be."""


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str
    pid: int


@dataclass(frozen=True)
class Past:
    """What an actor goes on from that replaces another one."""

    state: Mapping[str, Any] | None = None
    """Of the other one's collector, after its last answer."""
    calls: Sequence[Call] = ()
    """That changed how it collects."""


@dataclass(frozen=True)
class Answer:
    """What an actor gives back, whatever happened."""

    outcome: Returned | Raised
    place: Place
    state: Mapping[str, Any] | None
    """Of the collector; None if it could not be made."""
    is_recording: bool
    """Whether there is a trace that is yet to be written."""
    traces: Sequence[SentTrace]
    """Written since the last answer."""


class CollectorActor:
    """A worker of a collector. Its methods do not raise: what went wrong is in the answer, by the same pickle as
    between processes of one machine.

    Args:
        num_threads, base_seed, stream: see `prepare_process`.
    """

    def __init__(self, num_threads: int, base_seed: int, stream: int):
        end_with_node(_LOSS_S)
        self._place = Place(own_node_name(), os.getpid())
        self._process = (num_threads, base_seed, stream)
        self._traces = TraceOutbox()
        self._news: tuple[Weights, int] | None = None
        self._worker: CollectorWorker | None = None
        self._failure: Raised | None = None  # to start

    def start(self, shared: bytes, own: bytes, past: Past) -> Message:
        """Make the collector, and return the specs of its env.

        Args:
            shared, own: arguments of the collector, by cloudpickle.
        """
        return self._answer(partial(self._start, shared, own, past))

    def carry_out(self, command: Command, news: Message | None) -> Message:
        """Carry out a command.

        Args:
            news: weights and their version, if there are newer ones than at the last call.
        """
        self._news = None if news is None else news.writable().content()
        return self._answer(partial(self._carry_out, command))

    def shutdown(self) -> Message:
        """Close the env; the answer has what was recorded so far."""
        return self._answer(self._shutdown)

    def _start(self, shared: bytes, own: bytes, past: Past) -> bytes:
        prepare_process(*self._process)
        collector = _ActorsCollector(self._traces, {**cloudpickle.loads(shared), **cloudpickle.loads(own)})
        worker = CollectorWorker(collector, lambda: self._news)
        if past.state is not None:
            collector.load_state_dict(past.state)
        for call in past.calls:
            worker.carry_out(call)
        self._worker = worker
        return worker.env_specs()

    def _carry_out(self, command: Command) -> Any:
        assert self._worker is not None
        return self._worker.carry_out(command)

    def _shutdown(self) -> None:
        if self._worker is not None:
            self._worker.collector.shutdown()

    def _answer(self, work: Callable[[], Any]) -> Message:
        """What came of some work, even if that was an error; one that could not start has that to say to everything."""
        outcome: Returned | Raised
        try:
            outcome = self._failure or Returned(work())
        except BaseException as error:  # SystemExit too: the driver learns of everything, and ends this actor
            outcome = describe_error(error)
            if self._worker is None:
                self._failure = outcome
        collector = None if self._worker is None else self._worker.collector
        state = None if collector is None else collector.state_dict()
        is_recording = collector is not None and collector.is_profiled
        answer = Answer(outcome, self._place, state, is_recording, self._traces.take())
        try:
            return Message.of(answer)
        except Exception as error:  # what a method returned cannot be pickled
            return Message.of(replace(answer, outcome=describe_error(error)))


class _ActorsCollector(Collector):
    """Its traces are for the driver, which may be on another machine."""

    def __init__(self, traces: TraceOutbox, arguments: Mapping[str, Any]):
        self._traces = traces
        super().__init__(**arguments)

    def start_profile(self, settings: ProfileSettings, worker_idx: int) -> int | None:
        if worker_idx in settings.workers:
            settings = self._traces.redirected(settings, worker_idx)
        return super().start_profile(settings, worker_idx)
