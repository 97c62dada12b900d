"""Asks a text environment from synchronous code: concurrently, under a deadline, and judging what it returns."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from lucidrl.envs.text.config import OnError
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, HostedEnv, StatefulEnv, TextEnv
from lucidrl.envs.text.loop_thread import LoopThread
from lucidrl.errors import CheckpointError, EnvironmentFailure
from lucidrl.utils.watching import wait_watching

logger = logging.getLogger(__name__)

Cause = Literal["raised", "deadline", "bad_reply", "bad_reward"]

# How long after the deadline a call may take to give way before its loop counts as blocked.
_GRACE_S = 0.5


@dataclass(frozen=True)
class _Failure:
    cause: Cause
    what: str
    call: Sequence[EnvRequest]
    """The requests asked together; any of them may be at fault."""
    error: BaseException | None = None
    in_company: bool = False
    """Whether a loop or process was blocked while other calls ran on it: any of them may be at fault."""


_Verdict = EnvReply | _Failure


class EnvRunner:
    """Steps an environment batch by batch; owns the event loop on which the environment runs.

    A call that raises, exceeds the deadline or returns the wrong number of replies fails for all its samples. With
    `on_error="fail"` that is raised at once. With "drop" the samples are asked again one by one, so that a bad one
    costs its neighbours nothing; those that still fail are left out. A call that blocks the loop cannot be stopped:
    it is left behind in its daemon thread, and a new loop takes over. An EnvironmentFailure is of the environment as a
    whole, and always raised.

    Args:
        watch: see `wait_watching`; called while the environment is waited for.

    Attributes:
        counts: dropped samples by cause: raised, deadline, bad_reply, bad_reward.
    """

    def __init__(
        self,
        env: TextEnv,
        deadline_s: float,
        max_concurrency: int,
        on_error: OnError,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.counts: Counter[Cause] = Counter()
        self._env = env
        self._env_name = env.name if isinstance(env, HostedEnv) else type(env).__name__
        self._deadline_s = deadline_s
        self._max_concurrency = max_concurrency
        self._on_error = on_error
        self._watch = watch
        self._loop: LoopThread | None = self._new_loop()

    @property
    def num_replaced(self) -> int:
        """Processes of the environment that took the place of others so far."""
        return self._env.num_replaced if isinstance(self._env, HostedEnv) else 0

    def step(self, requests: Sequence[EnvRequest]) -> list[EnvReply | None]:
        """Replies in the order of the requests; None for a dropped one.

        Raises:
            EnvironmentFailure: with `on_error="fail"`, naming environment, samples, turn and cause; with any, if the
                environment raises it.
        """
        verdicts = self._ask(_even_chunks(requests, self._max_concurrency))
        if self._on_error == "fail":
            for verdict in verdicts:
                if isinstance(verdict, _Failure):
                    raise EnvironmentFailure(self._describe(verdict)) from verdict.error
        else:
            verdicts = self._ask_again(requests, verdicts)
        for verdict in verdicts:
            if isinstance(verdict, _Failure):
                self._count_dropped(verdict)
        return [verdict if isinstance(verdict, EnvReply) else None for verdict in verdicts]

    def state_dict(self) -> dict[str, Any]:
        """What the environment keeps over a run, as `env`; empty for one that keeps nothing.

        Raises:
            EnvironmentFailure: if the environment raises, or gives what a checkpoint cannot hold.
        """
        if not isinstance(self._env, StatefulEnv):
            return {}
        try:
            state = self._env.state_dict()
            json.dumps(state)
        except Exception as error:
            raise EnvironmentFailure(
                f"{self._env_name}.state_dict gives no state that can be saved ({type(error).__name__}: {error}); "
                "return numbers, texts, None, and lists and dictionaries of these"
            ) from error
        return {"env": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the environment back what `state_dict` found.

        Raises:
            CheckpointError: if it was another environment's, by whether there is one or because this one raises.
        """
        if isinstance(self._env, StatefulEnv) != ("env" in state):
            kept, keeps = ("a", "keeps none") if "env" in state else ("no", "keeps one")
            raise CheckpointError(
                f"the checkpoint has {kept} state of the environment, but {self._env_name} {keeps}; "
                "resume with the env.name it was saved with"
            )
        if isinstance(self._env, StatefulEnv):
            try:
                self._env.load_state_dict(state["env"])
            except Exception as error:
                raise CheckpointError(
                    f"{self._env_name}.load_state_dict raised {type(error).__name__}: {error}; "
                    "resume with the environment it was saved with"
                ) from error

    def close(self) -> None:
        """Cancel what runs and end the event loop."""
        if self._loop is not None:
            self._loop.stop(wait_s=_GRACE_S)
            self._loop = None

    def __enter__(self) -> EnvRunner:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask_again(self, requests: Sequence[EnvRequest], verdicts: list[_Verdict]) -> list[_Verdict]:
        """Ask the samples of failed calls alone; those whose loop was blocked, by whichever sample, one at a time."""
        shared = [
            row for row, verdict in enumerate(verdicts) if isinstance(verdict, _Failure) and len(verdict.call) > 1
        ]
        for start in range(0, len(shared), self._max_concurrency):
            rows = shared[start : start + self._max_concurrency]
            for row, verdict in zip(rows, self._ask([[requests[row]] for row in rows]), strict=True):
                verdicts[row] = verdict
        for row, verdict in enumerate(verdicts):
            if isinstance(verdict, _Failure) and verdict.in_company:
                verdicts[row] = self._ask([[requests[row]]])[0]
        return verdicts

    def _ask(self, calls: Sequence[Sequence[EnvRequest]]) -> list[_Verdict]:
        """Make the calls concurrently; the verdicts of all their requests, in order."""
        if self._loop is None:
            raise RuntimeError("the EnvRunner is closed; make a new one to step the environment")
        self._wait_until_ready()
        futures = [self._loop.submit(self._call(call)) for call in calls]
        unanswered = wait_watching(futures, self._watch, timeout_s=self._deadline_s + _GRACE_S)
        if unanswered:
            self._replace_loop()
        verdicts: list[_Verdict] = []
        for call, future in zip(calls, futures, strict=True):
            if future in unanswered:
                what = self._late(" and neither awaited nor heeded its cancellation, which blocks all others")
                failure = _Failure("deadline", what, call, in_company=len(calls) > 1)
                verdicts += [failure] * len(call)
            else:
                verdicts += future.result()
        return self._with_company(verdicts, len(calls)) if self._on_error == "drop" else verdicts

    def _with_company(self, verdicts: list[_Verdict], num_calls: int) -> list[_Verdict]:
        """Mark late calls of which some may only have waited for another, in a process that turns out to be stuck."""
        late = [isinstance(verdict, _Failure) and verdict.cause == "deadline" for verdict in verdicts]
        if num_calls == 1 or not any(late):
            return verdicts
        num_before = self.num_replaced
        self._wait_until_ready()
        if self.num_replaced == num_before:
            return verdicts
        return [
            replace(verdict, in_company=True) if isinstance(verdict, _Failure) and is_late else verdict
            for verdict, is_late in zip(verdicts, late, strict=True)
        ]

    def _wait_until_ready(self) -> None:
        if isinstance(self._env, HostedEnv):
            assert self._loop is not None
            self._loop.submit(self._env.ready()).result()

    async def _call(self, call: Sequence[EnvRequest]) -> list[_Verdict]:
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                replies = await self._env.step(call)
        except EnvironmentFailure:
            raise
        # The last two would otherwise end the task or the loop, and the caller would wait for the deadline.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            if deadline.expired():
                notes = getattr(error.__cause__, "__notes__", [])
                failure = _Failure("deadline", self._late("".join(f" {note}" for note in notes)), call)
            else:
                failure = _Failure("raised", f"raised {type(error).__name__}: {error}", call, error)
            return [failure] * len(call)
        if not isinstance(replies, Sequence) or len(replies) != len(call):
            got = f"{len(replies)} replies" if isinstance(replies, Sequence) else f"a {type(replies).__name__}"
            what = f"returned {got} for {len(call)} requests instead of one EnvReply each"
            return [_Failure("bad_reply", what, call)] * len(call)
        return [_judged(request, reply) for request, reply in zip(call, replies, strict=True)]

    def _count_dropped(self, failure: _Failure) -> None:
        if failure.cause not in self.counts:
            logger.warning("%s; it is dropped, later ones like it only counted", self._describe(failure))
        self.counts[failure.cause] += 1

    def _describe(self, failure: _Failure) -> str:
        ids = [request.sample_id for request in failure.call]
        shown = ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
        noun = "sample" if len(ids) == 1 else "samples"
        remedy = (
            ""
            if self._on_error == "drop"
            else "; mend the environment, or leave such samples out with env.on_error=drop"
        )
        return f"{self._env_name}.step {failure.what} ({noun} {shown}, turn {failure.call[0].turn}){remedy}"

    def _late(self, detail: str = "") -> str:
        return f"exceeded its deadline of {self._deadline_s:g} s{detail}"

    def _new_loop(self) -> LoopThread:
        return LoopThread(name=f"{self._env_name}-loop")

    def _replace_loop(self) -> None:
        assert self._loop is not None
        self._loop.stop(wait_s=0)
        self._loop = self._new_loop()


def _judged(request: EnvRequest, reply: Any) -> _Verdict:
    if not isinstance(reply, EnvReply):
        return _Failure("bad_reply", f"returned a {type(reply).__name__} instead of an EnvReply", [request])
    if not isinstance(reply.reward, numbers.Real):
        what = f"returned a reward of type {type(reply.reward).__name__} instead of a number"
        return _Failure("bad_reward", what, [request])
    if not math.isfinite(reply.reward):
        return _Failure("bad_reward", f"returned the reward {reply.reward}, which is not finite", [request])
    bad_metrics = [name for name, value in reply.metrics.items() if not isinstance(value, numbers.Real)]
    if bad_metrics:
        return _Failure("bad_reply", f"returned metrics that are not numbers: {', '.join(bad_metrics)}", [request])
    if not reply.done and not _are_observations(reply.messages):
        what = "is not done but returned no messages with role and content that end with another role than assistant"
        return _Failure("bad_reply", what, [request])
    return reply


def _are_observations(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or not messages:
        return False
    well_formed = all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    return well_formed and messages[-1]["role"] != "assistant"


def _even_chunks(requests: Sequence[EnvRequest], max_chunks: int) -> list[Sequence[EnvRequest]]:
    """At most `max_chunks` non-empty chunks in order, whose sizes differ by at most one."""
    num_chunks = min(max_chunks, len(requests))
    bounds = [len(requests) * index // num_chunks for index in range(num_chunks + 1)] if num_chunks else []
    return [requests[start:stop] for start, stop in pairwise(bounds)]
