"""The settings of an evaluation."""

from typing import Annotated

from pydantic import Field

from runtime.settings import Settings


class EvaluationSettings(Settings):
    """How held-out accuracy is measured, and how often during a run."""

    num_problems: Annotated[int, Field(ge=1)] = 256
    """Held-out problems that are asked, the first ones; at most as many as there are."""
    max_tokens: Annotated[int, Field(ge=1)] = 8
    """Most tokens that a completion may have."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    every_steps: Annotated[int, Field(ge=0)] = 50
    """During a run, measured after every this many steps, while training goes on; 0 for never."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0
    """Deadline for a whole evaluation."""
    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Problems that are asked at the same time."""
