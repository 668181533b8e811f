"""Group advantages: centred, of unit deviation, never NaN."""

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.advantage import group_advantages

rewards_of_groups = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


def test_one_right_of_four() -> None:
    root = math.sqrt(3)
    assert group_advantages([0, 0, 1, 0]) == pytest.approx([-1 / root, -1 / root, root, -1 / root])


def test_equal_rewards_give_zero_advantage() -> None:
    assert group_advantages([0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        group_advantages([1.0])


@given(rewards_of_groups)
def test_advantages_are_finite(rewards: list[float]) -> None:
    assert all(math.isfinite(advantage) for advantage in group_advantages(rewards))


@given(st.lists(st.integers(0, 10), min_size=2, max_size=16).filter(lambda rewards: len(set(rewards)) > 1))
def test_advantages_are_centred_with_unit_deviation(rewards: list[int]) -> None:
    advantages = group_advantages([float(reward) for reward in rewards])
    assert fmean(advantages) == pytest.approx(0, abs=1e-9)
    assert pstdev(advantages) == pytest.approx(1)


@given(rewards_of_groups)
def test_a_better_reward_has_no_lower_advantage(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    ranked = [advantage for _reward, advantage in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(ranked)
