"""What a learner is told to do: everything about a run that is not a setting."""

from dataclasses import dataclass
from pathlib import Path

from learner.config import LearnerSettings
from runtime.problems.problem import Problem


@dataclass(frozen=True, slots=True)
class LearnerAssignment:
    """One run."""

    run_id: str
    """Name of the run, and the lineage of its weights: letters, digits, `.`, `_`, `-`."""
    run_folder: Path
    """Where everything that the run leaves behind goes."""
    model_folder: Path
    """The initial checkpoint: model and tokenizer."""
    seed: int
    """Decides the order of the prompts."""
    settings: LearnerSettings
    """How to learn."""
    problems: tuple[Problem, ...]
    """What to train on; one epoch."""
    num_rollout_servers: int
    """Training begins when this many rollout servers have registered."""
    num_reward_servers: int
    """And this many reward servers."""
    resume: bool = False
    """Go on from the newest complete checkpoint of the run folder; without one, from the beginning."""
