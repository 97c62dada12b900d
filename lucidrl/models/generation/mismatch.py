"""Why the log-probabilities of an engine differ from those of the policy: evidence, faults and their diagnosis.

Everything here is a pure function. `RefitGuard` collects the evidence of a refit, and the training loop that of a step.

Shapes: N tokens, B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

EXPLAINS_BELOW = 0.25
"""A cause explains the mismatch if it leaves less than this fraction of it."""
ROUNDING_SHARE = 0.1
"""Causes that leave less than this fraction of the limit explain the mismatch equally well."""
SAME_NOISE_FACTOR = 4.0
"""A mismatch up to this multiple of that of the first refit, when all weights were the loaded ones, is rounding."""
MOST_NAMES = 3


class Fault(StrEnum):
    """What is wrong with an engine."""

    STALE_VERSION = "stale version"
    MISSING_TENSOR = "missing tensor"
    WRONG_TENSOR = "wrong or permuted tensor"
    TEMPERATURE = "temperature"
    TRUNCATION = "sampling truncation"
    ADAPTER_SCALE = "adapter scale"
    PRECISION = "dtype noise"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Sampling:
    """Settings by which an engine may compute log-probabilities, or sample."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def is_truncated(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def __str__(self) -> str:
        parts = [f"temperature={self.temperature:g}"]
        parts += [f"top_k={self.top_k}"] if self.top_k else []
        parts += [f"top_p={self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join(parts)


def candidate_samplings(own: Sampling) -> list[Sampling]:
    """Return the samplings that an engine may use by mistake: without the configured settings, or with usual defaults.

    Args:
        own: the configured settings; log-probabilities ought to be those of its temperature, without truncation.
    """
    temperatures = [Sampling(value) for value in (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0)]
    cuts = [(own.top_k, own.top_p), (0, own.top_p), (own.top_k, 1.0), (0, 0.95), (0, 0.9), (0, 0.8), (20, 0.8)]
    cuts += [(20, 0.95), (20, 1.0), (50, 1.0)]
    truncated = [Sampling(temperature, *cut) for temperature in (own.temperature, 1.0) for cut in cuts]
    both = dict.fromkeys([*temperatures, *(sampling for sampling in truncated if sampling.is_truncated)])
    return [sampling for sampling in both if sampling != Sampling(own.temperature)]


def candidate_scales(alpha: float, rank: int) -> dict[str, float]:
    """Return the scales that an engine may give a LoRA adapter by mistake, as multiples of the right one, by name."""
    own = alpha / rank
    scales = {
        "0, so without the adapter": 0.0,
        "1, without alpha and rank": 1.0,
        f"alpha = {alpha:g}, not divided by the rank": alpha,
        "alpha / sqrt(rank)": alpha / math.sqrt(rank),
        "1 / rank, without alpha": 1 / rank,
        "2 * alpha / rank, so the adapter is applied twice": 2 * own,
    }
    return {name: scale / own for name, scale in scales.items() if scale != own}


def logprobs_under(logits_NV: torch.Tensor, targets_N: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Return [S, N], the log-probabilities of tokens under each sampling; -inf for tokens that truncation excludes.

    Args:
        logits_NV: before the temperature.
    """
    result = []
    for sampling in samplings:
        logprobs_NV = (logits_NV.float() / sampling.temperature).log_softmax(dim=-1)
        own_N = logprobs_NV.gather(1, targets_N[:, None])[:, 0]
        if sampling.is_truncated:
            most = sampling.top_k or logprobs_NV.shape[1]
            ordered = logprobs_NV.topk(min(most, logprobs_NV.shape[1]), dim=-1).values
            probabilities = ordered.double().exp()
            running = probabilities.cumsum(dim=-1)
            is_kept = running - probabilities < sampling.top_p * running[:, -1:]
            mass_N = (probabilities * is_kept).sum(dim=-1)
            least_N = ordered.gather(1, is_kept.sum(dim=-1, keepdim=True) - 1)[:, 0]
            own_N = (own_N - mass_N.log().float()).masked_fill(own_N < least_N, -torch.inf)
        result.append(own_N)
    return torch.stack(result)


def num_excluded(logits_NV: torch.Tensor, targets_N: torch.Tensor, sampling: Sampling, slack: float) -> int:
    """Return how many tokens truncation excludes, also if all log-probabilities were wrong by `slack` nats.

    Args:
        logits_NV: before the temperature.
    """
    if not sampling.is_truncated:
        return 0
    logprobs_NV = (logits_NV.float() / sampling.temperature).log_softmax(dim=-1)
    is_above_NV = logprobs_NV > logprobs_NV.gather(1, targets_N[:, None]) + slack
    above_N = (logprobs_NV.double().exp() * is_above_NV).sum(dim=-1)
    total_N, is_out_N = torch.ones_like(above_N), torch.zeros_like(above_N, dtype=torch.bool)
    if sampling.top_k:
        is_out_N = is_above_NV.sum(dim=-1) >= sampling.top_k
        total_N = logprobs_NV.topk(min(sampling.top_k, logprobs_NV.shape[1]), dim=-1).values.double().exp().sum(dim=-1)
    if sampling.top_p < 1:
        # An error of `slack` nats multiplies the odds of the more likely tokens by up to exp(slack).
        odds = sampling.top_p / (1 - sampling.top_p) * math.exp(slack)
        is_out_N |= above_N >= odds / (1 + odds) * total_N
    return int(is_out_N.sum())


@dataclass(frozen=True)
class Evidence:
    """What is known of an engine, about the same tokens and the same version."""

    subject: str
    """What was compared, such as "generator 0 after the refit to version 3"."""
    engine_N: torch.Tensor
    """Log-probabilities of the engine."""
    policy_N: torch.Tensor
    """Log-probabilities of the policy."""
    warn_above: float
    """Mean absolute difference that is not rounding."""
    stop_above: float | None = None
    """Mean absolute difference that must stop the run; None: never."""
    setting: Sampling = Sampling(1.0)
    """The configured sampling."""
    explained_engine_N: torch.Tensor | None = None
    """Log-probabilities of the engine for the tokens of `explanations`; None: these are the tokens of `engine_N`."""
    explained_policy_N: torch.Tensor | None = None
    """The same of the policy."""
    explanations: Mapping[Sampling, torch.Tensor] = field(default_factory=dict)
    """[N] log-probabilities of the policy under other samplings."""
    adapter_explanations: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[N] log-probabilities of the policy with its adapters at other scales; see `candidate_scales`."""
    merge_gap: float | None = None
    """Mean absolute difference of the policy with merged and separate adapters, if the engine has merged ones."""
    num_excluded: int = 0
    """Sampled tokens that the configured truncation excludes."""
    before_N: torch.Tensor | None = None
    """Log-probabilities of the policy's previous version."""
    usual: float | None = None
    """Mean absolute difference after the first refit."""
    version: int | None = None
    expected_version: int | None = None
    checksum: Mapping[str, str] | None = None
    """Of the engine's tensors; None if not reported."""
    expected_checksum: Mapping[str, str] = field(default_factory=dict)
    previous_checksum: Mapping[str, str] = field(default_factory=dict)
    """Of the policy's previous version; empty if there is none."""

    @property
    def difference(self) -> float:
        """Mean absolute difference of engine and policy; 0 without tokens."""
        return mean_difference(self.engine_N, self.policy_N)

    @property
    def explained(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of engine and policy for the tokens of the explanations."""
        engine_N = self.engine_N if self.explained_engine_N is None else self.explained_engine_N
        policy_N = self.policy_N if self.explained_policy_N is None else self.explained_policy_N
        return engine_N, policy_N

    @property
    def different_names(self) -> list[str]:
        """Names of the policy's tensors that the engine lacks or has with another content."""
        if self.checksum is None:
            return []
        return [name for name, value in self.expected_checksum.items() if self.checksum.get(name) != value]

    @property
    def is_clean(self) -> bool:
        """Whether nothing points to a fault."""
        return (
            self.version == self.expected_version
            and not self.different_names
            and self.difference <= self.warn_above
            and not self.num_excluded
        )


@dataclass(frozen=True)
class Diagnosis:
    """The fault of an engine, and a sentence with value, rule and remedy."""

    fault: Fault
    message: str
    is_gross: bool
    """The run must stop."""
    names: tuple[str, ...] = ()
    """Tensors at fault."""


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Name the fault that explains the evidence best; None if nothing points to one.

    Weights are compared first, because wrong weights explain every other difference.
    """
    if evidence.is_clean:
        return None
    found = (
        _of_weights(evidence)
        or _of_numbers(evidence)
        or _of_adapter(evidence)
        or _of_samplings(evidence)
        or _of_truncated_samples(evidence)
        or _of_size(evidence)
    )
    fault, reason, remedy, names = found
    value = f"mean absolute difference {evidence.difference:.3g} nats per token, limit {evidence.warn_above:g}"
    limit = evidence.stop_above
    is_gross = bool(names) or fault is Fault.STALE_VERSION or (limit is not None and evidence.difference > limit)
    return Diagnosis(fault, f"{evidence.subject}: {fault} ({value}): {reason}; {remedy}", is_gross, tuple(names))


_Finding = tuple[Fault, str, str, Sequence[str]]


def _of_weights(evidence: Evidence) -> _Finding | None:
    names, previous = evidence.different_names, evidence.previous_checksum
    checksum = evidence.checksum or {}
    if evidence.version != evidence.expected_version:
        reason = f"it has version {evidence.version} of the weights, but version {evidence.expected_version} was sent"
        return Fault.STALE_VERSION, reason, "call update_weights after every training step", names
    if not names:
        return None
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    changed = [name for name, value in evidence.expected_checksum.items() if previous.get(name, value) != value]
    stale = [name for name in names if checksum.get(name, previous.get(name)) == previous.get(name)]
    if changed and set(changed) == set(names) == set(stale):
        reason = f"all {len(names)} weights that changed still have the values of the previous version"
        return Fault.STALE_VERSION, reason, "the refit was skipped: check the engine's weight loader", names
    if len(stale) == len(names):
        reason = f"{shown} did not arrive: {len(names)} of {len(evidence.expected_checksum)} weights are missing or old"
        return (
            Fault.MISSING_TENSOR,
            reason,
            "send every weight, and check the names that the engine's loader maps",
            names,
        )
    wrong = [name for name in names if name not in stale]
    reason = f"{shown} have other values than in the policy, though version {evidence.version} was sent"
    remedy = "check the order of elements, the shape and the name under which the engine loads them"
    return Fault.WRONG_TENSOR, reason, remedy, wrong


def _of_numbers(evidence: Evidence) -> _Finding | None:
    for side, logprobs_N in (("the policy", evidence.policy_N), ("the engine", evidence.engine_N)):
        if not bool(logprobs_N.isfinite().all()):
            reason = f"{side} has log-probabilities that are not finite"
            return Fault.UNEXPLAINED, reason, "look for NaN in weights and gradients; lower the learning rate", ()
    return None


def _of_adapter(evidence: Evidence) -> _Finding | None:
    if evidence.difference <= evidence.warn_above or not evidence.adapter_explanations:
        return None
    engine_N, policy_N = evidence.explained
    left = {name: mean_difference(engine_N, other_N) for name, other_N in evidence.adapter_explanations.items()}
    best = min(left, key=lambda name: left[name])
    others = [mean_difference(engine_N, other_N) for other_N in evidence.explanations.values()]
    if evidence.before_N is not None:  # all adapters of the previous version are as similar as a smaller scale
        others.append(mean_difference(evidence.engine_N, evidence.before_N))
    if left[best] >= min([EXPLAINS_BELOW * mean_difference(engine_N, policy_N), *others]):
        return None
    reason = f"its log-probabilities are those of the adapter at the scale {best}, but the scale is alpha / rank"
    return Fault.ADAPTER_SCALE, reason, "pass policy.lora.alpha and policy.lora.rank to the engine", ()


def _of_samplings(evidence: Evidence) -> _Finding | None:
    if evidence.difference <= evidence.warn_above:
        return None
    engine_N, policy_N = evidence.explained
    left = {sampling: mean_difference(engine_N, other_N) for sampling, other_N in evidence.explanations.items()}
    # Candidates that leave rounding alone are equal; the first one is the simplest.
    best = min(left, key=lambda sampling: max(left[sampling], ROUNDING_SHARE * evidence.warn_above), default=None)
    stale = torch.inf if evidence.before_N is None else mean_difference(evidence.engine_N, evidence.before_N)
    limit = EXPLAINS_BELOW * mean_difference(engine_N, policy_N)
    if stale < limit and (best is None or stale <= left[best]):
        reason = "its log-probabilities are those of the previous version of the weights"
        return Fault.STALE_VERSION, reason, "the refit was skipped: check the engine's weight loader", ()
    if best is None or left[best] >= limit:
        return None
    reason = f"its log-probabilities are those of {best}, but the settings are {evidence.setting}"
    if best.is_truncated:
        remedy = "report log-probabilities of the full distribution, before top-k and top-p"
        return Fault.TRUNCATION, reason, remedy, ()
    remedy = f"pass policy.generation.temperature={evidence.setting.temperature:g} to the engine, and count it once"
    return Fault.TEMPERATURE, reason, remedy, ()


def _of_truncated_samples(evidence: Evidence) -> _Finding | None:
    if not evidence.num_excluded or evidence.difference > evidence.warn_above:
        return None  # an engine with other probabilities also has another truncation
    reason = f"it sampled {evidence.num_excluded} of {len(evidence.engine_N)} tokens that {evidence.setting} excludes"
    return Fault.TRUNCATION, reason, "pass policy.generation.top_k and top_p to the engine", ()


def _of_size(evidence: Evidence) -> _Finding:
    if evidence.usual is not None and evidence.difference > SAME_NOISE_FACTOR * max(evidence.usual, 1e-6):
        reason = (
            "all weights arrived, and no sampling setting explains the difference, but after the first refit it was "
            f"{evidence.usual:.2g}: the engine computes with a weight that it did not take over, such as a tied head"
        )
        return Fault.MISSING_TENSOR, reason, "send that weight under its own name too, or reload the engine", ()
    if evidence.stop_above is None or evidence.difference <= evidence.stop_above:
        reason = (
            "weights and sampling settings agree, so the engine computes in another precision or with other kernels"
        )
        if evidence.merge_gap is not None:
            reason += f"; merging the adapters into rounded weights alone makes {evidence.merge_gap:.2g}"
        remedy = (
            "use policy.precision=float32, correct the loss with grpo.loss.importance_correction, or accept it with "
            "policy.generation.mismatch.warn"
        )
        return Fault.PRECISION, reason, remedy, ()
    reason = "no weight, sampling setting or precision explains it"
    return Fault.UNEXPLAINED, reason, "compare engine and policy with `lucidrl check --generate`", ()


def mean_difference(first_N: torch.Tensor, second_N: torch.Tensor) -> float:
    """Mean absolute difference; 0 without tokens, inf if a value is not finite."""
    if not len(first_N):
        return 0.0
    difference = float((first_N.double() - second_N.double()).abs().mean())
    return difference if difference == difference else torch.inf
