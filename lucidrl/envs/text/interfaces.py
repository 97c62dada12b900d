"""What a text environment is: it is asked with a batch of conversations and answers with rewards or observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage, LLMMessageLogType


@dataclass(frozen=True)
class EnvRequest:
    """A conversation whose last message is the answer to be judged."""

    sample_id: str
    message_log: LLMMessageLogType
    info: dict[str, Any]
    """The prompt's `info`, or what the environment's last reply put in its place."""
    turn: int
    """How many answers the conversation has, counted from 1."""

    @property
    def answer(self) -> str:
        """Text of the answer to be judged."""
        return self.message_log[-1]["content"]


@dataclass(frozen=True)
class EnvReply:
    """The environment's verdict on one answer."""

    reward: float
    done: bool = True
    messages: tuple[ChatMessage, ...] = ()
    """The observation that the next answer responds to; needed when not done, unused when done."""
    info: dict[str, Any] | None = None
    """Replaces the request's `info` in the next turn; None keeps it."""
    metrics: dict[str, float] = field(default_factory=dict)


class TextEnv(Protocol):
    """Judges answers. Requests carry all state of a conversation, so that any batch may be asked in any order.

    `step` returns one reply for each request, in their order. Calls overlap on one event loop: blocking work belongs
    in `asyncio.to_thread`. A call that failed may be asked again, row by row. One that raises EnvironmentFailure says
    that the environment as a whole cannot go on, and ends the run. One that is cancelled at its deadline may add a note
    to the cancellation, which the error repeats.
    """

    async def step(self, batch: Sequence[EnvRequest]) -> Sequence[EnvReply]: ...


@runtime_checkable
class PromptSource(Protocol):
    """An environment that brings its own prompts; any other takes them from a file."""

    def prompts(self) -> Sequence[Prompt]: ...


@runtime_checkable
class HostedEnv(Protocol):
    """An environment that lives in processes of its own, of which some may end and be replaced."""

    name: str
    """What errors call it."""
    num_replaced: int
    """Processes that took the place of others so far."""

    async def ready(self) -> None:
        """Wait until it can be asked: the deadline of a call is not for the start of a process."""


@runtime_checkable
class StatefulEnv(Protocol):
    """An environment that keeps something over a run, such as the level of a curriculum; checkpoints hold it.

    Both are called between steps, when no conversation is open. The state is what JSON can hold: numbers,
    texts, None, and lists and dictionaries of these.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
