"""What a Ray actor of an environment runs: a copy of the environment, which judges what its driver sends."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lucidrl.distributed.child_main import RemoteTraceback
from lucidrl.distributed.launchers.driver_program import DriverProgram
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.node_agent import end_with_node
from lucidrl.distributed.launchers.rank_main import redirect_output
from lucidrl.distributed.launchers.ray_words import own_node_name
from lucidrl.envs.text.interfaces import TextEnv
from lucidrl.envs.text.registry import make_env
from lucidrl.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    node: str
    pid: int
    sees_log: bool
    """Whether its output goes to the driver's folder; else it is among Ray's logs, on its node."""


@dataclass(frozen=True)
class Failed:
    """An error in an actor, on its way to the driver."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # for instance a constructor that takes more than the message
            error = RuntimeError("".join(traceback.format_exception_only(error)).strip())
        return cls(error, trace)

    def as_raised(self) -> BaseException:
        """The error itself, with where it was raised as its cause."""
        self.error.__cause__ = RemoteTraceback(self.trace)
        return self.error


class EnvActor:
    """A copy of an environment. The methods do not raise: what went wrong is in the answer.

    Ctrl-C, which reaches every process of a terminal, is left to the driver: Ray runs all of an asynchronous actor
    outside of the main thread, the only one that signals interrupt.

    Args:
        program: that drives the run.
    """

    def __init__(self, program: DriverProgram):
        end_with_node()
        program.enter()
        self._env: TextEnv | None = None

    async def start(self, name: str, kwargs: Mapping[str, Any], log_path: Path, mark: str) -> Message:
        """Make the environment; the answer is this actor's `Place`.

        Args:
            log_path: where the driver wants what the environment prints.
            mark: name of a file beside it: a node that sees it has the same folder.
        """
        sees_log = (log_path.parent / mark).exists()
        if sees_log:
            redirect_output(log_path)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        try:
            self._env = make_env(name, kwargs)
        except SystemExit as error:  # raised again in the driver, it would end that or its event loop, without a word
            refusal = ConfigError(f"{name} cannot be made: it ended its process with SystemExit({error}); mend it")
            return Message.of(Failed.of(refusal.with_traceback(error.__traceback__)))
        except Exception as error:
            return Message.of(Failed.of(error))
        return Message.of(Place(own_node_name(), os.getpid(), sees_log))

    async def step(self, batch: Message) -> Message:
        """What the environment's own `step` says, or raises."""
        assert self._env is not None
        try:
            return Message.of(await self._env.step(batch.writable().content()))
        # As in the driver's program, the last two are errors of the environment; a cancelled call is nobody's.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            return Message.of(Failed.of(error))
