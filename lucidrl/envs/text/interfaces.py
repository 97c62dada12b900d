"""The interface of a text environment: a batch of samples in, rewards or observations out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

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
        """The text to score."""
        return self.message_log[-1]["content"]

    @property
    def answer(self) -> str:
        """Old name of `completion`."""
        return self.completion


@dataclass(frozen=True)
class EnvReply:
    """The environment's step result for one completion."""

    reward: float
    """Finite, and within the range of float32."""
    done: bool = True
    messages: tuple[ChatMessage, ...] = ()
    """The observation for the next completion; needed if not done, unused otherwise."""
    info: dict[str, Any] | None = None
    """Replaces the request's `info` in the next turn; None keeps it."""
    metrics: dict[str, float] = field(default_factory=dict)
    is_dropped: bool = False
    """Leave the sample out, as one that cannot be scored with `env.on_error=drop`; its metrics count."""


class SampleFailure(Exception):  # noqa: N818 - what became of a sample, not an error of the program
    """A sample that cannot be scored: `step` returns it in place of the reply. `env.on_error` decides what happens.

    Args:
        message: subject, verb and object, such as "reward exact returned nan".
        is_of_call: whether any sample of the call may be the reason.
        trace: traceback of the user's code.
    """

    def __init__(self, message: str, *, is_of_call: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.is_of_call = is_of_call
        self.trace = trace


class TextEnv(Protocol):
    """Scores completions. Requests carry all state of a sample, so calls may come in any order.

    `step` returns one reply per request, in their order. Calls overlap on one event loop: put blocking work into
    `asyncio.to_thread`. The runner may retry the samples of a failed call one by one. A step that raises
    EnvironmentFailure stops the run.
    """

    async def step(self, batch: Sequence[EnvRequest]) -> Sequence[EnvReply | SampleFailure]: ...


@runtime_checkable
class ClosableEnv(Protocol):
    """An environment that holds resources, such as processes; closed when its worker shuts down."""

    def close(self) -> None: ...


@runtime_checkable
class PromptChecker(Protocol):
    """An environment that can tell from a prompt whether it can score its completions, before any are sampled."""

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if it cannot."""


@runtime_checkable
class PromptSource(Protocol):
    """An environment with prompts; others take them from `data.file`."""

    def prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class ValidationPromptSource(Protocol):
    """An environment with separate validation prompts; otherwise `env.validation_fraction` of `prompts` is held out.

    An empty result means no validation.
    """

    def validation_prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class StatefulEnv(Protocol):
    """An environment with state, such as the level of a curriculum, which checkpoints save.

    Both methods are called between steps, when no sample is in progress. The state must be JSON.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
