"""Rewards of a group to advantages."""

from collections.abc import Sequence
from statistics import fmean, pstdev


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Centre the rewards of one group and scale them to unit deviation.

    Args:
        rewards: One per rollout of the group; at least two, all finite.

    Returns:
        One advantage per rollout, in the same order: (reward - mean) / deviation, the deviation being that of the
        group itself (division by n); all zero if the rewards are equal.

    Raises:
        ValueError: Fewer than two rewards.

    Source: Shao et al. 2024, arXiv 2402.03300, outcome supervision.
    """
    if len(rewards) < 2:
        raise ValueError(f"rewards has {len(rewards)} entries: a group must have at least 2")
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean, deviation = fmean(rewards), pstdev(rewards)
    # Rewards apart by less than the rounding of their squares have a deviation of 0 without being equal.
    return [(reward - mean) / deviation for reward in rewards] if deviation > 0 else [0.0] * len(rewards)
