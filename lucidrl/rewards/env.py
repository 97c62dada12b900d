"""RewardEnv: the environment of a run with `reward`. It scores completions with reward functions and verifiers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest, RewardComponent, SampleFailure
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.rewards.config import RewardConfig, rewards_of, unique_names
from lucidrl.rewards.functions import RewardFunction, import_reward, num_tokens
from lucidrl.rewards.interfaces import LLM_JUDGE, Completion, Verifier
from lucidrl.rewards.judge.scorer import JudgeScorer
from lucidrl.rewards.model_scorer import ModelScorer
from lucidrl.rewards.outcome import Verified, verified
from lucidrl.rewards.pool import VerifierPool
from lucidrl.rewards.verifiers import verifier_entry

_log = logging.getLogger(__name__)

_FAILED = ("timeout", "crash", "parse_failure")


class _VerifierScorer(Protocol):
    """A verifier that runs in this process or in a pool."""

    async def score(self, batch: Sequence[EnvRequest]) -> Sequence[Verified]: ...

    def verify(self, completion: Completion, row: Mapping[str, Any]) -> Verified:
        """Verify one completion and wait for the outcome."""


_Scorer = RewardFunction | _VerifierScorer | JudgeScorer | ModelScorer


@dataclass(frozen=True)
class _Part:
    """A term of the reward: a function or verifier with its config."""

    name: str
    """Name in metrics."""
    config: RewardConfig
    scorer: _Scorer


class RewardEnv:
    """Environment with one turn; the reward is the weighted sum of the scores of all functions and verifiers.

    A function that returns None for a sample does not apply to it and is left out of the sum.

    Args:
        rewards: a value of the setting `reward`.
        functions: additional reward functions, as Python objects, with weight 1.

    Raises:
        ConfigError: if a function or verifier does not exist or does not accept its `kwargs`.
    """

    def __init__(self, rewards: Any = (), functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._pools: list[VerifierPool | JudgeScorer | ModelScorer] = []
        parts: list[tuple[str, RewardConfig, _Scorer]] = []
        try:
            for config in rewards_of(rewards):
                name, scorer = self._scorer_of(config)
                parts.append((name, config, scorer))
            for function in functions:
                made = RewardFunction(function)
                parts.append((made.name, RewardConfig(name=made.name), made))
        except BaseException:
            self.close()
            raise
        if not parts:
            raise ConfigError("there is no reward; set reward=..., such as reward=my_rewards:exact")
        names = unique_names([name for name, _, _ in parts])
        self._parts = [_Part(name, config, scorer) for name, (_, config, scorer) in zip(names, parts, strict=True)]
        for part in self._parts:
            if isinstance(part.scorer, RewardFunction):
                part.scorer.name = part.name
        self._reported: set[str] = set()

    def prompts(self) -> list[Prompt]:
        """Raise ConfigError: rewards have no prompts, so a run with `reward` needs data."""
        names = ", ".join(part.name for part in self._parts)
        problem = f"reward={names} scores completions of your prompts, but the run has no prompts"
        raise ConfigError(f"{problem}; set data.file")

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ConfigError if a function needs a column that is missing, or a verifier cannot use the columns."""
        for part in self._parts:
            if isinstance(part.scorer, RewardFunction):
                part.scorer.check(prompt.info)
            elif isinstance(part.scorer, JudgeScorer | ModelScorer):
                part.scorer.check(prompt)
            elif (found := part.scorer.verify(Completion("", 0), prompt.info)).is_bad_row:
                problem = f"verifier {part.name} cannot use the row of prompt {prompt.prompt_id!r}"
                raise ConfigError(f"{problem}: {found.detail}")

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply | SampleFailure]:
        # Verifiers first: those in pools continue in their processes while functions run here.
        in_order = sorted(self._parts, key=lambda part: isinstance(part.scorer, RewardFunction))
        scores = dict(
            zip(
                [part.name for part in in_order],
                await asyncio.gather(*(part.scorer.score(batch) for part in in_order)),
                strict=True,
            )
        )
        return [
            self._combined(request, {name: of_part[row] for name, of_part in scores.items()})
            for row, request in enumerate(batch)
        ]

    def close(self) -> None:
        """Shut down processes of verifiers and reward models, and requests to LLM judges; may be called twice."""
        for pool in self._pools:
            pool.shutdown()

    def _scorer_of(self, config: RewardConfig) -> tuple[str, _Scorer]:
        if config.is_function:
            function = import_reward(config.name, config.kwargs)
            return function.name, function
        if config.name == LLM_JUDGE:
            llm_judge = JudgeScorer(config)
            self._pools.append(llm_judge)
            return config.name, llm_judge
        if config.model_folder is not None:
            model = ModelScorer(config)
            self._pools.append(model)
            return "model", model
        entry = verifier_entry(config.name)
        make = partial(entry.make, config.kwargs, config.limits)
        if not entry.runs_in_pool:
            return config.name, _InlineVerifier(make())
        pool = VerifierPool(config.name, make, limits=config.limits, num_workers=config.num_workers)
        self._pools.append(pool)
        return config.name, _PooledVerifier(pool)

    def _combined(
        self, request: EnvRequest, scores: Mapping[str, float | SampleFailure | Verified | None]
    ) -> EnvReply | SampleFailure:
        total, num_applied, is_dropped = 0.0, 0, False
        metrics: dict[str, float] = {}
        components: dict[str, RewardComponent] = {}
        for part in self._parts:
            key, score = f"reward/{part.name}", scores[part.name]
            if isinstance(score, SampleFailure):
                return score
            if isinstance(score, Verified):
                metrics |= {f"{key}/{outcome}": float(score.outcome == outcome) for outcome in _FAILED}
                metrics |= {f"{key}/{name}": value for name, value in score.metrics.items()}
                value = self._value_of(part, score, request)
                is_dropped |= value is None
            else:
                metrics[f"{key}/not_applicable"] = float(score is None)
                value = score
            if value is not None:
                total += part.config.weight * value
                num_applied += 1
                metrics[key] = value
                components[part.name] = RewardComponent(value, part.config.weight)
        if is_dropped:
            metrics = {key: value for key, value in metrics.items() if key.count("/") > 1}
            return EnvReply(0.0, metrics=metrics, is_dropped=True)
        if not num_applied:
            names = ", ".join(part.name for part in self._parts)
            return SampleFailure(
                f"no reward applies to the sample, because {names} returned None; return a number from one of them"
            )
        return EnvReply(total, metrics=metrics, components=components)

    def _value_of(self, part: _Part, verified: Verified, request: EnvRequest) -> float | None:
        """The score of a verification, or the value of its `on_*` setting; None to drop the sample."""
        if verified.outcome == "scored":
            return verified.score
        setting: float | str = getattr(part.config, f"on_{verified.outcome}")
        words = f"{verified.outcome.replace('_', ' ')} of verifier {part.name} ({verified.detail})"
        if setting == "fail":
            remedy = f"fix the reason, or set on_{verified.outcome} of this reward to a number or to drop"
            raise EnvironmentFailure(f"{words} for sample {request.sample_id}; {remedy}")
        if verified.outcome == "crash" and part.name not in self._reported:
            self._reported.add(part.name)
            text = "%s for sample %s; later crashes are not logged, only counted by the metric reward/%s/crash"
            _log.warning(text, words, request.sample_id, part.name)
        return None if isinstance(setting, str) else setting


class _PooledVerifier:
    """A verifier that runs in a pool of processes that can be killed."""

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool

    async def score(self, batch: Sequence[EnvRequest]) -> list[Verified]:
        return await self._pool.verify([(completion_of(request), request.info) for request in batch])

    def verify(self, completion: Completion, row: Mapping[str, Any]) -> Verified:
        return self._pool.submit(completion, row).result()


class _InlineVerifier:
    """A cheap built-in verifier, called in this process."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def score(self, batch: Sequence[EnvRequest]) -> list[Verified]:
        return [self.verify(completion_of(request), request.info) for request in batch]

    def verify(self, completion: Completion, row: Mapping[str, Any]) -> Verified:
        return verified(self._verifier, completion, row)


def completion_of(request: EnvRequest) -> Completion:
    return Completion(request.completion, num_tokens(request))
