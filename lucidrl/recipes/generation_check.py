"""`lucidrl check --generate`: compares generation with the policy before any training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table

from lucidrl.algorithms.mismatch import StepGuard
from lucidrl.data.datasets import Prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.distributed.workers.ray_cluster import connected
from lucidrl.errors import RefitError
from lucidrl.models.generation.interfaces import GenerationInterface
from lucidrl.models.generation.mismatch import Evidence, Sampling
from lucidrl.models.generation.separate import SeparateGenerator
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.recipes.configs import RolloutRunConfig
from lucidrl.recipes.text_inputs import TextInputs
from lucidrl.utils.random_state import seed_everything

NUM_PROMPTS, SAMPLES_PER_PROMPT, MOST_NEW_TOKENS = 8, 4, 32
_MOST_SEARCHED = 1000
REFITS = (0, 1)
"""Versions of the weights; no training step lies between them, so their weights are equal."""


@dataclass
class GenerationFindings:
    """Findings of the check, one row each: what was compared, its value, its limit, and whether it passed."""

    rows: list[tuple[str, str, str, bool]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    """Diagnoses of the rows that failed."""

    @property
    def is_ok(self) -> bool:
        return all(passed for *_, passed in self.rows)

    def add(self, name: str, value: str, limit: str, passed: bool) -> None:
        self.rows.append((name, value, limit, passed))

    def table(self) -> Table:
        table = Table("generation, in nats per token", "value", "limit", "", box=None, pad_edge=False)
        for name, value, limit, passed in self.rows:
            table.add_row(name, value, limit, "[green]ok[/]" if passed else "[red]FAILED[/]")
        return table


def check_generation(config: RolloutRunConfig, inputs: TextInputs) -> GenerationFindings:
    """Load the model, refit twice, generate greedily and sampled, and compare the results with the policy.

    Raises:
        LucidError: the policy or a generator could not start.
    """
    generation = config.policy.generation
    short = generation.model_copy(update={"max_new_tokens": min(generation.max_new_tokens, MOST_NEW_TOKENS)})
    policy_config = config.policy.model_copy(update={"generation": short})
    found = (item for _, item in inputs.prompts.spread(_MOST_SEARCHED) if isinstance(item, Prompt))
    prompts = [inputs.token_ids(prompt) for _, prompt in zip(range(NUM_PROMPTS), found, strict=False)]
    cluster, tokenizer, findings = config.cluster, inputs.tokenizer, GenerationFindings()
    with ExitStack() as stack:
        if cluster.uses_ray:
            stack.enter_context(connected(cluster.address, cluster.allow_open_dashboard))
        seed_everything(config.seed)
        policy = stack.enter_context(
            Policy(
                policy_config,
                tokenizer,
                cluster=cluster,
                init_optimizer=False,
                init_reference_model=False,
                seed=config.seed,
            )
        )
        generator: GenerationInterface = policy
        if short.placement == "separate":
            generator = stack.enter_context(
                SeparateGenerator(policy, policy_config, tokenizer, cluster=cluster, seed=config.seed)
            )
        if _refits(generator, policy_config, findings):
            _Comparison(policy, generator, policy_config, prompts, findings).run()
    return findings


def _refits(generator: GenerationInterface, config: PolicyConfig, findings: GenerationFindings) -> bool:
    """Refit twice; return whether the generators have the weights."""
    limit = f"mean {config.generation.mismatch.warn_above(config.precision):g}"
    for version in REFITS:
        name = f"refit {version}: weights and probe"
        try:
            generator.update_weights(version)
        except RefitError as error:
            findings.add(name, "other weights", limit, False)
            findings.reasons.append(str(error))
            return False
        if not isinstance(generator, SeparateGenerator):
            findings.add(f"refit {version}", "none needed", "", True)
            continue
        guard = generator.guard
        findings.add(name, f"mean {guard.difference:.2g}", limit, guard.diagnosis is None)
        if guard.diagnosis is not None:
            findings.reasons.append(guard.diagnosis.message)
    return True


@dataclass
class _Comparison:
    """Compares completions with the policy."""

    policy: Policy
    generator: GenerationInterface
    config: PolicyConfig
    prompts: Sequence[Sequence[int]]
    findings: GenerationFindings

    def run(self) -> None:
        guard, generation = StepGuard(self.policy, self.config), self.config.generation
        greedy, sampled = self._rows(1, greedy=True), self._rows(SAMPLES_PER_PROMPT, greedy=False)
        self._logprobs(guard, greedy, "greedy")
        self._tokens(guard, greedy, "greedy tokens not likeliest", Sampling(1.0, top_k=1))
        self._logprobs(guard, sampled, "sampled")
        setting = Sampling(generation.temperature, generation.top_k, generation.top_p)
        if setting.is_truncated:
            self._tokens(guard, sampled, "sampled tokens cut by top-k, top-p", setting)

    def _rows(self, samples_per_prompt: int, *, greedy: bool) -> BatchedDataDict[Any]:
        """Return completions of the prompts, as rows of a training batch."""
        rows = [torch.tensor(prompt) for prompt in self.prompts for _ in range(samples_per_prompt)]
        data: BatchedDataDict[Any] = BatchedDataDict(
            {
                "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
                "input_lengths": torch.tensor([len(row) for row in rows]),
            }
        )
        output = self.generator.generate(data, greedy=greedy)
        versions = set(output["policy_versions"].tolist())
        kind = "greedy" if greedy else "sampled"
        shown = ", ".join(map(str, sorted(versions)))
        self.findings.add(f"version of {kind} samples", shown, str(REFITS[-1]), versions == {REFITS[-1]})
        position = torch.arange(output["output_ids"].shape[1])
        ends, counts = output["unpadded_sequence_lengths"][:, None], output["generation_lengths"][:, None]
        return BatchedDataDict(
            {
                "input_ids": output["output_ids"],
                "input_lengths": output["unpadded_sequence_lengths"],
                "token_mask": ((position >= ends - counts) & (position < ends)).float(),
                "sample_mask": torch.ones(len(rows)),
                "generation_logprobs": output["logprobs"],
            }
        )

    def _logprobs(self, guard: StepGuard, rows: BatchedDataDict[Any], name: str) -> None:
        """Compare the log-probabilities of completions."""
        evidence: Evidence = guard.evidence(rows)
        largest = float((evidence.engine_N - evidence.policy_N).abs().max()) if len(evidence.engine_N) else 0.0
        passed = evidence.difference <= evidence.warn_above
        limit = f"mean {evidence.warn_above:g}"
        value = f"mean {evidence.difference:.2g}, max {largest:.2g}"
        self.findings.add(f"difference, {len(evidence.engine_N)} {name} tokens", value, limit, passed)
        if not passed:
            self.findings.reasons.append(guard.diagnosis(evidence, rows).message)

    def _tokens(self, guard: StepGuard, rows: BatchedDataDict[Any], name: str, sampling: Sampling) -> None:
        """Count the tokens that a sampling excludes, row by row, because the logits of all rows may not fit."""
        count = sum(guard.num_excluded(rows.select_indices([row]), sampling) for row in range(rows.size))
        self.findings.add(name, str(count), "0", count == 0)
        if count:
            self.findings.reasons.append(f"{count} tokens: {name}; compare the sampling settings of the engine")
