"""ToolEnv: the environment of a run with `tools`. It executes tool calls, and scores completions without calls."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import ChatMessage
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, SampleFailure
from lucidrl.errors import EnvironmentFailure
from lucidrl.rewards.env import RewardEnv
from lucidrl.rewards.interfaces import Completion
from lucidrl.rewards.pool import VerifierPool
from lucidrl.tools.calls import BadCall, ToolCall, calls_of
from lucidrl.tools.config import DEFAULT_MAX_TURNS, OnFailedCall, ToolConfig, ToolUseConfig
from lucidrl.tools.functions import Function, ToolRunner, load_tools
from lucidrl.utils.config import validate

_log = logging.getLogger(__name__)

CALLS_COLUMN, TURN_REWARD_COLUMN = "tool_calls", "turn_reward"
"""Columns that reward functions may use in addition to those of the row."""
_ERROR = "error: "
"""Start of the result of a failed call."""
_LONGEST_NAME = 100
_Calls = Sequence[ToolCall | BadCall]
P = TypeVar("P", "VerifierPool", "RewardEnv")
BAD_CALL, TOOL_ERROR, TIMEOUT = FAILURES = ("bad_call", "tool_error", "timeout")


@dataclass(frozen=True)
class _Executed:
    """A call with its result."""

    tool: str
    arguments: dict[str, Any]
    result: str
    """What the model gets: the result, or the error."""
    failure: str = ""
    """One of `FAILURES`; empty if the tool returned."""


class ToolEnv:
    """Environment in which a completion either calls tools or is the final one.

    The calls of a completion run at the same time, each in a process that can be killed. The model gets one message of
    the role `tool` per call. A completion without calls ends the sample and gets the final reward; so does the
    completion of the last turn, whose calls are not executed.

    Args:
        tools: values of the setting `tools`, or functions.
        rewards: value of the setting `reward`: scores the final completion.
        functions: additional reward functions for the final completion, as Python objects.
        use: value of the setting `tool_use`.
        max_turns: completions per sample, as in `collector.max_turns`.

    Raises:
        ConfigError: a tool or reward does not exist, or a tool does not describe its parameters.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any] | ToolConfig | str | Function],
        rewards: Any = (),
        functions: Sequence[Callable[..., Any]] = (),
        use: Mapping[str, Any] | ToolUseConfig | None = None,
        max_turns: int = DEFAULT_MAX_TURNS,
    ) -> None:
        self._use = use if isinstance(use, ToolUseConfig) else validate(ToolUseConfig, dict(use or {}), at="tool_use")
        self._max_turns = max_turns
        self._reported: set[tuple[str, str]] = set()
        self._closing: list[VerifierPool | RewardEnv] = []
        try:
            self._final = self._kept(RewardEnv(rewards, functions))
            self._per_turn = self._kept(RewardEnv(self._use.turn_reward)) if self._use.turn_reward else None
            loaded = load_tools([_config_of(tool) for tool in tools])
            self.schemas = [tool.schema for tool in loaded]
            """Descriptions of the tools for the model; see `lucidrl.data.tools.with_tools`."""
            self._pools = {
                tool.name: self._kept(
                    VerifierPool(
                        tool.name,
                        partial(ToolRunner, tool.make, self._use.max_result_chars),
                        limits=tool.config.limits,
                        num_workers=tool.config.num_workers,
                        role="tool",
                    )
                )
                for tool in loaded
            }
        except BaseException:
            self.close()
            raise

    def prompts(self) -> list[Prompt]:
        """Raise ConfigError: tools have no prompts, so a run with `tools` needs data."""
        return self._final.prompts()

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if a reward cannot score completions of the prompt."""
        columns: dict[str, Any] = {CALLS_COLUMN: [], TURN_REWARD_COLUMN: 0.0}
        for env in (self._final, self._per_turn):
            if env is not None:
                env.check_prompt(replace(prompt, info={**prompt.info, **columns}))

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply | SampleFailure]:
        calls = [calls_of(request.completion) for request in batch]
        is_final = [not found or request.turn >= self._max_turns for found, request in zip(calls, batch, strict=True)]
        by_kind: dict[bool, list[tuple[EnvRequest, _Calls]]] = {True: [], False: []}
        for request, found, final in zip(batch, calls, is_final, strict=True):
            by_kind[final].append((request, found))
        replies = await asyncio.gather(self._score(by_kind[True]), self._call_tools(by_kind[False]))
        scored, continued = map(iter, replies)
        return [next(scored if final else continued) for final in is_final]

    def close(self) -> None:
        """Shut down the processes of tools and rewards; may be called twice."""
        for part in self._closing:
            part.shutdown() if isinstance(part, VerifierPool) else part.close()

    def _kept(self, part: P) -> P:
        """Register a part that `close` shuts down."""
        self._closing.append(part)
        return part

    async def _score(self, finished: Sequence[tuple[EnvRequest, _Calls]]) -> list[EnvReply | SampleFailure]:
        """Score final completions."""
        if not finished:
            return []
        replies = await self._final.step([_with_columns(request, _calls_before(request)) for request, _ in finished])
        return [
            reply
            if isinstance(reply, SampleFailure)
            else replace(reply, metrics={**reply.metrics, **self._metrics(request.info, has_calls=bool(calls))})
            for reply, (request, calls) in zip(replies, finished, strict=True)
        ]

    async def _call_tools(self, calling: Sequence[tuple[EnvRequest, _Calls]]) -> list[EnvReply | SampleFailure]:
        """Execute the calls of completions that are not final."""
        if not calling:
            return []
        executed = await asyncio.gather(*(self._execute_all(calls) for _, calls in calling))
        rewards: Sequence[EnvReply | SampleFailure] = [EnvReply(0.0)] * len(calling)
        if self._per_turn is not None:
            of_turn = [
                _with_columns(request, [dict(vars(call)) for call in found])
                for (request, _), found in zip(calling, executed, strict=True)
            ]
            rewards = await self._per_turn.step(of_turn)
        return [
            reward if isinstance(reward, SampleFailure) else self._continued(request, found, reward)
            for (request, _), found, reward in zip(calling, executed, rewards, strict=True)
        ]

    async def _execute_all(self, calls: _Calls) -> list[_Executed]:
        return await asyncio.gather(*(self._execute(call, number) for number, call in enumerate(calls, start=1)))

    async def _execute(self, call: ToolCall | BadCall, number: int) -> _Executed:
        if isinstance(call, BadCall):
            return _failed("", {}, call.problem, BAD_CALL)
        pool = self._pools.get(call.name)
        if pool is None:
            known = f"there is no tool {call.name[:_LONGEST_NAME]!r}; the tools are {', '.join(self._pools)}"
            return _failed(call.name[:_LONGEST_NAME], call.arguments, known, BAD_CALL)
        if number > self._use.max_calls_per_turn:
            rule = f"call {number} was not executed, because a turn may have {self._use.max_calls_per_turn} calls"
            return _failed(call.name, call.arguments, rule, BAD_CALL)
        item = Completion(json.dumps(call.arguments), num_tokens=0)
        found = await asyncio.wrap_future(pool.submit(item, {}))
        if found.outcome == "parse_failure":
            return _failed(call.name, call.arguments, f"{call.name} got wrong arguments: {found.detail}", BAD_CALL)
        if found.outcome == "timeout":
            return _failed(call.name, call.arguments, f"{call.name} {found.detail}", TIMEOUT)
        if found.outcome == "crash":
            failure = TIMEOUT if found.detail.startswith(f"{TimeoutError.__name__}:") else TOOL_ERROR
            return _failed(call.name, call.arguments, f"{call.name} failed: {found.detail}", failure)
        return _Executed(call.name, call.arguments, found.text)

    def _continued(self, request: EnvRequest, executed: Sequence[_Executed], reward: EnvReply) -> EnvReply:
        """The reply to a completion whose calls were executed."""
        info = {
            **request.info,
            CALLS_COLUMN: [*_calls_before(request), *(dict(vars(call)) for call in executed)],
            TURN_REWARD_COLUMN: request.info.get(TURN_REWARD_COLUMN, 0.0) + reward.reward,
        }
        metrics = self._metrics(info)
        if reward.is_dropped:
            return replace(reward, metrics=metrics)
        chosen = {self._handled(call, request) for call in executed if call.failure}
        if "drop" in chosen:
            return EnvReply(0.0, metrics=metrics, is_dropped=True)
        components = {f"turn/{name}": part for name, part in reward.components.items()}
        if "end" in chosen:
            return EnvReply(reward.reward, metrics=metrics, components=components)
        messages = tuple(
            ChatMessage(
                role="tool",
                name=call.tool if call.tool in self._pools else "unknown",
                tool_call_id=f"call{request.turn:02d}{number:03d}",  # some templates want nine characters
                content=call.result.encode(errors="replace").decode(),  # tokenizers refuse lone surrogates
            )
            for number, call in enumerate(executed, start=1)
        )
        return EnvReply(reward.reward, done=False, messages=messages, info=info, metrics=metrics, components=components)

    def _handled(self, call: _Executed, request: EnvRequest) -> OnFailedCall:
        """Return what the settings say about a failed call; the first error of each tool is logged.

        Raises:
            EnvironmentFailure: the setting is `fail`.
        """
        setting = "on_bad_call" if call.failure == BAD_CALL else "on_tool_error"
        chosen: OnFailedCall = getattr(self._use, setting)
        where = f"(sample {request.sample_id}, turn {request.turn})"
        problem = call.result.removeprefix(_ERROR)
        if chosen == "fail":
            raise EnvironmentFailure(f"{problem} {where}; fix the reason, or set tool_use.{setting}=message")
        if call.failure != BAD_CALL and (call.tool, call.failure) not in self._reported:
            self._reported.add((call.tool, call.failure))
            text = "tool %s %s; later failures of this kind are not logged, only counted by the metric tools/%ss"
            _log.warning(text, problem, where, call.failure)
        return chosen

    def _metrics(self, info: Mapping[str, Any], has_calls: bool | None = None) -> dict[str, float]:
        calls = info.get(CALLS_COLUMN, [])
        counts = Counter(call["failure"] for call in calls)
        metrics = {"tools/calls": float(len(calls))}
        metrics |= {f"tools/{failure}s": float(counts[failure]) for failure in FAILURES}
        if has_calls is not None:
            metrics["tools/no_turn_left"] = float(has_calls)
        if self._per_turn is not None:
            metrics["tools/turn_reward"] = info.get(TURN_REWARD_COLUMN, 0.0)
        return metrics


def _config_of(tool: Mapping[str, Any] | ToolConfig | str | Function) -> ToolConfig | Function:
    if isinstance(tool, str):
        return ToolConfig(name=tool)
    return validate(ToolConfig, dict(tool), at="tools") if isinstance(tool, Mapping) else tool


def _failed(tool: str, arguments: dict[str, Any], problem: str, failure: str) -> _Executed:
    return _Executed(tool, arguments, f"{_ERROR}{problem}", failure)


def _calls_before(request: EnvRequest) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = request.info.get(CALLS_COLUMN, [])
    return calls


def _with_columns(request: EnvRequest, calls: list[dict[str, Any]]) -> EnvRequest:
    """The request with the columns that reward functions may use in addition."""
    added = {CALLS_COLUMN: calls, TURN_REWARD_COLUMN: request.info.get(TURN_REWARD_COLUMN, 0.0)}
    return replace(request, info={**request.info, **added})
