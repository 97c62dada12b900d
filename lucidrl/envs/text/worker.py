"""EnvWorker: makes an environment, calls it with a timeout, and checks the replies."""

from __future__ import annotations

import asyncio
import json
import math
import numbers
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from lucidrl.data.datasets import Prompt
from lucidrl.distributed.workers.outcomes import describe_error
from lucidrl.envs.text.event_loop import new_loop
from lucidrl.envs.text.interfaces import (
    ClosableEnv,
    EnvReply,
    EnvRequest,
    PromptChecker,
    PromptSource,
    RewardComponent,
    SampleFailure,
    StatefulEnv,
    TextEnv,
    ValidationPromptSource,
)
from lucidrl.errors import CheckpointError, ConfigError, EnvironmentFailure
from lucidrl.utils.nsys import ENV, is_recorded, worker_name

if TYPE_CHECKING:
    from lucidrl.profiling.recording import Recording

T = TypeVar("T")

Cause = Literal["raised", "timeout", "exited", "bad_reply", "bad_reward", "dropped"]

LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32; reward tensors have this dtype."""
_RANDOM_STREAM = 1 << 20
"""Random stream of environment worker 0; ranks and the driver use streams with lower numbers."""


@dataclass(frozen=True)
class Failure:
    """The reason why a sample has no step result."""

    cause: Cause
    what: str
    """A verb with its object; the subject is the environment's `step`."""
    trace: str = ""
    """Traceback of the environment."""
    is_of_call: bool = False
    """Whether the whole call failed, so any of its samples may be the reason."""
    sentence: str = ""
    """The whole clause, if the subject is not the environment's `step`."""


Outcome = EnvReply | Failure
"""Result of one request: the environment's reply, or the reason why there is none."""


@dataclass(frozen=True)
class EnvState:
    """State of a worker, from which a restarted worker continues."""

    env: str | None
    """State of the environment as JSON; None if the environment has no state."""
    random: dict[str, Any] | None
    """State of the random generators of a worker process; None in the driver, whose random state the run saves."""


@dataclass(frozen=True)
class Scored:
    """Outcomes per call and request, and the state of the worker after the calls."""

    outcomes: list[list[Outcome]]
    state: EnvState


class NewCall(NamedTuple):
    """A call to start."""

    key: int
    requests: Sequence[EnvRequest]
    timeout_s: float


@dataclass(frozen=True)
class Advanced:
    """Outcomes of the calls that ended, by key, and the state of the worker."""

    outcomes: dict[int, list[Outcome]]
    state: EnvState


class EnvWorker:
    """An environment and its event loop.

    Args:
        make: makes the environment.
        name: name of the environment in errors.
        seed: seed of the random generators of a worker process; None in the driver.
        number: index of the worker; selects its random stream.
    """

    def __init__(self, make: Callable[[], TextEnv], name: str, seed: int | None = None, number: int = 0) -> None:
        self._name = name
        self._recording: Recording | None = None
        self._process_name = worker_name(ENV, number)
        self._is_isolated = seed is not None
        if seed is not None:
            from lucidrl.utils.random_state import seed_everything

            seed_everything(seed, _RANDOM_STREAM + number)
        self._env = make()
        self.loop = asyncio.Runner(loop_factory=new_loop)
        self._open: dict[int, asyncio.Task[list[Outcome]]] = {}
        """Calls of `advance` that have not ended."""

    def start_gpu_profiling(self) -> None:
        """Start a recording of this process, if it is selected for profiling; see `lucidrl.utils.nsys`."""
        if not is_recorded(self._process_name):
            return
        from lucidrl.profiling.recording import Recording  # imports torch

        self._recording = self._recording or Recording(self._process_name, operators=False)
        self._recording.start()

    def stop_gpu_profiling(self) -> None:
        """Stop and write the recording, if any."""
        if self._recording is not None:
            self._recording.stop()

    def prompts(self) -> list[Prompt] | None:
        """Prompts of the environment; None if it has no method `prompts`.

        Raises:
            ConfigError: if the method raises, or does not return prompts.
        """
        return self._prompts_of("prompts", self._env.prompts) if isinstance(self._env, PromptSource) else None

    def validation_prompts(self) -> list[Prompt] | None:
        """Validation prompts of the environment; None if it has no method for them.

        Raises:
            ConfigError: if the method raises, or does not return prompts.
        """
        if not isinstance(self._env, ValidationPromptSource):
            return None
        return self._prompts_of("validation_prompts", self._env.validation_prompts)

    def _prompts_of(self, name: str, method: Callable[[], Sequence[Prompt]]) -> list[Prompt]:
        place = f"{self._name}.{name}"
        try:
            prompts = list(method())
        except (KeyboardInterrupt, ConfigError):  # Ctrl-C
            raise
        except BaseException as error:
            raise ConfigError(f"{place} raised {describe_error(error).summary}; fix it") from error
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise ConfigError(f"{place} returned a {type(prompt).__name__}; return a list of Prompt")
        return prompts

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if the environment has a check and cannot score completions of the prompt."""
        if isinstance(self._env, PromptChecker):
            self._env.check_prompt(prompt)

    def score(self, calls: Sequence[Sequence[EnvRequest]], timeout_s: float) -> Scored:
        """Run `score_calls` in a worker process."""
        from lucidrl.profiling.spans import span  # imports torch

        with span("environment"):
            outcomes = self.loop.run(self.score_calls(calls, timeout_s))
        return Scored([_sendable(of_call) for of_call in outcomes], self.state())

    def advance(self, new: Sequence[NewCall], seconds: float) -> Advanced:
        """Start calls, and run all open calls until one ends or the time is over."""
        from lucidrl.profiling.spans import span  # imports torch

        with span("environment"):
            ended = self.loop.run(self._advance(new, seconds))
        return Advanced({key: _sendable(outcomes) for key, outcomes in ended.items()}, self.state())

    async def _advance(self, new: Sequence[NewCall], seconds: float) -> dict[int, list[Outcome]]:
        for call in new:
            self._open[call.key] = asyncio.create_task(self._call(call.requests, call.timeout_s))
        await asyncio.wait(self._open.values(), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return {key: self._open.pop(key).result() for key, task in list(self._open.items()) if task.done()}

    async def score_calls(self, calls: Sequence[Sequence[EnvRequest]], timeout_s: float) -> list[list[Outcome]]:
        """Make all calls concurrently. The timeout cancels a call that awaits, not one that blocks.

        Raises:
            EnvironmentFailure: if the environment raises it.
        """
        return await asyncio.gather(*(self._call(call, timeout_s) for call in calls))

    def state(self) -> EnvState:
        """The state of environment and random generators.

        Raises:
            EnvironmentFailure: if `state_dict` raises, or does not return JSON.
        """
        env = random = None
        if isinstance(self._env, StatefulEnv):
            try:
                env = json.dumps(self._env.state_dict())
            except KeyboardInterrupt:  # Ctrl-C
                raise
            except BaseException as error:
                summary = describe_error(error).summary
                raise EnvironmentFailure(f"{self._name}.state_dict failed ({summary}); return JSON values") from error
        if self._is_isolated:
            from lucidrl.utils.random_state import random_state

            random = random_state()
        return EnvState(env, random)

    def load_state(self, state: EnvState) -> None:
        """Continue from a result of `state`; fields that are None change nothing.

        Raises:
            CheckpointError: if `load_state_dict` raises.
        """
        if state.env is not None:
            assert isinstance(self._env, StatefulEnv)
            try:
                self._env.load_state_dict(json.loads(state.env))
            except KeyboardInterrupt:  # Ctrl-C
                raise
            except BaseException as error:
                summary = describe_error(error).summary
                raise CheckpointError(f"{self._name}.load_state_dict raised {summary}; fix it") from error
        if state.random is not None:
            from lucidrl.utils.random_state import set_random_state

            set_random_state(state.random)

    def shutdown(self) -> None:
        """Stop profiling, cancel running calls, close the event loop and the environment."""
        self.stop_gpu_profiling()
        self.loop.close()
        if isinstance(self._env, ClosableEnv):
            self._env.close()

    async def _call(self, call: Sequence[EnvRequest], timeout_s: float) -> list[Outcome]:
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                replies = await self._env.step(call)
        except EnvironmentFailure:
            raise
        except BaseException as error:  # SystemExit or KeyboardInterrupt would stop the event loop
            raised = describe_error(error)
            if timeout.expired():
                failure = Failure("timeout", f"exceeded its timeout of {timeout_s:g} s", is_of_call=True)
            else:
                failure = Failure("raised", f"raised {raised.summary}", raised.trace, is_of_call=True)
                if self._is_isolated:
                    sys.stderr.write(raised.trace)  # goes to the log file of the worker
            return [failure] * len(call)
        if not isinstance(replies, Sequence) or len(replies) != len(call):
            got = f"{len(replies)} replies" if isinstance(replies, Sequence) else f"a {type(replies).__name__}"
            what = f"returned {got} for {len(call)} requests instead of one EnvReply each"
            return [Failure("bad_reply", what, is_of_call=True)] * len(call)
        return [_checked(reply) for reply in replies]


def _checked(reply: Any) -> Outcome:
    try:
        return _normalized(reply)
    except Exception as error:  # such as the truth value of an array
        return Failure("bad_reply", f"returned a reply that cannot be read ({type(error).__name__}: {error})")


def _normalized(reply: Any) -> Outcome:
    """Return the reply with Python numbers, or a failure if the reply is invalid."""
    if isinstance(reply, SampleFailure):
        return Failure("raised", "", reply.trace, reply.is_of_call, sentence=str(reply))
    if not isinstance(reply, EnvReply):
        return Failure("bad_reply", f"returned a {type(reply).__name__} instead of an EnvReply")
    if not isinstance(reply.reward, numbers.Real):
        return Failure("bad_reward", f"returned a reward of type {type(reply.reward).__name__} instead of a number")
    reward = _as_float(reply.reward)
    if not math.isfinite(reward) or abs(reward) > LARGEST_REWARD:
        rule = f"rewards must be finite and within ±{LARGEST_REWARD:.1e}, the range of float32"
        return Failure("bad_reward", f"returned the reward {reward:g}, but {rule}")
    if not isinstance(reply.metrics, Mapping) or not all(isinstance(name, str) for name in reply.metrics):
        return Failure("bad_reply", "returned metrics that are not a dictionary of numbers by name")
    if wrong := [name for name, value in reply.metrics.items() if not isinstance(value, numbers.Real)]:
        return Failure("bad_reply", f"returned metrics that are not numbers: {', '.join(wrong)}")
    if not (reply.info is None or isinstance(reply.info, dict)):
        return Failure("bad_reply", f"returned an info of type {type(reply.info).__name__} instead of a dictionary")
    if not (reply.answer is None or isinstance(reply.answer, str)):
        return Failure("bad_reply", f"returned an answer of type {type(reply.answer).__name__} instead of a string")
    if not reply.done and not _are_observations(reply.messages):
        what = (
            "returned done=False without messages; return messages with role and content, the last with another role "
            "than assistant"
        )
        return Failure("bad_reply", what)
    components = {name: RewardComponent(*map(_as_float, part)) for name, part in reply.components.items()}
    total = sum(score * weight for score, weight in components.values())
    if components and not math.isclose(total, reward, rel_tol=1e-6, abs_tol=1e-6):
        parts = f"the components {', '.join(components)} add up to {total:g}; return their weighted sum as the reward"
        return Failure("bad_reward", f"returned the reward {reward:g}, but {parts}")
    metrics = {name: _as_float(value) for name, value in reply.metrics.items()}
    return replace(reply, reward=reward, done=bool(reply.done), metrics=metrics, components=components)


def _as_float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond the range of float64
        return math.inf if number > 0 else -math.inf


def _are_observations(messages: Any) -> bool:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return False
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    return all(isinstance(text, str) for text in texts) and bool(messages) and messages[-1]["role"] != "assistant"


def _sendable(outcomes: list[Outcome]) -> list[Outcome]:
    """Replace replies that cannot be pickled, for instance because of their `info`, with failures."""
    try:
        pickle.dumps(outcomes)
    except Exception as error:  # the methods of the object may raise anything
        if len(outcomes) > 1:
            return [outcome for each in outcomes for outcome in _sendable([each])]
        what = f"returned a reply that cannot be sent to the driver ({type(error).__name__}: {error})"
        return [Failure("bad_reply", what)]
    return outcomes
