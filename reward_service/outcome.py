"""What a grading can come to: the records that the grader, the pool, the service and the client share."""

from dataclasses import dataclass, field
from enum import StrEnum

REWARD_FUNCTIONS = ("math",)
"""Names that an item may ask for."""
DEFAULT_REWARD_FUNCTION = "math"
"""What an item gets that asks for none."""

MAX_EXTRACTED_CHARS = 1_000
"""An extracted answer is cut at this length."""
MAX_REASON_CHARS = 200
"""A reason is cut at this length."""


class Outcome(StrEnum):
    """What happened to an item; the value is its label in metrics."""

    CORRECT = "correct"
    """The answer equals the reference answer."""
    WRONG = "wrong"
    """It does not."""
    NO_ANSWER = "no_answer"
    """The completion has no answer."""
    UNPARSABLE = "unparsable"
    """There is an answer, and it cannot be read, or is beyond the size limits."""
    TIMED_OUT = "timed_out"
    """The worker was killed at the deadline. No reward."""
    ERROR = "error"
    """The grader failed. No reward."""


@dataclass(frozen=True, slots=True)
class Item:
    """What is graded."""

    reward_function: str
    """One of REWARD_FUNCTIONS."""
    completion: str
    """The text that the model wrote."""
    reference_answer: str
    """The right answer, as text or LaTeX."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """Sizes beyond which an answer is not parsed; the parser's time and memory grow without bound in them."""

    max_completion_chars: int
    """Longest completion that is searched for an answer."""
    max_answer_chars: int
    """Longest answer that is parsed."""
    max_answer_depth: int
    """Deepest nesting of brackets in an answer that is parsed."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What a reward function says of one completion."""

    outcome: Outcome
    """What happened."""
    reward: float | None
    """The reward; None for TIMED_OUT and ERROR, which are no reward at all."""
    extracted_answer: str = ""
    """The answer that was found; empty if there is none; cut at MAX_EXTRACTED_CHARS."""
    reason: str = ""
    """Why, in words, for every outcome but CORRECT and WRONG; cut at MAX_REASON_CHARS."""
    parts: dict[str, float] = field(default_factory=dict)
    """The parts that the reward is the sum of, by name."""
