"""What a worker process of a collector runs: an ordinary `Collector`, as its driver asks.

Commands come over one connection and are carried out in order, so that a call in the middle of a rollout is answered
after it, and nothing gets lost. Batches have a connection of their own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import torch

from lucidrl.collectors import parts
from lucidrl.collectors.parts import Weights
from lucidrl.collectors.single import Collector
from lucidrl.collectors.weights import SharedWeights, WeightReader
from lucidrl.distributed.child_main import describe_error, end_with_driver
from lucidrl.distributed.launchers.messages import Message, receive, send
from lucidrl.distributed.launchers.rank_main import Returned
from lucidrl.envs.arrays import Key
from lucidrl.envs.stacked import EnvSpecs
from lucidrl.utils.random_state import seed_everything

_DRIVER_GONE_S = 0.1
"""A driver that is killed closes its connections one by one."""


@dataclass(frozen=True)
class WorkerSettings:
    """What the driver decides about a worker's process."""

    index: int
    environment: Mapping[str, str]
    """Variables of the driver: a fork server has those of the moment when it started."""
    num_threads: int
    base_seed: int
    """Of whatever is not seeded by `Seed`; workers have streams of their own."""


@dataclass(frozen=True)
class Collect:
    """Asks for one batch, on the connection for batches."""

    num_frames: int
    num_frames_before: int
    """How many frames all workers together were asked for before."""


@dataclass(frozen=True)
class Call:
    """Asks for what a method of the collector returns."""

    method: str
    args: bytes
    """By cloudpickle, so that functions may be among them."""


@dataclass(frozen=True)
class Seed:
    """Seeds the env and everything else in the process; asks for the first seed that is not used by it."""

    seed: int


Command = Collect | Call | Seed


@dataclass(frozen=True)
class Batch:
    """A batch on its way, all in host memory."""

    entries: dict[Key, torch.Tensor]
    batch_size: tuple[int, ...]
    num_traces: int
    """How many the worker has written so far."""


class CollectorWorker:
    """A collector that does what its driver asks, with the weights that the driver publishes.

    Args:
        newer_weights: weights and their version, if there are newer ones than at the last call.
    """

    def __init__(self, collector: Collector, newer_weights: Callable[[], tuple[Weights, int] | None]):
        self.collector = collector
        self._newer_weights = newer_weights

    def env_specs(self) -> bytes:
        """By cloudpickle: a spec may be of a class that only the program knows."""
        return cloudpickle.dumps(EnvSpecs.of(self.collector.env))

    def carry_out(self, command: Command) -> Any:
        match command:
            case Collect():
                return self._collect(command)
            case Call():
                return parts.call_method(self.collector, command.method, cloudpickle.loads(command.args))
            case Seed():
                random.seed(command.seed)
                np.random.seed(command.seed)
                return self.collector.set_seed(command.seed)

    def _collect(self, command: Collect) -> Batch:
        if newer := self._newer_weights():  # here only: a batch is of one version
            weights, version = newer
            self.collector.update_policy_weights_(weights or None, version=version)
        self.collector.num_frames = command.num_frames_before  # decides whether to act at random
        batch = self.collector.rollout(command.num_frames)
        entries: dict[Key, Any] = dict(batch.items(include_nested=True, leaves_only=True))
        return Batch(entries, tuple(batch.batch_size), self.collector.num_traces)


def prepare_process(num_threads: int, base_seed: int, stream: int) -> None:
    """What is decided about a worker's process before anything is made in it."""
    logging.getLogger(parts.__name__).setLevel(logging.ERROR)  # the driver warns of numbers of frames, once for all
    torch.set_num_threads(num_threads)
    seed_everything(base_seed, stream)


def serve(control: socket.socket, batches: socket.socket, settings: WorkerSettings, weights: SharedWeights) -> None:
    """Carry out commands until the driver closes the connection; the first message has the collector's arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the driver decides
    end_with_driver(die_with_starting_thread=True)  # that of the fork server, which ends with the driver
    os.environ.clear()
    os.environ.update(settings.environment)
    prepare_process(settings.num_threads, settings.base_seed, stream=settings.index)
    worker: CollectorWorker | None = None

    def start() -> bytes:
        nonlocal worker
        shared, own = arguments
        collector = Collector(**cloudpickle.loads(shared), **cloudpickle.loads(own))
        worker = CollectorWorker(collector, WeightReader(weights).read)
        return worker.env_specs()

    with suppress(EOFError, OSError):  # the driver closed the connection, or is gone
        arguments: tuple[bytes, bytes] = receive(control).content()
        _answer(control, start)
        while True:
            command: Command = receive(control).content()
            assert worker is not None
            _answer(batches if isinstance(command, Collect) else control, partial(worker.carry_out, command))
    if worker is not None:
        if worker.collector.is_profiled and _driver_is_gone():
            worker.collector.forget_profile()  # this process ends with it at any moment, and would leave half a file
        worker.collector.shutdown()


def _driver_is_gone() -> bool:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join(_DRIVER_GONE_S)
    return not driver.is_alive()


def _answer(connection: socket.socket, work: Callable[[], Any]) -> None:
    """Send what came of some work, even if that was an error."""
    try:
        message = Message.of(Returned(work()))
    except BaseException as error:  # SystemExit too: the driver learns of everything, and ends this process
        message = Message.of(describe_error(error))
    send(connection, message)
