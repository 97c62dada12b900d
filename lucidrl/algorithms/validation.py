"""Validation of a policy on held-out prompts, held-out examples or episodes.

Shapes: B envs, one per episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from lucidrl.algorithms.config import ValidationConfig
from lucidrl.algorithms.estimates import estimates_of, interval_metrics, values_by_prompt
from lucidrl.collectors.rollouts import Rollouts, Sample
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Example, Prompt
from lucidrl.data.interfaces import LLMMessageLogType
from lucidrl.data.messages import collate
from lucidrl.data.stream import Dataset
from lucidrl.envs.base import EnvBase
from lucidrl.envs.policies import as_policy
from lucidrl.losses.interfaces import LossFunction
from lucidrl.models.policy.policy import Policy
from lucidrl.rewards.verifiers.answers import AnswerReader


@dataclass(frozen=True)
class Validation:
    """The result of one validation."""

    metrics: dict[str, float]
    rollouts: Rollouts | None = None
    """Samples to write and to show."""


class Validator(Protocol):
    """Validates a policy with the same prompts, examples or episodes every time."""

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        """Validate the policy of a step.

        Args:
            is_stopped: once it returns True, return soon; the caller then ignores the result.
        """
        ...


@dataclass(frozen=True)
class PromptValidator:
    """Completes held-out prompts and scores the completions in the environment."""

    collector: TextCollector
    dataset: Dataset[Prompt]
    config: ValidationConfig
    read_answer: AnswerReader | None = None
    """Reads the answer of a completion if the environment returns none; maj@k counts equal answers."""

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        config = self.config
        rollouts = self.collector.evaluate(
            self.dataset.held_out(config.num_prompts),
            batch_size=config.prompts_per_batch,
            is_stopped=is_stopped,
            samples_per_prompt=config.samples_per_prompt,
            greedy=config.samples_per_prompt == 1,
        )
        if config.samples_per_prompt == 1 or is_stopped():
            return Validation(rollouts.metrics, rollouts)
        read_answers(rollouts.samples, self.read_answer)
        count, samples = config.samples_per_prompt, rollouts.samples
        groups = [samples[start : start + count] for start in range(0, len(samples), count)]
        estimates = estimates_of(values_by_prompt(groups, count, config.solved_at))
        return Validation({**rollouts.metrics, **interval_metrics(estimates)}, rollouts)


def read_answers(samples: Sequence[Sample], read_answer: AnswerReader | None) -> None:
    """Set the answers of samples for which the environment returned none."""
    for sample in samples:
        if sample.answer is None and read_answer is not None:
            sample.answer = read_answer(sample.completion, sample.prompt.info)


@dataclass(frozen=True)
class ExampleValidator:
    """Measures the loss on held-out examples and, if `prompts` is set, the reward of completions."""

    policy: Policy
    loss_fn: LossFunction
    dataset: Dataset[Example]
    num_examples: int
    tokenize: Callable[[Example], LLMMessageLogType]
    pad_id: int
    prompts: PromptValidator | None = None

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        metrics: Mapping[str, float] = {}
        if self.prompts is not None:
            self.prompts.collector.update_policy_weights_(version=step)
            metrics = self.prompts.validate(step, is_stopped).metrics
        if is_stopped():
            return Validation({})
        logs = [self.tokenize(example) for example in self.dataset.held_out(self.num_examples)]
        batch = collate(logs, self.pad_id, supervised=True)
        loss = self.policy.train(batch, self.loss_fn, eval_mode=True).loss
        return Validation({**metrics, "loss": loss})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the environment, the only state of the collector that validation changes."""
        return self.prompts.collector.runner.state_dict() if self.prompts is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.prompts is not None:
            self.prompts.dataset.load_state_dict(state)  # the dataset's version decides which prompts are held out
            self.prompts.collector.runner.load_state_dict(state)


@dataclass(frozen=True)
class EpisodeValidator:
    """Runs whole episodes of a control task with greedy actions."""

    env: EnvBase
    """Env of batch size [B], used by this validator only."""
    policy: nn.Module
    """Maps observations to greedy actions."""
    device: torch.device
    """Device of the policy."""
    seed: int
    """Seed of the first env; the others use the following seeds."""
    max_episode_frames: int
    """Frames after which an unfinished episode is stopped."""

    def validate(self, step: int, is_stopped: Callable[[], bool]) -> Validation:
        """Return `reward`, the mean sum of rewards per episode, and `length`, the mean frames per episode."""
        env, act = self.env, as_policy(self.policy, self.env, self.device)
        root, next_, actions = env.new_frame(), env.new_frame(), env.new_actions()
        observation = {key: torch.from_numpy(array) for key, array in root.observation.items()}
        is_running_B = np.ones(env.batch_size, bool)
        rewards_B, lengths_B = np.zeros(env.batch_size), np.zeros(env.batch_size)
        env.set_seed(self.seed)
        env.reset_into(root)
        for _ in range(self.max_episode_frames):
            for key, action in act(observation).items():
                actions[key][...] = action.cpu().numpy()
            env.step_and_reset_into(actions, next_, root)
            rewards_B += next_.reward[..., 0] * is_running_B
            lengths_B += is_running_B
            is_running_B &= ~next_.done[..., 0]
            if not is_running_B.any() or is_stopped():
                break
        return Validation({"reward": float(rewards_B.mean()), "length": float(lengths_B.mean())})
