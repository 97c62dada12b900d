"""What a text environment is: it takes a batch of conversations and returns rewards or observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage, LLMMessageLogType


@dataclass(frozen=True)
class EnvRequest:
    """A conversation whose last message is the completion to score."""

    sample_id: str
    message_log: LLMMessageLogType
    info: dict[str, Any]
    """The prompt's `info`, or what the environment's last reply put in its place."""
    turn: int
    """Number of completions in the conversation, counted from 1."""

    @property
    def answer(self) -> str:
        """Text of the completion to score."""
        return self.message_log[-1]["content"]


@dataclass(frozen=True)
class EnvReply:
    """The environment's step result for one completion."""

    reward: float
    """Finite, and within the range of float32."""
    done: bool = True
    messages: tuple[ChatMessage, ...] = ()
    """The observation that the next completion responds to; needed when not done, unused when done."""
    info: dict[str, Any] | None = None
    """Replaces the request's `info` in the next turn; None keeps it."""
    metrics: dict[str, float] = field(default_factory=dict)


class TextEnv(Protocol):
    """Scores completions. Requests carry all state of a conversation, so calls may come in any order.

    `step` returns one reply for each request, in their order. Calls overlap on one event loop: blocking work belongs
    in `asyncio.to_thread`. The runner may retry the samples of a failed call one by one. A step that raises
    EnvironmentFailure ends the run: the environment as a whole cannot go on.
    """

    async def step(self, batch: Sequence[EnvRequest]) -> Sequence[EnvReply]: ...


@runtime_checkable
class PromptSource(Protocol):
    """An environment that brings its own prompts; any other takes them from a file."""

    def prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class StatefulEnv(Protocol):
    """An environment that keeps something over a run, such as the level of a curriculum; checkpoints hold it.

    Both are called between steps, when no conversation is open. The state is what JSON can hold: numbers,
    texts, None, and lists and dictionaries of these.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
