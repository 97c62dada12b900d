"""Configuration of tools: which functions the model may call, and what happens to calls that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from lucidrl.rewards.config import RewardConfig, Rewards, as_named_list
from lucidrl.rewards.interfaces import MEMORY_LIMIT_MB, TIMEOUT_S, Limits, SampleTime
from lucidrl.utils.config import Config

DEFAULT_MAX_TURNS = 4
"""Completions per sample of a run with tools, unless `collector.max_turns` is set."""

OnFailedCall = Literal["message", "end", "drop", "fail"]


class ToolConfig(Config):
    """A tool that the model may call."""

    name: str
    """`calculator`, `python`, or the import path of your function, `module:function`."""
    timeout_s: float = Field(default=TIMEOUT_S, gt=0, le=86_400)
    """Timeout of one call. The process of a call that exceeds it is killed."""
    memory_limit_mb: Annotated[int, Field(ge=16)] = MEMORY_LIMIT_MB
    """Memory limit of one call."""
    num_workers: PositiveInt | None = None
    """Calls of this tool that run at the same time; default: the number of cores."""

    @property
    def limits(self) -> Limits:
        """Limits of one call."""
        return Limits(self.timeout_s, self.memory_limit_mb << 20)


Tools = Annotated[tuple[ToolConfig, ...], BeforeValidator(as_named_list)]
"""The setting `tools`: a name, a mapping, or a list of names and mappings."""


class ToolUseConfig(Config):
    """How tool calls are executed, and what becomes of calls that fail."""

    max_calls_per_turn: PositiveInt = 8
    """Calls of one completion that are executed, at the same time; the model gets an error for each further call."""
    max_result_chars: Annotated[int, Field(ge=16, le=100_000)] = 2000
    """Longest result that the model gets; the rest is cut, and the result says so."""
    on_bad_call: OnFailedCall = "message"
    """What to do after a call that cannot be executed, such as of an unknown tool, or with malformed JSON or wrong
    arguments: `message` gives the error to the model as the result, `end` ends the sample without its final reward,
    `drop` leaves the sample out, `fail` stops the run."""
    on_tool_error: OnFailedCall = "message"
    """As `on_bad_call`, for a tool that raises, exceeds its timeout or ends its process."""
    turn_reward: Rewards = ()
    """Rewards, as in `reward`, of each completion that calls tools. They are added to the final reward. The columns
    `tool_calls` and `num_failed_calls` describe the calls of the turn."""


def seconds_of_tools(tools: Sequence[ToolConfig | Callable[..., Any]], use: ToolUseConfig) -> list[SampleTime]:
    """Upper bound on the time that each tool needs per sample: every call of a turn times out."""
    from lucidrl.distributed.workers.process import num_cores

    configs = [tool if isinstance(tool, ToolConfig) else ToolConfig(name="function") for tool in tools]
    return [
        SampleTime(use.max_calls_per_turn * (1 + tool.timeout_s), tool.num_workers or num_cores()) for tool in configs
    ]


def tool_env_kwargs(
    tools: Sequence[ToolConfig], use: ToolUseConfig, rewards: Sequence[RewardConfig], max_turns: int
) -> dict[str, Any]:
    """Arguments of `TOOL_ENV`."""
    return {
        "tools": [tool.model_dump() for tool in tools],
        "rewards": [reward.model_dump() for reward in rewards],
        "use": use.model_dump(),
        "max_turns": max_turns,
    }
