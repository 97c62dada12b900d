"""The results of a text collector: finished samples, their rewards, and the batch that a policy trains on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.data.token_texts import TokenTexts
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.envs.text.interfaces import RewardComponent
from lucidrl.losses.interfaces import STALENESS

MOST_SAMPLES_WITH_TOKENS, MOST_TOKENS = 64, 65_536
"""Samples whose tokens are written to samples/: the first ones, while both limits hold."""
_DECIMALS = 6


@dataclass
class Sample:
    """A prompt with its completions and reward; grows turn by turn."""

    prompt: Prompt
    index: int
    """Index among the samples of this prompt in this step."""
    log: LLMMessageLogType
    info: dict[str, Any]
    earlier_logs: list[LLMMessageLogType] = field(default_factory=list)
    """Logs that end where the chat template rewrote the history, such as by removing reasoning; each is a training
    row. `log` then continues with the rewritten history, whose tokens are not trained again."""
    reward: float = 0.0
    turns: int = 0
    is_done: bool = False
    is_truncated: bool = False
    """A completion was cut at the token limit."""
    is_dropped: bool = False
    """The environment could not score this sample; loss and reward statistics ignore it."""
    components: dict[str, RewardComponent] = field(default_factory=dict)
    """Rewards of which `reward` is the weighted sum, if the environment names them; scores are summed over turns."""
    metrics: dict[str, float] | None = None
    """Metrics of the environment's last step result."""
    answer: str | None = None
    """Answer of the environment's last step result, if it has one."""

    def add_reward(self, reward: float, components: Mapping[str, RewardComponent]) -> None:
        """Add the reward of a turn."""
        self.reward += reward
        for name, (score, weight) in components.items():
            before = self.components.get(name, RewardComponent(0.0))
            self.components[name] = RewardComponent(before.score + score, weight)

    @property
    def name(self) -> str:
        return f"{self.prompt.prompt_id}#{self.index}"

    @property
    def num_tokens(self) -> int:
        return sum(len(message["token_ids"]) for message in self.log)

    @property
    def num_sampled_tokens(self) -> int:
        messages = [message for log in (*self.earlier_logs, self.log) for message in log]
        return sum(len(message["token_ids"]) for message in messages if message["role"] == "assistant")

    @property
    def version_range(self) -> tuple[int, ...]:
        """Policy versions of the oldest and the newest token; () without sampled tokens."""
        messages = [message for log in (*self.earlier_logs, self.log) for message in log]
        found = [message["policy_versions"] for message in messages if "policy_versions" in message]
        versions = torch.cat(found) if found else torch.zeros(0)
        return (int(versions.min()), int(versions.max())) if len(versions) else ()

    @property
    def completion(self) -> str:
        """Text of the last completion."""
        return next((message["content"] for message in reversed(self.log) if message["role"] == "assistant"), "")

    @property
    def vote(self) -> str:
        """What the sample votes for in a majority: its answer, or its completion in lower case with single spaces."""
        return " ".join(self.completion.casefold().split()) if self.answer is None else self.answer


@dataclass(frozen=True)
class ComponentScores:
    """One of several rewards, for all samples of a step."""

    scores: torch.Tensor
    """[B] float32, not multiplied by the weight; NaN for samples without this reward."""
    weight: float


@dataclass(frozen=True)
class Rollouts:
    """The samples of one step, ordered by group."""

    samples: list[Sample]
    group_ids: torch.Tensor
    """[B] int64, equal for the samples of a group."""
    policy_version: int
    """Version of the generator's weights. In synchronous training they sampled all completions; else some tokens have
    earlier versions."""
    metrics: dict[str, float]
    token_texts: TokenTexts | None = None
    """Decodes single tokens; None leaves tokens out of `to_samples`."""

    @cached_property
    def rewards(self) -> torch.Tensor:
        """[B] float32; 0 where dropped."""
        return torch.tensor([sample.reward for sample in self.samples], dtype=torch.float32)

    @cached_property
    def components(self) -> dict[str, ComponentScores]:
        """The rewards that make up `rewards`, by name; empty if the environment does not name them."""
        names = dict.fromkeys(name for sample in self.samples for name in sample.components)
        found = {name: [sample.components.get(name) for sample in self.samples] for name in names}
        return {
            name: ComponentScores(
                torch.tensor([math.nan if part is None else part.score for part in parts], dtype=torch.float32),
                next(part.weight for part in parts if part is not None),
            )
            for name, parts in found.items()
        }

    @cached_property
    def is_valid(self) -> torch.Tensor:
        """[B] bool, False where the environment dropped the sample."""
        return torch.tensor([not sample.is_dropped for sample in self.samples])

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """[B] bool, True where a completion was cut at the token limit."""
        return torch.tensor([sample.is_truncated for sample in self.samples])

    @cached_property
    def row_samples(self) -> torch.Tensor:
        """[R] int64, the index of the sample of each training row.

        A sample has one row, or several if the chat template rewrote its history.
        """
        counts = torch.tensor([1 + len(sample.earlier_logs) for sample in self.samples])
        return torch.arange(len(self.samples)).repeat_interleave(counts)

    @property
    def last_rows(self) -> torch.Tensor:
        """[B] int64, the training row of each sample's `log`."""
        return self.row_samples.bincount().cumsum(0) - 1

    def to_batch(self, pad_id: int, row_multiple: int = 1) -> BatchedDataDict[Any]:
        """Return a right-padded training batch; `idx` names each row, and dropped samples have `sample_mask` 0.

        Args:
            row_multiple: repeat the last row, with `sample_mask` 0, until the number of rows is a multiple of this.
        """
        logs = [log for sample in self.samples for log in (*sample.earlier_logs, sample.log)]
        multipliers = self.is_valid[self.row_samples].tolist()
        names = [self.samples[row].name for row in self.row_samples.tolist()]
        missing = -len(logs) % row_multiple
        batch = collate(logs + logs[-1:] * missing, pad_id, loss_multipliers=multipliers + [0.0] * missing)
        batch["idx"] = names + names[-1:] * missing
        if any(version != self.policy_version for sample in self.samples for version in sample.version_range):
            batch[STALENESS] = self._staleness_of(logs + logs[-1:] * missing)
        return batch

    def _staleness_of(self, logs: Sequence[LLMMessageLogType]) -> torch.Tensor:
        """[R, T] int64: how many versions each sampled token is behind `policy_version`; 0 on other tokens."""
        rows = []
        for log in logs:
            now = [torch.full_like(message["token_ids"], self.policy_version) for message in log]
            versions = [message.get("policy_versions", no) for message, no in zip(log, now, strict=True)]
            rows.append(self.policy_version - torch.cat(versions))
        return pad_sequence(rows, batch_first=True)

    @cached_property
    def num_with_tokens(self) -> int:
        """How many samples, from the first, `to_samples` returns with their tokens."""
        if self.token_texts is None:
            return 0
        ends = accumulate(sample.num_sampled_tokens for sample in self.samples[:MOST_SAMPLES_WITH_TOKENS])
        return sum(end <= MOST_TOKENS for end in ends)

    def to_samples(self, training_logprobs: Sequence[torch.Tensor | None] = ()) -> dict[str, list[Any]]:
        """Return human-readable columns for the files in samples/.

        The completions of the first `num_with_tokens` samples have `tokens` and `generation_logprobs`, except those in
        a history that the chat template rewrote.

        Args:
            training_logprobs: of each of these samples, the log-probabilities in training of all tokens in its `log`;
                its completions then have `training_logprobs`. None for a sample without.
        """
        trained = [*training_logprobs, *[None] * (len(self.samples) - len(training_logprobs))]
        return {
            "sample": [sample.name for sample in self.samples],
            "group": self.group_ids.tolist(),
            "messages": [
                self._messages(sample, trained[row], with_tokens=row < self.num_with_tokens)
                for row, sample in enumerate(self.samples)
            ],
            "reward": self.rewards.tolist(),
            "policy_version": [max(one.version_range, default=self.policy_version) for one in self.samples],
            "oldest_policy_version": [min(one.version_range, default=self.policy_version) for one in self.samples],
            "truncated": self.is_truncated.tolist(),
            "dropped": (~self.is_valid).tolist(),
        }

    def _messages(self, sample: Sample, training: torch.Tensor | None, *, with_tokens: bool) -> list[dict[str, Any]]:
        messages, start = [], 0
        for message in sample.log:
            end = start + len(message["token_ids"])
            written: dict[str, Any] = {"role": message["role"], "content": message["content"]}
            if with_tokens and self.token_texts is not None and "generation_logprobs" in message:
                written["tokens"] = self.token_texts(message["token_ids"].tolist())
                written["generation_logprobs"] = _rounded(message["generation_logprobs"])
                if training is not None:
                    written["training_logprobs"] = _rounded(training[start:end])
            messages.append(written)
            start = end
        return messages


def _rounded(logprobs: torch.Tensor) -> list[float]:
    return [round(value, _DECIMALS) for value in logprobs.tolist()]


class FinishedSample(Protocol):
    """What metrics need to know of a sample."""

    @property
    def reward(self) -> float: ...
    @property
    def turns(self) -> int: ...
    @property
    def num_sampled_tokens(self) -> int: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def is_dropped(self) -> bool: ...
    @property
    def metrics(self) -> Mapping[str, float] | None: ...
    @property
    def vote(self) -> str: ...


def sample_metrics(samples: Sequence[FinishedSample]) -> dict[str, float]:
    """Return the metrics of samples: means of the environment's metrics, of reward, turns and lengths, and counts."""
    scored = [sample for sample in samples if not sample.is_dropped]
    return {
        **_environment_metrics(samples),
        "reward": mean(sample.reward for sample in scored),
        "turns": mean(sample.turns for sample in scored),
        "answer_tokens": mean(sample.num_sampled_tokens for sample in scored),
        "truncated_fraction": mean(sample.is_truncated for sample in scored),
        "dropped_samples": float(len(samples) - len(scored)),
        "sampled_tokens": float(sum(sample.num_sampled_tokens for sample in samples)),
    }


def _environment_metrics(samples: Sequence[FinishedSample]) -> dict[str, float]:
    """Return the mean of each metric over the samples that have this metric."""
    found = [sample.metrics or {} for sample in samples]
    names = sorted({name for metrics in found for name in metrics})
    return {name: mean(metrics[name] for metrics in found if name in metrics) for name in names}


def mean(values: Iterable[Any]) -> float:
    """Return the mean; NaN without values."""
    numbers = [float(value) for value in values]
    try:
        return fmean(numbers) if numbers else math.nan
    except (OverflowError, ValueError):  # numbers near the limits of a float, or infinities of both signs
        return sum(numbers) / len(numbers)
