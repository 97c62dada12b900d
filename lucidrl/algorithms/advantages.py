"""Advantages of samples (relative to their group) and of actions (GAE).

Samples: B rows, G groups. Rows with the same id in `group_ids` have the same prompt; groups have any size and order.
Rows that are not `valid` count in no statistic, may hold any reward, and get advantage 0.

Actions: B any batch dims (each row holds one trajectory after another), T time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lucidrl.algorithms.config import AdvantageConfig, AdvantageEstimator
from lucidrl.collectors.rollouts import ComponentScores
from lucidrl.errors import DataError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that rounding differences of rewards are not amplified."""
MAX_REWARD = 1e30
"""Largest absolute reward, far enough from the limit of float32 that no advantage overflows."""


def compute_advantages(
    config: AdvantageConfig,
    rewards: torch.Tensor,
    group_ids: torch.Tensor,
    valid: torch.Tensor,
    names: Sequence[str] | None = None,
    components: Mapping[str, ComponentScores] | None = None,
) -> torch.Tensor:
    """Return the advantage of each row, [B] float32.

    Standardisation over tokens and the KL divergence in the reward need the tokens: see `lucidrl.algorithms.credit`.

    Args:
        rewards: [B] one reward per valid row, from -MAX_REWARD to MAX_REWARD.
        group_ids: [B] int64, equal for samples of the same prompt.
        valid: [B] bool or 0/1, such as the batch's `sample_mask`.
        names: [B] names of the rows, for error messages; by default the row indices.
        components: scores of each reward by its name, for `rewards=separate`.

    Raises:
        DataError: the reward of a valid row is NaN or too large (the message names the rows), or the shapes differ.
    """
    _check(rewards, group_ids, valid.bool(), names)
    if config.rewards == "separate":
        advantages = _summed_separately(config, components or {}, group_ids, valid.bool(), names)
    else:
        advantages = ESTIMATORS[config.estimator](rewards, group_ids, valid)
    return standardized(advantages, valid.bool()) if config.standardize == "sample" else advantages


def _summed_separately(
    config: AdvantageConfig,
    components: Mapping[str, ComponentScores],
    group_ids: torch.Tensor,
    valid: torch.Tensor,
    names: Sequence[str] | None,
) -> torch.Tensor:
    """The weighted sum of each component's advantages (GDPO); a component that a row lacks adds 0 to it."""
    if not components:
        raise DataError(
            "grpo.advantages.rewards=separate needs rewards with names, but the environment returned only their sum; "
            "set reward=[...] with several rewards, or return `components` in each EnvReply"
        )
    total = torch.zeros(len(group_ids), dtype=torch.float64)
    for component in components.values():
        has_score = valid & ~component.scores.isnan()
        _check(component.scores, group_ids, has_score, names)
        total += component.weight * ESTIMATORS[config.estimator](component.scores, group_ids, has_score)
    return total.float()


def standardized(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(value - mean) / (std + STD_EPSILON) over the values in the mask, float32; 0 elsewhere, and if all are equal.

    The driver has all rows of a step, so mean and standard deviation do not depend on micro-batches or ranks. The
    standard deviation divides by n, not n - 1.
    """
    chosen = values[mask].double()
    if not len(chosen) or chosen.min() == chosen.max():
        return torch.zeros_like(values, dtype=torch.float32)
    scaled = (values.double() - chosen.mean()) / (chosen.std(correction=0) + STD_EPSILON)
    return scaled.masked_fill(~mask, 0).float()


def group_normalized(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(reward - group mean) / (group std + STD_EPSILON).

    The standard deviation divides by n, not n - 1, so the mean squared advantage of a group is 1 for any size. A group
    of one row, or of equal rewards, gets exactly 0.
    """
    groups = _Groups.of(rewards, group_ids, valid)
    std_G = groups.mean(groups.centered.square()).sqrt()
    return groups.finished(groups.centered / (std_G[groups.index] + STD_EPSILON))


def group_centered(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Reward minus group mean, not divided by a standard deviation (Dr. GRPO)."""
    groups = _Groups.of(rewards, group_ids, valid)
    return groups.finished(groups.centered)


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean of the other rows of its group (RLOO); exactly 0 for a group of one row."""
    groups = _Groups.of(rewards, group_ids, valid)
    # With n rows, reward - (sum - reward) / (n - 1) = n / (n - 1) * (reward - mean).
    scale_G = groups.count / (groups.count - 1).clamp(min=1)
    return groups.finished(groups.centered * scale_G[groups.index])


def plain(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean over all valid rows of the batch (REINFORCE with a batch baseline)."""
    groups = _Groups.of(rewards, torch.zeros_like(group_ids), valid)
    return groups.finished(groups.centered)


ESTIMATORS: dict[AdvantageEstimator, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    AdvantageEstimator.GROUP_NORMALIZED: group_normalized,
    AdvantageEstimator.GROUP_CENTERED: group_centered,
    AdvantageEstimator.LEAVE_ONE_OUT: leave_one_out,
    AdvantageEstimator.PLAIN: plain,
}


def has_signal(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B] bool: the row is valid, and the valid rewards of its group differ. Rows that are not valid may be NaN."""
    _check(rewards, group_ids, valid.bool())
    groups = _Groups.of(rewards, group_ids, valid)
    return groups.valid & groups.differs[groups.index]


@dataclass(frozen=True)
class _Groups:
    """Statistics of groups, in float64."""

    index: torch.Tensor
    """[B] index of each row's group, 0 to G - 1."""
    valid: torch.Tensor
    """[B] bool."""
    count: torch.Tensor
    """[G] valid rows of each group, at least 1."""
    differs: torch.Tensor
    """[G] whether two valid rewards of the group differ."""
    centered: torch.Tensor
    """[B] reward minus group mean; undefined where not valid."""

    @classmethod
    def of(cls, rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> _Groups:
        valid, rewards = valid.bool(), rewards.double()
        ids_G, index = group_ids.unique(return_inverse=True)
        zeros_G = rewards.new_zeros(len(ids_G))
        count_G = zeros_G.index_add(0, index, valid.double()).clamp(min=1)
        mean_G = zeros_G.index_add(0, index, rewards.masked_fill(~valid, 0)) / count_G
        low_G = (zeros_G + torch.inf).scatter_reduce(0, index, rewards.masked_fill(~valid, torch.inf), "amin")
        high_G = (zeros_G - torch.inf).scatter_reduce(0, index, rewards.masked_fill(~valid, -torch.inf), "amax")
        return cls(index, valid, count_G, differs=high_G > low_G, centered=rewards - mean_G[index])

    def mean(self, values_B: torch.Tensor) -> torch.Tensor:
        """[G] mean over the valid rows of each group."""
        values_B = values_B.masked_fill(~self.valid, 0)
        return torch.zeros_like(self.count).index_add(0, self.index, values_B) / self.count

    def finished(self, advantages_B: torch.Tensor) -> torch.Tensor:
        """Return the advantages as float32, exactly 0 for invalid rows and for groups of equal rewards."""
        return advantages_B.masked_fill(~(self.valid & self.differs[self.index]), 0).float()


def _check(
    rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor, names: Sequence[str] | None = None
) -> None:
    shapes = {"rewards": list(rewards.shape), "group_ids": list(group_ids.shape), "valid": list(valid.shape)}
    if rewards.ndim != 1 or len({tuple(shape) for shape in shapes.values()}) > 1:
        raise DataError(f"rewards, group_ids and valid must each hold one value per row, but have shapes {shapes}")
    rows = (valid & ~(rewards.abs() <= MAX_REWARD)).nonzero().flatten().tolist()  # also true for NaN
    if rows:
        shown = ", ".join(f"{names[row] if names else row} ({rewards[row].item():g})" for row in rows[:10])
        more = f" and {len(rows) - 10} more" if len(rows) > 10 else ""
        raise DataError(
            f"rewards must lie between {-MAX_REWARD:g} and {MAX_REWARD:g}, but the rewards of "
            f"{'samples' if names else 'rows'} {shown}{more} do not; fix the environment's reward, or set the "
            "sample_mask of these rows to 0"
        )


@dataclass(frozen=True)
class AdvantageEstimates:
    """Advantages and value targets of frames (steps of one env), both [B, T]."""

    advantages: torch.Tensor
    value_targets: torch.Tensor
    """Estimated returns: advantages + values."""


@torch.no_grad()
def generalized_advantages(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    next_values_BT: torch.Tensor,
    terminated_BT: torch.Tensor,
    done_BT: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> AdvantageEstimates:
    """Return generalized advantage estimates.

    With d = reward + discount * next value - value, A(t) = d(t) + discount * gae_lambda * A(t + 1) within an episode.
    The next value of a terminated episode is 0; a truncated episode, or one that continues in the next batch, uses the
    critic's value of its last observation.

    Args:
        values_BT: values of the observations before the actions.
        next_values_BT: values of the observations after the actions; at the end of an episode, the value of its final
            observation.
        terminated_BT: bool, True where an episode terminated.
        done_BT: bool, True where an episode ended for any reason; no advantage is summed across such a frame.
        gae_lambda: 0 uses the critic after one frame, 1 sums rewards to the end.
    """
    differences_BT = rewards_BT + discount * next_values_BT * ~terminated_BT - values_BT
    weights_BT = discount * gae_lambda * (~done_BT).to(differences_BT.dtype)
    advantages_BT = torch.empty_like(differences_BT)
    following = torch.zeros_like(differences_BT[..., 0])
    for time in reversed(range(differences_BT.shape[-1])):
        following = differences_BT[..., time] + weights_BT[..., time] * following
        advantages_BT[..., time] = following
    return AdvantageEstimates(advantages_BT, advantages_BT + values_BT)
