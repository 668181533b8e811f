"""The learning rate of every step."""

import math

from learner.config import LearnerSettings


def learning_rate_at(step: int, settings: LearnerSettings) -> float:
    """The learning rate of the step that makes policy version `step`.

    It rises linearly over the warm-up, and then stays, or falls to its floor at the run's last step: in a straight
    line, or along half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983). A run that goes on beyond what was its
    last step falls towards its new one.

    Args:
        step: From 1.
        settings: Of the run.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / (settings.warmup_steps + 1)
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.num_steps - settings.warmup_steps))
    above_floor = 1.0
    if settings.learning_rate_schedule == "linear":
        above_floor = 1.0 - progress
    elif settings.learning_rate_schedule == "cosine":
        above_floor = (1 + math.cos(math.pi * progress)) / 2
    floor = settings.learning_rate_floor
    return settings.learning_rate * (floor + (1 - floor) * above_floor)
