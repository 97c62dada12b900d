"""A worker of a collector that is a Ray actor, as its driver holds it; one that dies may be replaced by another."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lucidrl.collectors.ray_actor import Answer, Past, Place
from lucidrl.collectors.worker_main import Call, Collect, Command
from lucidrl.distributed.child_main import Raised
from lucidrl.distributed.launchers.rank_process import Died, Outcome
from lucidrl.distributed.launchers.ray_words import died_with_node, last_words

if TYPE_CHECKING:
    from lucidrl.collectors.ray_host import RayHost

_log = logging.getLogger(__name__)

_KEPT = ("set_post_collect_hook", "set_profiling_enabled")
"""Calls that change how a worker collects; the last of each is made again on what replaces it."""


@dataclass(eq=False)
class _Asked:
    """Something that an actor has not answered yet."""

    worker: RayWorker
    arrivals: RayArrivals
    command: Command | None
    """None: to start."""
    reference: Any = None
    """To the answer, of Ray's."""


class RayArrivals:
    """See `Arrivals`. Nobody waits in Ray but who waits here: there is no thread that its end could disturb."""

    def __init__(self) -> None:
        self.here: deque[tuple[int, Outcome]] = deque()
        self._asked: dict[Any, _Asked] = {}  # by reference

    def expect(self, asked: _Asked) -> None:
        self._asked[asked.reference] = asked

    def expect_no_more(self, asked: _Asked) -> None:
        self._asked.pop(asked.reference, None)

    def take_in(self, timeout_s: float) -> None:
        import ray

        references = list(self._asked)
        if not references:
            return
        ready = references  # if the program has left Ray, nothing will come any more
        if ray.is_initialized():
            num_returns = 1 if timeout_s > 0 else len(references)
            ready, _ = ray.wait(references, num_returns=num_returns, timeout=max(0.0, timeout_s))
        for reference in ready:
            asked = self._asked.pop(reference, None)  # another thread may have replaced its worker
            if asked is not None and (outcome := asked.worker.outcome_of(asked, reference)) is not None:
                self.here.append((asked.worker.index, outcome))


class RayWorker:
    """Begins to start at once; see `Worker`."""

    def __init__(self, host: RayHost, index: int):
        self.index = index
        self.excused_until = -math.inf
        self.cause_of_end: BaseException | None = None
        self._host = host
        self._lock = threading.RLock()
        self._unanswered: list[_Asked] = []  # in the order in which it was asked
        self._place: Place | None = None
        self._is_heard_of = False  # the actor that there is now
        self._start_due = -math.inf  # of the actor that there is now, if it replaces another one
        self._is_recording = False
        self._past = Past()
        self._num_actors = 0
        self._num_weights = 0  # how often some were published when the actor got its own
        self._farewell: Any = None
        self._actor = self._new_actor()
        self._ask(None)

    @property
    def pid(self) -> int:
        assert self._place is not None, "a worker has started"
        return self._place.pid

    @property
    def has_ended(self) -> bool:
        return self.cause_of_end is not None

    def send(self, command: Command) -> None:
        import ray

        if not ray.is_initialized():
            self.cause_of_end = _left_ray()
            raise _left_ray()
        self._ask(command)

    def where(self) -> str:
        if not self._is_heard_of:
            return self._host.how_it_waits(self.index)
        assert self._place is not None
        return f"on node {self._place.node}, process {self._place.pid},"

    def how_it_ended(self) -> str:
        assert self.cause_of_end is not None
        return f"died ({last_words(self.cause_of_end)})"

    def outcome_of(self, asked: _Asked, reference: Any) -> Outcome | None:
        """What became of something that was answered, or whose actor is gone; None if it was asked again."""
        import ray

        with self._lock:
            if asked.reference != reference:  # by another thread
                return None
            if not ray.is_initialized():
                self.cause_of_end = _left_ray()
                return Died()
            try:
                message = ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # not in our own code, which returns what it raises
                return Raised(f"{type(error.cause).__name__}: {error.cause}", str(error), None)
            except ray.exceptions.RayError as error:
                return self._replaced_or_died(error)
            self._unanswered.remove(asked)
            return self._taken(message, asked.command)

    def end(self) -> None:
        import ray

        if self._farewell is None and ray.is_initialized():
            self._farewell = self._actor.shutdown.remote()

    def join(self, timeout_s: float) -> int | None:
        """0 if it has ended, None if not; brings what it has recorded."""
        import ray

        if self._farewell is None or not ray.is_initialized():
            return 0
        if not ray.wait([self._farewell], timeout=timeout_s)[0]:
            return None
        with suppress(ray.exceptions.RayError):
            self._taken(ray.get(self._farewell), None)
        return 0

    def kill(self) -> None:
        import ray

        with self._lock:
            # Known to whoever waits for it in another thread, who would replace it.
            self.cause_of_end = self.cause_of_end or ConnectionAbortedError("it was ended")
            if ray.is_initialized():
                ray.kill(self._actor)

    def reap(self) -> None:
        with self._lock:
            for asked in self._unanswered:
                asked.arrivals.expect_no_more(asked)
            self._unanswered.clear()
            self._farewell = None

    def _ask(self, command: Command | None) -> None:
        arrivals = self._host.batches if isinstance(command, Collect) else self._host.replies
        with self._lock:
            asked = _Asked(self, arrivals, command)
            self._unanswered.append(asked)
            self._put_to_actor(asked)

    def _put_to_actor(self, asked: _Asked) -> None:
        if asked.command is None:
            asked.reference = self._host.start_actor(self._actor, self.index, self._past)
        else:
            news = None
            if isinstance(asked.command, Collect):
                self._num_weights, news = self._host.weights.newer_than(self._num_weights)
            asked.reference = self._actor.carry_out.remote(asked.command, news)
        asked.arrivals.expect(asked)

    def _new_actor(self) -> Any:
        actor = self._host.new_actor(self.index, self._num_actors)
        self._num_actors += 1
        self._num_weights = 0
        self._is_heard_of = False
        return actor

    def _taken(self, message: Any, command: Command | None) -> Outcome:
        """What an answer says, after all that comes with it was put where it belongs."""
        try:
            answer: Answer = message.writable().content()
        except Exception as error:
            return Raised(f"its result cannot be read here: {type(error).__name__}: {error}", "", None)
        calls = self._past.calls
        if isinstance(command, Call) and command.method in _KEPT:
            calls = [*(call for call in calls if call.method != command.method), command]
        self._place, self._is_heard_of, self._is_recording = answer.place, True, answer.is_recording
        self._past = Past(answer.state, calls)
        # What it was asked for before it began may still need its time; nothing else is excused.
        self.excused_until = min(self.excused_until, time.monotonic() + self._host.timeout_s)
        for trace in answer.traces:
            trace.save(self.index)
        return answer.outcome

    def _replaced_or_died(self, error: BaseException) -> Died | None:
        """The actor is gone: another one takes its place, and is asked again, if there may be one."""
        if self._was_sent_to_lost_node(error):
            _log.warning("what takes the place of worker %d was sent to a lost node, and starts elsewhere", self.index)
            self._replace()
            return None
        may_be_replaced = self._place is not None and not self.has_ended  # it has started once
        number = self._host.restarts.take_one() if may_be_replaced else None
        if number is None:
            self.cause_of_end = error.with_traceback(None)  # whose frames would keep the whole collector
            return Died()
        _log.warning(
            "worker %d %s died (%s); another one takes its place, with the newest weights and new episodes (%s)%s",
            self.index,
            self.where(),
            last_words(error),
            number,
            "; the trace that it was recording is lost" if self._is_recording else "",
        )
        self._replace()
        self._start_due = time.monotonic() + self._host.start_timeout_s
        self.excused_until = self._start_due + self._host.timeout_s
        return None

    def _was_sent_to_lost_node(self, error: BaseException) -> bool:
        """Whether it is no death of its own: Ray takes a while to notice that a node is gone, and places an actor there
        meanwhile, which may be the one that replaces one of that node."""
        is_starting = not self._is_heard_of and not self.has_ended and time.monotonic() < self._start_due
        return is_starting and died_with_node(error)

    def _replace(self) -> None:
        """Put another actor in the place of this one, and ask it all that this one has not answered."""
        import ray

        ray.kill(self._actor)  # it may only be out of reach
        self._actor = self._new_actor()
        self._host.start_actor(self._actor, self.index, self._past)  # if that fails, so do the answers to the next
        for asked in self._unanswered:
            asked.arrivals.expect_no_more(asked)
            self._put_to_actor(asked)


def _left_ray() -> ConnectionError:
    return ConnectionError("the program has left Ray")
