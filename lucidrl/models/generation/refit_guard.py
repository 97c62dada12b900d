"""RefitGuard: after every refit, compares what the generators report with what the policy has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.distributed.workers.pool import PoolWorker, WorkerPool
from lucidrl.errors import RefitError
from lucidrl.models.generation.interfaces import RankWeights, RefitReport
from lucidrl.models.generation.mismatch import (
    Diagnosis,
    Evidence,
    Sampling,
    candidate_samplings,
    candidate_scales,
    diagnose,
    mean_difference,
)
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.policy.config import LoraConfig, PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import span


def adapter_explanations(
    policy: WorkerGroup, lora: LoraConfig | None, input_ids: torch.Tensor, lengths: torch.Tensor, selected: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Score tokens of a few rows with the adapters at other scales; {} without LoRA. See `candidate_scales`."""
    if lora is None:
        return {}
    scales = candidate_scales(lora.alpha, lora.rank)
    scored = policy.run_all("scorer.probe_adapters", input_ids, lengths, list(scales.values()))[0]
    return {name: logprobs_BT[selected] for name, logprobs_BT in zip(scales, scored, strict=True)}


class RefitGuard:
    """Compares versions, checksums of weights and log-probabilities of a probe text.

    A generator without the policy's weights stops the run. If only the log-probabilities differ, the limits of
    `policy.generation.mismatch` decide.
    """

    def __init__(self, policy: Policy, pool: WorkerPool, config: PolicyConfig, tokenizer: PreTrainedTokenizerBase):
        self._policy, self._pool = policy.group, pool
        self._precision, generation = config.precision, config.generation
        self._lora, self._merges = config.lora, config.merges_for_generation
        self._limits = generation.mismatch
        self._setting = Sampling(generation.temperature, generation.top_k, generation.top_p)
        probe = probe_tokens(tokenizer)
        self._probe = torch.tensor([probe]), torch.tensor([len(probe)])
        self._usual: float | None = None
        """Largest mean absolute difference after the first refit without a fault."""
        self._version: int | None = None
        self._checksum: dict[str, str] = {}
        self._logprobs: torch.Tensor | None = None
        """Of the policy at `_version`, the version of the last refit."""
        self.diagnosis: Diagnosis | None = None
        """A fault in the last version, too small to stop the run; `StepGuard` warns of it."""
        self.difference = 0.0
        """Largest mean absolute difference of the probe's log-probabilities after the last refit."""
        self.merge_gap: float | None = None
        """What merging adapters alone changes in them; None if the engine takes adapters, or there are none."""

    @span("guard")
    def check(self, version: int, receivers: Sequence[PoolWorker]) -> None:
        """Compare the receivers of a refit with the policy, which still has `version`.

        Raises:
            RefitError: a generator has other weights, or its log-probabilities differ by more than the limit.
        """
        if not receivers:
            return
        if version != self._version:
            self.diagnosis, self.difference = None, 0.0
        reports: dict[int, RefitReport] = {}

        def ask(worker: PoolWorker) -> None:
            reports[worker.number] = worker.run("report_refit")

        self._pool.each(ask, receivers)
        checksum = {
            name: value for sent in self._policy.run_all("export.sent_checksums") for name, value in sent.items()
        }
        logprobs = self._policy.run_all("scorer.probe", *self._probe)[0][0, 1:]
        if self._merges:
            self.merge_gap = self._policy.run_all("scorer.merge_gap", *self._probe)[0]
        for number, report in sorted(reports.items()):
            rank = _faulty_rank(report.ranks, version, checksum)
            name = f"generator {number}" if rank is None else f"rank {rank} of generator {number}"
            weights = report.ranks[rank or 0]
            self._act_on(self._evidence(name, version, weights, report.probe_logprobs, checksum, logprobs))
        differences = [mean_difference(report.probe_logprobs, logprobs) for report in reports.values()]
        self.difference = max([self.difference, *differences])
        if self._usual is None and differences and self.diagnosis is None:
            self._usual = self.difference
        if reports and version != self._version:
            self._version, self._checksum, self._logprobs = version, checksum, logprobs

    def _evidence(
        self,
        name: str,
        version: int,
        weights: RankWeights,
        probed: torch.Tensor,
        checksum: Mapping[str, str],
        logprobs: torch.Tensor,
    ) -> Evidence:
        is_next = version != self._version  # else a restarted generator got the version of the last refit again
        return Evidence(
            subject=f"{name} after the refit to version {version}",
            engine_N=probed,
            policy_N=logprobs,
            warn_above=self._limits.warn_above(self._precision),
            stop_above=self._limits.stop,
            setting=self._setting,
            before_N=self._logprobs if is_next else None,
            usual=self._usual,
            version=weights.version,
            expected_version=version,
            checksum=weights.checksum,
            expected_checksum=checksum,
            previous_checksum=self._checksum if is_next else {},
            merge_gap=self.merge_gap,
        )

    def _act_on(self, evidence: Evidence) -> None:
        """Keep a fault for the warning of the next step, or stop the run."""
        if evidence.is_clean:
            return
        samplings = candidate_samplings(self._setting)
        selected = torch.ones_like(self._probe[0], dtype=torch.bool)
        selected[:, 0] = False  # the first token has no log-probability
        arguments = (*self._probe, selected, samplings, self._setting, evidence.warn_above)
        explained, _ = self._policy.run_all("scorer.explanations", *arguments)[0]
        evidence = replace(
            evidence,
            explanations=dict(zip(samplings, explained, strict=True)),
            adapter_explanations=adapter_explanations(self._policy, self._lora, *self._probe, selected),
        )
        diagnosis = diagnose(evidence)
        assert diagnosis is not None, "evidence that is not clean has a diagnosis"
        if diagnosis.is_gross:
            raise RefitError(diagnosis.message)
        self.diagnosis = diagnosis


def _faulty_rank(ranks: Sequence[RankWeights], version: int, checksum: Mapping[str, str]) -> int | None:
    """Return the first of several ranks that has other weights than the policy; None if there is none to single out."""
    if len(ranks) == 1:
        return None
    for number, rank in enumerate(ranks):
        if rank.version != version or any(rank.checksum.get(name) != value for name, value in checksum.items()):
            return number
    return None
