"""What is asked for and what comes back, as both ends of a rollout server say it."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one completion."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    max_tokens: int = 16
    """Most tokens of the completion."""
    top_p: float = 1.0
    """Mass of tokens to keep; 1 is off."""
    top_k: int = 0
    """Number of tokens to keep; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion besides the model's own."""
    ignore_stop_tokens: bool = False
    """Go on after a stop token."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A run of tokens that one policy version sampled."""

    first_token: int
    policy_version: int
