"""Advantages: how much better a sample did than what it is compared with.

Shapes: B rows, G groups. Rows with the same id in `group_ids` answer the same prompt; groups may be of any size, in
any order. Rows that are not `valid` (dropped samples) count in no statistic, may hold any reward and get 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lucidrl.algorithms.config import AdvantageConfig, AdvantageEstimator
from lucidrl.errors import DataError

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, so that rewards that differ by rounding alone are not blown up."""


def compute_advantages(
    config: AdvantageConfig, rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """The advantage of each row, [B] float32.

    Args:
        rewards: [B] one finite reward for each valid row.
        group_ids: [B] int64, equal for the samples of one prompt.
        valid: [B] bool or 0/1, such as the batch's `sample_mask`.

    Raises:
        DataError: a valid row's reward is NaN or infinite (the message names the rows), or the shapes differ.
    """
    return ESTIMATORS[config.estimator](rewards, group_ids, valid)


def group_normalized(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / (std + STD_EPSILON) of its group.

    The deviation is that of the population (divided by n, not n - 1): the squared advantages of a group then average
    to 1 whatever its size. A group of one row, or of equal rewards, gets exactly 0.
    """
    groups = _Groups.of(rewards, group_ids, valid)
    std_G = groups.mean(groups.centered.square()).sqrt()
    return groups.finished(groups.centered / (std_G[groups.index] + STD_EPSILON))


def leave_one_out(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean of the other rows of its group (RLOO); exactly 0 for a group of one row."""
    groups = _Groups.of(rewards, group_ids, valid)
    # With n rows, reward - (sum - reward) / (n - 1) is n / (n - 1) times the distance from the mean of all.
    scale_G = groups.count / (groups.count - 1).clamp(min=1)
    return groups.finished(groups.centered * scale_G[groups.index])


def plain(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Reward minus the mean over all valid rows, whatever their group: REINFORCE with the batch as its baseline."""
    groups = _Groups.of(rewards, torch.zeros_like(group_ids), valid)
    return groups.finished(groups.centered)


ESTIMATORS: dict[AdvantageEstimator, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    AdvantageEstimator.GROUP_NORMALIZED: group_normalized,
    AdvantageEstimator.LEAVE_ONE_OUT: leave_one_out,
    AdvantageEstimator.PLAIN: plain,
}


def has_signal(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """[B] bool: the row is valid, and the valid rewards of its group are not all equal: there is something to learn."""
    groups = _Groups.of(rewards, group_ids, valid)
    return groups.valid & groups.differs[groups.index]


@dataclass(frozen=True)
class _Groups:
    """Rewards and the statistics of their groups, in float64."""

    index: torch.Tensor
    """[B] number of each row's group, 0 to G - 1."""
    valid: torch.Tensor
    """[B] bool."""
    count: torch.Tensor
    """[G] valid rows of each group, at least 1."""
    differs: torch.Tensor
    """[G] whether two valid rewards of the group differ."""
    centered: torch.Tensor
    """[B] reward minus its group's mean; meaningless where not valid."""

    @classmethod
    def of(cls, rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> _Groups:
        valid = valid.bool()
        _check(rewards, group_ids, valid)
        rewards = rewards.double()
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
        """As float32, exactly 0 for invalid rows and where equal rewards leave nothing but rounding."""
        return advantages_B.masked_fill(~(self.valid & self.differs[self.index]), 0).float()


def _check(rewards: torch.Tensor, group_ids: torch.Tensor, valid: torch.Tensor) -> None:
    shapes = {"rewards": list(rewards.shape), "group_ids": list(group_ids.shape), "valid": list(valid.shape)}
    if rewards.ndim != 1 or len({tuple(shape) for shape in shapes.values()}) > 1:
        raise DataError(f"rewards, group_ids and valid must each hold one value for each row, but have shapes {shapes}")
    rows = (valid & ~rewards.isfinite()).nonzero().flatten().tolist()
    if rows:
        shown = ", ".join(f"{row} ({rewards[row].item()})" for row in rows[:10])
        more = f" and {len(rows) - 10} more" if len(rows) > 10 else ""
        raise DataError(
            f"rewards must be finite, but those of rows {shown}{more} are not; "
            "mend the environment's reward, or drop those rows with sample_mask 0"
        )
