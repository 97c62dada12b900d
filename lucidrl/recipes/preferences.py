"""Runs on preferences: DPO and its relatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lucidrl.algorithms.preferences import (
    DPO,
    PreferenceBatches,
    PreferenceRows,
    PreferenceValidator,
    Reference,
    SwappedReference,
    completion_sums,
)
from lucidrl.algorithms.reference_cache import FILE_NAME, CachedReference
from lucidrl.data.datasets import Preference
from lucidrl.data.stream import Dataset
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.language import ExampleRun
from lucidrl.recipes.preference_configs import DPORunConfig
from lucidrl.recipes.training_run import RunParts


class DPORun(ExampleRun[DPORunConfig]):
    """`lucidrl dpo`"""

    def _build(self, parts: RunParts) -> DPO:
        config, preferences = self.config, self._inputs.preferences
        policy = self._policy(parts, init_reference=config.dpo.reference == "swap")
        rows = PreferenceRows(self._inputs.tokenize_preference, self._inputs.tokenizer.pad_token_id)
        batches = PreferenceBatches(config.dpo, policy, rows, SwappedReference(policy))
        if config.dpo.reference == "cached":
            batches = replace(batches, reference=self._cached_reference(parts, policy, batches))
        validator = None
        if config.validation.num_prompts and preferences.holds_out:
            validator = PreferenceValidator(policy, preferences, config.validation.num_prompts, batches)
        loop = self._loop(parts, policy, validator)
        return DPO(config=config.dpo, loop=loop, policy=policy, preferences=preferences, batches=batches)

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
        if config.validation.num_prompts and dataset.holds_out:
            yield dataset.held_out(config.validation.num_prompts)
        yield from _batches_to_come(dataset, config.max_steps, config.dpo.examples_per_step)


def _batches_to_come(
    dataset: Dataset[Preference], num_batches: int, num_examples: int
) -> Iterator[Sequence[Preference]]:
    """Yield the next batches of a dataset, whose position and counts are then as before."""
    state, skipped = dataset.state_dict(), dataset.skipped.copy()
    for _ in range(num_batches):
        yield dataset.take(num_examples)
    dataset.load_state_dict(state)
    dataset.skipped = skipped
