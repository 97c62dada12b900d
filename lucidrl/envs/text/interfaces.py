"""The interface of a text environment: it receives a batch of samples and returns rewards or observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage, LLMMessageLogType


@dataclass(frozen=True)
class EnvRequest:
    """A sample whose last message is the completion to score."""

    sample_id: str
    message_log: LLMMessageLogType
    info: dict[str, Any]
    """The `info` of the prompt, or of the environment's last reply."""
    turn: int
    """Number of completions in the sample, counted from 1."""

    @property
    def completion(self) -> str:
        """Text of the completion to score."""
        return self.message_log[-1]["content"]

    @property
    def answer(self) -> str:
        """Old name of `completion`."""
        return self.completion


class RewardComponent(NamedTuple):
    """One of several rewards of a completion."""

    score: float
    weight: float = 1.0
    """The same in all replies."""


@dataclass(frozen=True)
class EnvReply:
    """The environment's step result for one completion."""

    reward: float
    """Finite, and within the range of float32."""
    done: bool = True
    messages: tuple[ChatMessage, ...] = ()
    """The observation for the next completion; required if `done` is False, otherwise unused."""
    info: dict[str, Any] | None = None
    """Replaces the request's `info` in the next turn; None keeps the request's `info`."""
    metrics: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The answer that was read from the completion, normalised so that equal answers are equal strings. `maj@k`
    counts equal answers; if None, the text of the completion counts as the answer."""
    components: Mapping[str, RewardComponent] = field(default_factory=dict)
    """The rewards, by name, that `reward` is the sum of, each its score times its weight; needed only for
    `grpo.advantages.rewards=separate`."""
    is_dropped: bool = False
    """Leave the sample out of training, as `env.on_error=drop` does; its metrics are logged."""


class SampleFailure(Exception):  # noqa: N818 - what became of a sample, not an error of the program
    """Returned by `step` in place of the reply for a sample that cannot be scored; `env.on_error` decides what happens.

    Args:
        message: a clause with subject, verb and object, such as "reward exact returned nan".
        is_of_call: whether the whole call failed, so that any of its samples may be the reason.
        trace: traceback of the user's code.
    """

    def __init__(self, message: str, *, is_of_call: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.is_of_call = is_of_call
        self.trace = trace


class TextEnv(Protocol):
    """Scores completions. Requests carry all state of a sample, so calls may come in any order.

    `step` returns one reply per request, in the same order. Calls overlap on one event loop: put blocking work into
    `asyncio.to_thread`. The runner may retry the samples of a failed call one by one. A step that raises
    EnvironmentFailure stops the run.
    """

    async def step(self, batch: Sequence[EnvRequest]) -> Sequence[EnvReply | SampleFailure]: ...


@runtime_checkable
class ClosableEnv(Protocol):
    """An environment that holds resources, such as processes; its worker calls `close` at shutdown."""

    def close(self) -> None: ...


@runtime_checkable
class PromptChecker(Protocol):
    """An environment that checks, before any completion is sampled, whether it can score completions of a prompt."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if the environment cannot score completions of the prompt."""


@runtime_checkable
class PromptSource(Protocol):
    """An environment that has prompts; other environments need `data.file`."""

    def prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class ValidationPromptSource(Protocol):
    """An environment with separate validation prompts; without it, `data.validation_fraction` of `prompts` is held out.

    An empty result means no validation.
    """

    def validation_prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class StatefulEnv(Protocol):
    """An environment whose state, such as the level of a curriculum, is saved in checkpoints.

    Both methods are called between steps, when no sample is in progress except in asynchronous training. The state must
    be JSON.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
