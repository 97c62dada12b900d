"""TextCollector: generates completions of prompts and scores them, turn by turn, until every sample is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.collectors.base import check_calls, method_of
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.in_flight import IN_FLIGHT, GroupsInFlight
from lucidrl.collectors.profile import RolloutProfiler
from lucidrl.collectors.rollouts import Rollouts, Sample, mean, sample_metrics
from lucidrl.collectors.turns import Turns
from lucidrl.data.datasets import Prompt
from lucidrl.data.items import Skip
from lucidrl.data.loading import dataset_of_prompts
from lucidrl.data.stream import Dataset
from lucidrl.data.token_texts import TokenTexts
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.errors import CheckpointError, EnvironmentFailure, RefitError
from lucidrl.models.generation.interfaces import (
    Completion,
    GenerationDatumSpec,
    GenerationInterface,
    GenerationOutputSpec,
)
from lucidrl.models.generation.sampling import draw_key
from lucidrl.profiling import gate
from lucidrl.profiling.hook import ProfileOptions, ProfileSettings
from lucidrl.profiling.ranges import profiled
from lucidrl.profiling.spans import span

EVALUATION = 0
"""Batch number of evaluations; training batches count from 1."""


class TextCollector:
    """Collects scored samples.

    Args:
        generator: completes prompts.
        runner: scores completions; the collector closes it at `shutdown`.
        prompts: a dataset, or a list of prompts, which is shuffled with `seed`.
        context_length: context length of the model; prompts must be shorter by at least one token.
        in_flight: makes the samples of training while the policy trains; None samples when `collect` is called.
    """

    num_workers = 1

    def __init__(
        self,
        generator: GenerationInterface,
        runner: EnvRunner,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Dataset[Prompt] | Sequence[Prompt],
        config: TextCollectorConfig,
        *,
        context_length: int,
        seed: int = 0,
        in_flight: GroupsInFlight | None = None,
    ):
        self._generator = generator
        self.runner = runner
        self.turns = Turns(tokenizer, context_length, config.max_turns)
        self._tokenizer = tokenizer
        self._token_texts = TokenTexts(tokenizer)
        self._prompts = prompts if isinstance(prompts, Dataset) else dataset_of_prompts(prompts, seed=seed)
        self._config = config
        self._seed = seed
        self._in_flight = in_flight
        self._batches = 0
        self._num_restarts: Counter[str] = Counter()  # restarts up to the last batch, by metric
        self._num_filtered = 0  # rows skipped by filters up to the last batch
        self._profiler = RolloutProfiler("text collector")

    def __iter__(self) -> Iterator[Rollouts]:
        while True:
            yield self.collect()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that all prompts fit the context.

        Raises:
            DataError: a prompt does not fit; the message names the prompt and its length.
        """
        for prompt in prompts:
            self.turns.prompt_ids(prompt)

    def collect(self) -> Rollouts:
        """Return the samples of the next step."""
        with self._profiler, span("rollout"):
            self._batches += 1
            groups, extra = self._sample() if self._in_flight is None else self._in_flight.take()
            self._generator.release_memory()
            extra |= {"groups_with_signal_fraction": mean(_has_signal(group) for group in groups)}
            return self._rollouts(
                groups, {**extra, **self._newly_replaced(), **self._newly_filtered(), **self._refit_rate()}
            )

    def _sample(self) -> tuple[list[list[Sample]], dict[str, float]]:
        """Sample and score the groups of a step now; return them with metrics."""
        wanted = self._config.prompts_per_step
        num_used: Counter[str] = Counter()
        kept: list[list[Sample]] = []
        silent: list[list[Sample]] = []
        for _ in range(1 + self._config.refill_rounds):
            prompts = self._prompts.take(wanted - len(kept))
            for group in self._run_groups(prompts, self._config.samples_per_prompt, num_used, self._batches):
                (kept if _has_signal(group) or not self._config.refill_rounds else silent).append(group)
            if len(kept) == wanted:
                break
        groups = (kept + silent)[:wanted]
        extra = {"groups_without_signal_replaced": float(len(kept) + len(silent) - wanted)}
        if all(sample.is_dropped for group in groups for sample in group):
            raise EnvironmentFailure(
                f"the environment scored none of the step's {wanted * self._config.samples_per_prompt} samples "
                f"(dropped so far: {dict(self.runner.counts)}); fix the environment, or raise env.timeout_s"
            )
        self._check_versions([sample for group in groups for sample in group])
        return groups, extra

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
        samples_per_prompt: int = 1,
        greedy: bool = True,
    ) -> Rollouts:
        """Generate greedy or sampled completions, without advancing the training prompts.

        Sampling depends on seed, prompt and sample only, so every call draws the same random numbers.

        Args:
            batch_size: prompts completed together; by default all.
            is_stopped: called before each batch; once it returns True, the remaining prompts are skipped.
        """
        groups: list[list[Sample]] = []
        num_used: Counter[str] = Counter()
        size = batch_size or max(1, len(prompts))
        for start in range(0, len(prompts), size):
            if is_stopped():
                break
            groups += self._run_groups(prompts[start : start + size], samples_per_prompt, num_used, EVALUATION, greedy)
        self._check_versions([sample for group in groups for sample in group])
        return self._rollouts(groups, extra={})

    @profiled("TextCollector.update_policy_weights_")
    def update_policy_weights_(self, version: int) -> None:
        self._generator.update_weights(version)
        if self._in_flight is not None:
            self._in_flight.set_version(version)

    def enable_profile(self, **options: Unpack[ProfileOptions]) -> None:
        """Record some of the next calls of `collect` with torch's profiler; see `ProfileSettings` for the options.

        The collector writes the trace after the last of these calls, or earlier: when a call fails, at
        `disable_profile` and at `shutdown`.

        Raises:
            ConfigError: the calls cannot be recorded; no recording has started.
        """
        self._profiler.enable(ProfileSettings(**options).checked(self.num_workers))

    def disable_profile(self) -> None:
        """Write the trace recorded so far and stop recording; may be called twice."""
        self._profiler.disable()

    def set_profiling_enabled(self, enabled: bool) -> None:
        """Turn the per-frame profiling ranges of this process on or off; see `lucidrl.profiling.gate`."""
        gate.set_profiling_enabled(enabled)

    def map_fn(self, name: str, list_of_args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the method `name` of every worker; here, the only worker is this collector."""
        check_calls(list_of_args, self.num_workers)
        return [method_of(self, name)(*list_of_args[0])]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts, the state of the environment and, in asynchronous training, the samples
        that no step has trained on; call this between two batches."""
        prompts = self._prompts.state_dict() if self._in_flight is None else self._in_flight.state_dict()
        return {**prompts, "batches": self._batches, **self.runner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._in_flight is not None:
            self._in_flight.load_state_dict(state)
        elif groups := state.get(IN_FLIGHT, {}).get("groups"):
            raise CheckpointError(
                f"the checkpoint has {len(groups)} groups of prompts that are not trained yet, and a synchronous run "
                "would skip these prompts; resume with the async.max_staleness of the saved run, or another one above 0"
            )
        else:
            self._prompts.load_state_dict(state)
        self._batches = state["batches"]
        self.runner.load_state_dict(state)

    def shutdown(self) -> None:
        """Write an open trace and close the runner; may be called twice."""
        self._profiler.disable()
        if self._in_flight is not None:
            self._in_flight.close()
        self.runner.close()

    def _run_groups(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        num_used: Counter[str],
        batch: int,
        greedy: bool = False,
    ) -> list[list[Sample]]:
        """Return finished samples, one list per prompt.

        Args:
            num_used: number of samples of each prompt so far in this step. If a prompt comes twice in a step, as at
                the end of an epoch, its second group continues the sample indices and so gets other completions.
            batch: number of the batch; seeds the random numbers of its samples.
        """
        groups: list[list[Sample]] = []
        for prompt in prompts:
            groups.append(self.turns.new_samples(prompt, num_used[prompt.prompt_id], samples_per_prompt))
            num_used[prompt.prompt_id] += samples_per_prompt
        samples = [sample for group in groups for sample in group]
        for turn in range(1, self._config.max_turns + 1):
            with span("generate"):
                output = self._generator.generate(self._generation_batch(samples, turn, batch), greedy=greedy)
                self._append_completions(samples, turn, output.to("cpu"))
            with span("environment"):
                self._score(samples, turn)
            samples = [sample for sample in samples if not sample.is_done]
            if not samples:
                break
        return groups

    def _generation_batch(self, samples: list[Sample], turn: int, batch: int) -> BatchedDataDict[GenerationDatumSpec]:
        """Return the messages so far as prompts of the generator."""
        prompts = [torch.cat([message["token_ids"] for message in sample.log]) for sample in samples]
        keys = [draw_key(self._seed, batch, s.prompt.prompt_id, s.index, turn) for s in samples]
        return BatchedDataDict(
            {
                "input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
                "input_lengths": torch.tensor([len(prompt) for prompt in prompts]),
                "draw_keys": torch.tensor(keys, dtype=torch.int64),
                "stop_strings": [list(sample.prompt.stop_strings) for sample in samples],
                "may_continue": torch.full((len(samples),), turn < self._config.max_turns),
                "continues": torch.full((len(samples),), turn > 1),
            }
        )

    def _append_completions(
        self, samples: list[Sample], turn: int, output: BatchedDataDict[GenerationOutputSpec]
    ) -> None:
        """Append the assistant message to each sample."""
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = (output["unpadded_sequence_lengths"] - output["generation_lengths"]).tolist()
        completions = [ids[start:end] for ids, start, end in zip(output["output_ids"], starts, ends, strict=True)]
        texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        for row, sample in enumerate(samples):
            logprobs = output["logprobs"][row, starts[row] : ends[row]]
            completion = Completion(
                request_id=sample.name,
                token_ids=completions[row],
                logprobs=logprobs,
                policy_versions=output["policy_versions"][row].repeat(len(logprobs)),
                truncated=bool(output["truncated"][row]),
            )
            self.turns.append_completion(sample, turn, completion, texts[row])

    def _score(self, samples: list[Sample], turn: int) -> None:
        """Score each completion; append the environment's messages to samples that are not done."""
        with span("reward"):
            results = self.runner.step([self.turns.request(sample, turn) for sample in samples])
        for sample, result in zip(samples, results, strict=True):
            self.turns.apply(sample, turn, result)

    def _newly_replaced(self) -> dict[str, float]:
        """Return the restarts of generators and environment workers since the last training batch, as metrics."""
        before = self._num_restarts
        self._num_restarts = Counter(
            replaced_generators=self._generator.num_restarts, replaced_env_workers=self.runner.num_restarts
        )
        return {name: float(number - before[name]) for name, number in self._num_restarts.items()}

    def _newly_filtered(self) -> dict[str, float]:
        """Return the number of rows that filters skipped since the last training batch, as a metric."""
        if not self._prompts.is_filtered:
            return {}
        before = self._num_filtered
        self._num_filtered = self._prompts.skipped[Skip.WHERE] + self._prompts.skipped[Skip.LENGTH]
        return {"filtered_rows": float(self._num_filtered - before)}

    def _refit_rate(self) -> dict[str, float]:
        """Return the rate of the refit that brought the weights of this batch, as a metric."""
        rate = self._generator.refit_gb_per_s
        return {} if rate is None else {"refit_gb_per_s": rate}

    def _rollouts(self, groups: list[list[Sample]], extra: dict[str, float]) -> Rollouts:
        samples = [sample for group in groups for sample in group]
        metrics = {**sample_metrics(samples), **extra}
        if self._config.max_turns > 1:
            metrics["forked_rows"] = float(sum(len(sample.earlier_logs) for sample in samples))
        group_ids = torch.tensor([number for number, group in enumerate(groups) for _ in group], dtype=torch.int64)
        return Rollouts(samples, group_ids, self._generator.policy_version, metrics, self._token_texts)

    def _check_versions(self, samples: Sequence[Sample]) -> None:
        """Raise RefitError if a token has another policy version than the generator."""
        expected = self._generator.policy_version
        versions = {version for sample in samples for version in sample.version_range}
        if others := sorted(versions - {expected}):
            raise RefitError(
                f"completions were sampled by policy version {others[0]}, but the collector expects version "
                f"{expected}; update the weights of all generators, and only between batches"
            )


def _has_signal(group: Sequence[Sample]) -> bool:
    return len({sample.reward for sample in group if not sample.is_dropped}) > 1
