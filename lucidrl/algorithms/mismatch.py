"""StepGuard: before every update, compares log-probabilities of sampled tokens between generation and policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from lucidrl.algorithms.health import FIRST_SILENCE_STEPS, RunWarning
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import TrainingError
from lucidrl.losses.interfaces import STALENESS, sampled_token_mask
from lucidrl.models.generation.mismatch import (
    EXPLAINS_BELOW,
    Diagnosis,
    Evidence,
    Fault,
    Sampling,
    candidate_samplings,
    diagnose,
)
from lucidrl.models.generation.refit_guard import RefitGuard, adapter_explanations
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span

NUM_ROWS = 2
"""Rows per step that the guard scores."""
NUM_ROWS_TRUNCATED = 16
"""The same with top-k or top-p, where it also looks for tokens that these exclude."""
EXCLUSION_FACTOR = 4.0
"""A sampled token counts as excluded by top-k or top-p only if it were excluded with more log-probability, by this
multiple of the warning limit: rounding moves tokens at the edge to the other side."""
MOST_TOKENS = 2048
"""Tokens of a row that are scored under other samplings."""
VAGUE = (Fault.PRECISION, Fault.UNEXPLAINED)
"""Faults that name no cause."""


class StepGuard:
    """Checks a few rows of each step, other rows in every step, before the policy trains on them.

    The limits are those of `policy.generation.mismatch`.

    Args:
        refit_guard: that of separate generators; a fault that it found explains what the rows do not.
    """

    def __init__(self, policy: Policy, config: PolicyConfig, refit_guard: RefitGuard | None = None) -> None:
        self._policy, self._refit_guard = policy.group, refit_guard
        generation, self._lora = config.generation, config.lora
        self._limits, self._warn_above = generation.mismatch, generation.mismatch.warn_above(config.precision)
        self._setting = Sampling(generation.temperature, generation.top_k, generation.top_p)
        self._last: tuple[Fault, int] | None = None
        """Fault and step of the last warning."""

    @property
    def metrics(self) -> dict[str, float]:
        """`merge_gap` of the last refit, if it sent merged adapters."""
        gap = self._refit_guard.merge_gap if self._refit_guard is not None else None
        return {} if gap is None else {"merge_gap": gap}

    @span("guard")
    def check(self, step: int, batch: BatchedDataDict[Any]) -> RunWarning | None:
        """Return a warning if the log-probabilities of the rows differ by more than the limit.

        Raises:
            TrainingError: they differ so much that the run must stop.
        """
        rows = self._rows(step, batch)
        if not rows.size:
            return None
        evidence = self.evidence(rows)
        of_refit = self._refit_guard.diagnosis if self._refit_guard is not None else None
        diagnosis = of_refit if evidence.is_clean else self.diagnosis(evidence, rows)
        if diagnosis is None:
            return None
        if diagnosis.is_gross:
            raise TrainingError(
                f"step {step}: {diagnosis.message}. The policy was not trained on these samples; raise "
                "policy.generation.mismatch.stop to train on them nevertheless"
            )
        if self._last is not None and self._last[0] is diagnosis.fault and step - self._last[1] < FIRST_SILENCE_STEPS:
            return None
        self._last = diagnosis.fault, step
        return RunWarning("mismatch", diagnosis.message)

    def _rows(self, step: int, batch: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Return some rows with sampled tokens, without the padding that they share.

        The policy has no log-probabilities of earlier versions, so rows with tokens of earlier versions are left out.
        """
        is_chosen = sampled_token_mask(batch).any(dim=1)
        if STALENESS in batch:
            is_chosen &= ~(batch[STALENESS] > 0).any(dim=1)
        chosen = is_chosen.nonzero()[:, 0]
        number = min(len(chosen), NUM_ROWS_TRUNCATED if self._setting.is_truncated else NUM_ROWS)
        picked = (step + torch.arange(number) * len(chosen) // max(1, number)) % max(1, len(chosen))
        names = ("input_ids", "input_lengths", "token_mask", "sample_mask", "generation_logprobs")
        rows: BatchedDataDict[Any] = BatchedDataDict({name: batch[name] for name in names})
        return _cut(rows.select_indices(chosen[picked]))

    def evidence(self, rows: BatchedDataDict[Any]) -> Evidence:
        """Compare the sampled tokens of all rows."""
        mask_BT, excluded = sampled_token_mask(rows), 0
        if self._setting.is_truncated:
            [policy_N], excluded = self._scored(rows, [Sampling(self._setting.temperature)])
        else:
            policy_N = self._policy.run_all("scorer.probe", rows["input_ids"], rows["input_lengths"])[0][mask_BT]
        return Evidence(
            subject="generation",
            engine_N=rows["generation_logprobs"][mask_BT],
            policy_N=policy_N,
            warn_above=self._warn_above,
            stop_above=self._limits.stop,
            setting=self._setting,
            num_excluded=excluded,
        )

    def diagnosis(self, evidence: Evidence, rows: BatchedDataDict[Any]) -> Diagnosis:
        """Name the fault of rows whose evidence is not clean.

        A fault that the refit guard named explains the rows too, if the probe differed about as much as they do: the
        probe has more tokens than two short rows, to which a wrong sampling may fit by chance.
        """
        found = diagnose(self._explained(evidence, rows))
        assert found is not None, "evidence that is not clean has a diagnosis"
        of_refit = self._refit_guard.diagnosis if self._refit_guard is not None else None
        if of_refit is None or self._refit_guard is None:
            return found
        is_enough = self._refit_guard.difference >= EXPLAINS_BELOW * evidence.difference
        if found.fault in VAGUE or (is_enough and of_refit.fault not in VAGUE):
            return replace(of_refit, is_gross=found.is_gross)
        return found

    def num_excluded(self, rows: BatchedDataDict[Any], sampling: Sampling) -> int:
        """Return how many sampled tokens `sampling` excludes, beyond rounding."""
        return self._scored(rows, [sampling], sampling)[1]

    def _explained(self, evidence: Evidence, rows: BatchedDataDict[Any]) -> Evidence:
        """Add the log-probabilities under other samplings, for the first tokens of the rows that differ most."""
        if evidence.difference <= evidence.warn_above:
            return evidence
        distances = (evidence.engine_N - evidence.policy_N).abs().nan_to_num(posinf=torch.inf)
        of_rows = [part.mean() for part in distances.split(sampled_token_mask(rows).sum(dim=1).tolist())]
        worst = torch.stack(of_rows).nan_to_num().argsort(descending=True)[:NUM_ROWS]
        few = _cut(rows.select_indices(worst), MOST_TOKENS)
        mask_BT = sampled_token_mask(few)
        if not mask_BT.any():
            return evidence
        samplings = [Sampling(self._setting.temperature), *candidate_samplings(self._setting)]
        (own_N, *explained), _ = self._scored(few, samplings)
        return replace(
            evidence,
            explained_engine_N=few["generation_logprobs"][mask_BT],
            explained_policy_N=own_N,
            explanations=dict(zip(samplings[1:], explained, strict=True)),
            adapter_explanations=adapter_explanations(
                self._policy, self._lora, few["input_ids"], few["input_lengths"], mask_BT
            ),
        )

    def _scored(
        self, rows: BatchedDataDict[Any], samplings: list[Sampling], setting: Sampling | None = None
    ) -> tuple[torch.Tensor, int]:
        arguments = rows["input_ids"], rows["input_lengths"], sampled_token_mask(rows), samplings
        result: tuple[torch.Tensor, int] = self._policy.run_all(
            "scorer.explanations", *arguments, setting or self._setting, EXCLUSION_FACTOR * self._warn_above
        )[0]
        return result


def _cut(rows: BatchedDataDict[Any], most_tokens: int | None = None) -> BatchedDataDict[Any]:
    """Drop time after the longest row, and after `most_tokens`."""
    longest = int(rows["input_lengths"].max()) if rows.size else 0
    length = longest if most_tokens is None else min(longest, most_tokens)
    columns = {name: column[:, :length] if column.dim() > 1 else column for name, column in rows.items()}
    columns["input_lengths"] = columns["input_lengths"].clamp(max=length)
    return BatchedDataDict(columns)
