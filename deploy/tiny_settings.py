"""What decides the tiny model; read without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WarmUpSettings:
    """How long and on what the tiny model is taught before reinforcement learning.

    Attributes:
        num_steps: Optimizer steps on right answers.
        max_careless_steps: Most optimizer steps after that on the answers of careless pupils.
        careless_share: How many of their answers are mistaken, in the kinds that have a mistake.
        careless_accuracy: They end as soon as the model's greedy answers are right no more often than this.
        batch_size: Problems per step.
        learning_rate: Peak; falls to a tenth over the second half of `num_steps`.
        careless_learning_rate: Constant.
    """

    num_steps: int = 240
    max_careless_steps: int = 64
    careless_share: float = 0.7
    careless_accuracy: float = 0.32
    batch_size: int = 64
    learning_rate: float = 3e-3
    careless_learning_rate: float = 5e-4

    @property
    def max_steps(self) -> int:
        """Most optimizer steps of both parts."""
        return self.num_steps + self.max_careless_steps

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step >= self.num_steps:
            return self.careless_learning_rate
        rise = min(1.0, (step + 1) / 10)
        fall = min(1.0, max(0.1, 2 * (1 - step / self.num_steps)))
        return self.learning_rate * rise * fall


@dataclass(frozen=True, slots=True)
class TinyModelSettings:
    """Everything but the seed that decides the tiny model.

    Attributes:
        hidden_size: Width of the residual stream.
        num_layers: Transformer blocks.
        num_heads: Attention heads of 32 dimensions each, the smallest size that vLLM's CPU attention has.
        intermediate_size: Width of the feed-forward layers.
        num_problems: Size of the training list that the warm-up draws from.
        warm_up: The supervised part.
    """

    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 6
    intermediate_size: int = 704
    num_problems: int = 3000
    warm_up: WarmUpSettings = field(default_factory=WarmUpSettings)
