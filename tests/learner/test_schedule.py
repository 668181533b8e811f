"""The learning rate rises, and then stays or falls to its floor."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.config import LearnerSettings
from learner.schedule import learning_rate_at


def settings(schedule: str, **changes: float) -> LearnerSettings:
    values = {"num_steps": 104, "warmup_steps": 4, "learning_rate": 2.0, "learning_rate_floor": 0.1} | changes
    return LearnerSettings.model_validate(values | {"learning_rate_schedule": schedule})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_is_a_straight_line(schedule: str) -> None:
    rates = [learning_rate_at(step, settings(schedule)) for step in range(1, 5)]

    assert rates == pytest.approx([0.4, 0.8, 1.2, 1.6])


@pytest.mark.parametrize(
    ("schedule", "halfway", "last"),
    [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)],
)
def test_the_floor_is_reached_with_the_last_step(schedule: str, halfway: float, last: float) -> None:
    assert learning_rate_at(54, settings(schedule)) == pytest.approx(halfway)
    assert learning_rate_at(104, settings(schedule)) == pytest.approx(last)
    assert learning_rate_at(500, settings(schedule)) == pytest.approx(last)


def test_a_cosine_is_slow_at_both_ends() -> None:
    at_a_tenth = learning_rate_at(14, settings("cosine", learning_rate_floor=0.0))

    assert at_a_tenth == pytest.approx(1 + math.cos(math.pi / 10))


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    step=st.integers(5, 300),
    floor=st.floats(0, 1),
)
def test_it_never_rises_after_the_warm_up_nor_falls_below_the_floor(schedule: str, step: int, floor: float) -> None:
    chosen = settings(schedule, learning_rate_floor=floor)
    now, then = (learning_rate_at(at, chosen) for at in (step, step + 1))

    assert then <= now + 1e-12
    assert 2.0 * floor - 1e-9 <= then <= 2.0 + 1e-9


def test_a_run_of_one_step_has_a_rate() -> None:
    assert learning_rate_at(1, settings("linear", num_steps=1, warmup_steps=0)) == pytest.approx(0.2)
