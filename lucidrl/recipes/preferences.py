"""Runs on preferences: DPO and its relatives, and reward models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from lucidrl.algorithms.examples import ExampleTraining
from lucidrl.algorithms.preferences import (
    PreferenceBatches,
    PreferenceRows,
    PreferenceValidator,
    Reference,
    SwappedReference,
    completion_sums,
)
from lucidrl.algorithms.reference_cache import FILE_NAME, CachedReference
from lucidrl.algorithms.reward_model import RewardModelValidator, scored_pairs
from lucidrl.data.datasets import Preference
from lucidrl.data.stream import Dataset
from lucidrl.losses.preference import BradleyTerryLoss, PreferenceLoss
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.language import ExampleRun
from lucidrl.recipes.preference_configs import DPORunConfig, PreferenceRunConfig, RewardModelRunConfig
from lucidrl.recipes.training_run import RunParts

P = TypeVar("P", bound=PreferenceRunConfig)


class PreferenceRun(ExampleRun[P]):
    """A run on preferences."""

    @property
    def _rows(self) -> PreferenceRows:
        pad_id: int = self._inputs.tokenizer.pad_token_id
        return PreferenceRows(self._inputs.tokenize_preference, pad_id)

    @property
    def _is_validated(self) -> bool:
        return self.config.validation.num_prompts > 0 and self._inputs.preferences.holds_out


class DPORun(PreferenceRun[DPORunConfig]):
    """`lucidrl dpo`"""

    def _build(self, parts: RunParts) -> ExampleTraining[Preference]:
        config, preferences = self.config, self._inputs.preferences
        policy = self._policy(parts, init_reference=config.dpo.reference == "swap")
        batches = PreferenceBatches(config.dpo, policy, self._rows, SwappedReference(policy))
        if config.dpo.reference == "cached":
            batches = replace(batches, reference=self._cached_reference(parts, policy, batches))
        validator = None
        if self._is_validated:
            validator = PreferenceValidator(policy, preferences, config.validation.num_prompts, batches)
        loop = self._loop(parts, policy, validator)
        loss_fn = PreferenceLoss(config.dpo)
        return ExampleTraining(loop, policy, preferences, config.dpo.examples_per_step, batches.of, loss_fn)

    def _cached_reference(self, parts: RunParts, policy: Policy, batches: PreferenceBatches) -> Reference:
        """Score the rows of the run with the initial weights, which the policy has until a checkpoint is restored."""
        settings = self.config.policy
        model = f"{settings.model_name}, {settings.precision}, temperature {settings.generation.temperature:g}"
        cache = CachedReference(parts.folder / FILE_NAME, model)
        rows = (batch for preferences in self._used() for batch in batches.scored_rows(preferences))
        num_added = cache.add(rows, lambda batch: completion_sums(policy.get_logprobs(batch), batch))
        if num_added:
            parts.watcher.announce(f"scored {num_added:,} rows with the reference policy, in {cache.path}")
        return cache

    def _used(self) -> Iterator[Sequence[Preference]]:
        """Yield the preferences of each batch of the run: those of the steps, and those of the validation."""
        config, dataset = self.config, self._inputs.preferences
        if self._is_validated:
            yield dataset.held_out(config.validation.num_prompts)
        yield from _batches_to_come(dataset, config.max_steps, config.dpo.examples_per_step)


class RewardModelRun(PreferenceRun[RewardModelRunConfig]):
    """`lucidrl reward-model`"""

    def next_commands(self, folder: Path) -> list[list[str]]:
        prompts = ["data.file=PROMPTS", f"reward=model:{folder}"]
        return [["lucidrl", "grpo", f"policy.model_name={self.config.policy.model_name}", *prompts]]

    def _build(self, parts: RunParts) -> ExampleTraining[Preference]:
        config, preferences, rows = self.config, self._inputs.preferences, self._rows
        policy = self._policy(parts, role="reward")
        validator = None
        if self._is_validated:
            num_examples = config.validation.num_prompts
            validator = RewardModelValidator(policy, preferences, num_examples, rows, parts.logger)
        loop = self._loop(parts, policy, validator)
        batch_of = partial(scored_pairs, rows)
        number = config.reward_model.examples_per_step
        return ExampleTraining(loop, policy, preferences, number, batch_of, BradleyTerryLoss())


def _batches_to_come(
    dataset: Dataset[Preference], num_batches: int, num_examples: int
) -> Iterator[Sequence[Preference]]:
    """Yield the next batches of a dataset, whose position and counts are then as before."""
    state, skipped = dataset.state_dict(), dataset.skipped.copy()
    for _ in range(num_batches):
        yield dataset.take(num_examples)
    dataset.load_state_dict(state)
    dataset.skipped = skipped
