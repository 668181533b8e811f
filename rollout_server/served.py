"""Whose weights a server serves."""

from dataclasses import dataclass


@dataclass(slots=True)
class ServedWeights:
    """The one mutable record of it; WeightService writes, RolloutService reads."""

    lineage: str = ""
    """Run id of the learner that pushed them; empty for those loaded at start."""
    policy_version: int = 0
    """Optimizer steps behind them, within the lineage."""
