"""A text environment whose copies live in Ray actors: calls are spread over them, and those that die are replaced."""

from __future__ import annotations

import asyncio
import logging
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.launchers.driver_program import DriverProgram
from lucidrl.distributed.launchers.log_folder import marked
from lucidrl.distributed.launchers.messages import Message
from lucidrl.distributed.launchers.rank_log import RankLog
from lucidrl.distributed.launchers.ray_connection import connected
from lucidrl.distributed.launchers.ray_placement import reserved_for_actors
from lucidrl.distributed.launchers.ray_words import last_words
from lucidrl.envs.text.actor import EnvActor, Failed, Place
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.errors import EnvironmentFailure

_log = logging.getLogger(__name__)

_GRACE_S = 3.0
"""How long an actor may take to give up a call that is late; one that has not by then is stuck."""


@dataclass(eq=False)
class _Actor:
    """An actor, as the driver sees it."""

    number: int
    handle: Any
    started: Any
    """Ray's reference to the answer of `EnvActor.start`."""
    start_until: float
    log: RankLog
    place: Place | None = None
    """None until it has started."""
    num_before: int = 0
    """Actors that died in its place in a row, without an answer in between."""
    num_calls: int = 0
    late: list[Any] = field(default_factory=list)
    """References of calls that were given up at their deadline."""

    def __str__(self) -> str:
        return f"actor {self.number}" + (f" on node {self.place.node}, process {self.place.pid}" if self.place else "")

    def last_lines(self) -> str:
        """What it printed, for an error."""
        if self.place is not None and not self.place.sees_log:
            return f"\nIts output is among Ray's logs on its node, in worker-*-{self.place.pid}.out and .err"
        tail = textwrap.indent(self.log.tail(), "  ")
        return f"\nLast lines of actor {self.number} ({self.log.path}):\n{tail}" if tail else ""


class EnvActors:
    """The environment that the configuration names, in `env.num_actors` Ray actors; itself one, see `TextEnv`.

    A call goes to the actor that has the fewest under way, and to another one if that dies; another actor takes the
    place of the dead. A call that is cancelled, as at its deadline, is given up by its actor too; an actor that does
    not do so is stuck, and replaced in `ready`. What the environment raises is raised here, with the actor's traceback
    as its cause.

    Args:
        config: of the environment; it keeps nothing.
        cluster: which Ray, and the deadline of a start.
        log_dir: for `actor_N.log` with what the environment prints in actor N; of nodes that see this folder.

    Raises:
        ConfigError: if Ray has no room, or the environment cannot be made.
        EnvironmentFailure: if an actor dies before it has started.
    """

    def __init__(self, config: EnvConfig, cluster: ClusterConfig, log_dir: Path):
        self.name = config.name
        self.num_replaced = 0
        self._config, self._start_timeout_s, self._log_dir = config, cluster.start_timeout_s, log_dir
        self._program = DriverProgram.of_this_process()
        self._actors: list[_Actor] = []
        log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            is_own_ray = held.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
            self._group = held.enter_context(reserved_for_actors(config.num_actors, is_own_ray))
            self._mark = held.enter_context(marked(log_dir))
            held.callback(self._end_actors)
            for number in range(config.num_actors):
                self._actors.append(self._new_actor(number))
            self._wait_for_start()
            self._held = held.pop_all()

    async def ready(self) -> None:
        """Wait until an actor can be asked, and none is taken up by a call that was given up.

        Raises:
            EnvironmentFailure: if too many died in a row.
        """
        from ray.exceptions import RayError

        await asyncio.gather(*(self._settle(actor) for actor in list(self._actors)))
        for actor in list(self._actors):
            try:
                self._note_start(actor)
            except RayError as error:
                self._replace_dead(actor, error)
        if any(actor.place is not None for actor in self._actors):
            return
        starts = [asyncio.ensure_future(self._have_started(number)) for number in range(len(self._actors))]
        try:
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for start in starts:
                start.cancel()
        for start in done:
            start.result()

    async def step(self, batch: Sequence[EnvRequest]) -> Sequence[EnvReply]:
        from ray.exceptions import RayError

        message = Message.of(batch)
        while True:
            actor = min(self._actors, key=lambda actor: (actor.place is None, actor.num_calls))
            actor.num_calls += 1
            try:
                await self._has_started(actor)
                answer = await self._asked(actor, message)
            except RayError as error:
                self._replace_dead(actor, error)
                continue
            finally:
                actor.num_calls -= 1
            actor.num_before = 0
            return _content(answer)

    def close(self) -> None:
        """End the actors; may be called twice."""
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _new_actor(self, number: int, num_before: int = 0) -> _Actor:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {
            "num_cpus": self._group.bundle_specs[number]["CPU"],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, number),
            "runtime_env": self._program.runtime_env,
        }
        handle: Any = ray.remote(EnvActor).options(**options).remote(self._program)
        log = RankLog(self._log_dir.resolve() / f"actor_{number}.log")
        started = handle.start.remote(self._config.name, self._config.kwargs, log.path, self._mark)
        start_until = time.monotonic() + self._start_timeout_s
        return _Actor(number, handle, started, start_until, log, num_before=num_before)

    def _wait_for_start(self) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        for actor in self._actors:
            try:
                answer = ray.get(actor.started, timeout=max(0.0, actor.start_until - time.monotonic()))
            except GetTimeoutError as error:
                raise self._not_started(actor) from error
            except RayError as error:
                raise EnvironmentFailure(
                    f"environment {self.name}: {actor} died in its start ({last_words(error)}){actor.last_lines()}"
                ) from error
            actor.place = _content(answer)

    async def _have_started(self, number: int) -> None:
        """Return when the actor of this number has started, or one that took its place."""
        from ray.exceptions import RayError

        while True:
            actor = self._actors[number]
            try:
                return await self._has_started(actor)
            except RayError as error:
                self._replace_dead(actor, error)

    def _note_start(self, actor: _Actor) -> None:
        """Take in that an actor has started, if it has; raises if it died."""
        import ray

        if actor.place is None and ray.wait([actor.started], timeout=0)[0]:
            actor.place = _content(ray.get(actor.started))

    async def _has_started(self, actor: _Actor) -> None:
        self._note_start(actor)  # perhaps long ago
        if actor.place is not None:
            return
        try:
            async with asyncio.timeout(actor.start_until - time.monotonic()):
                answer = await actor.started
        except TimeoutError as error:
            raise self._not_started(actor) from error
        actor.place = _content(answer)

    async def _asked(self, actor: _Actor, message: Message) -> Message:
        import ray

        reference = actor.handle.step.remote(message)
        try:
            return await reference
        except asyncio.CancelledError as cancelled:
            actor.late.append(reference)
            ray.cancel(reference)
            cancelled.add_note(f"in {actor}, whose log is {actor.log.path}")
            raise

    async def _settle(self, actor: _Actor) -> None:
        """Wait for an actor to give up what was cancelled, and replace one that does not."""
        try:
            async with asyncio.timeout(_GRACE_S):
                # Each ends with an error, if only that of an actor which is gone: the next call will find out.
                await asyncio.gather(*actor.late, return_exceptions=True)
        except TimeoutError:
            self._replace(actor, f"is stuck: it gave up no call in {_GRACE_S:g} s after env.deadline_s")
        actor.late.clear()

    def _replace_dead(self, actor: _Actor, error: BaseException) -> None:
        """Put another actor in the place of one that died; all that died with it, as with their node, have their own.

        Raises:
            EnvironmentFailure: if too many died there in a row.
        """
        if self._actors[actor.number] is not actor:  # another of its calls has noticed before
            return
        most = self._config.max_restarts
        what = f"died{'' if actor.place else ' in its start'} ({last_words(error)})"
        if actor.num_before == most:
            raise EnvironmentFailure(
                f"environment {self.name}: {actor} {what}, after env.max_restarts={most} others in its place without "
                f"an answer in between; mend the environment, or raise env.max_restarts{actor.last_lines()}"
            ) from error
        num_deaths = actor.num_before + 1
        self._replace(actor, f"{what}, {num_deaths} in a row of env.max_restarts={most}", num_deaths)

    def _replace(self, actor: _Actor, what: str, num_before: int = 0) -> None:
        import ray

        _log.warning("environment %s: %s %s; another takes its place%s", self.name, actor, what, actor.last_lines())
        ray.kill(actor.handle)  # it may be stuck, or out of reach
        self.num_replaced += 1
        self._actors[actor.number] = self._new_actor(actor.number, num_before)

    def _not_started(self, actor: _Actor) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"environment {self.name}: {actor} has not started within cluster.start_timeout_s="
            f"{self._start_timeout_s:g}; raise it, or see whether a node with room for the actor was lost"
        )

    def _end_actors(self) -> None:
        import ray

        actors, self._actors = self._actors, []
        if ray.is_initialized():  # the program may have left Ray before
            for actor in actors:
                ray.kill(actor.handle)


def _content(answer: Message) -> Any:
    """What an actor answered; raises what went wrong there."""
    content = answer.writable().content()
    if isinstance(content, Failed):
        raise content.as_raised()
    return content
