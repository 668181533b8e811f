"""Everything that moves through the learner, from a prompt to a scored group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the prompt source issued it.

    Attributes:
        prompt_id: Distinct within a run and readable: epoch and place within it, e.g. "e0-p17".
        position: Its count in the endless seeded order, from 0; distinct within a run.
        problem_id: The problem behind it; comes back once an epoch.
        token_ids: What the rollout server is asked to continue.
        reference_answer: What the reward service compares with.
    """

    prompt_id: str
    position: int
    problem_id: str
    token_ids: tuple[int, ...]
    reference_answer: str


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One completion with everything that the loss and the ledger need.

    Attributes:
        sample_id: The ledger's key.
        token_ids: The completion, its stop token included; at least one token.
        behaviour_logprobs: Of each token under the weights and the temperature that sampled it.
        version_spans: (first_token, policy_version) of each run of tokens that one version sampled; the first
            begins at token 0, and both numbers rise.
        finish_reason: "stop" or "length".
        reward: What the reward service returned.
        outcome: The reward service's outcome, e.g. "correct".
        advantage: The reward relative to the group's.
    """

    sample_id: str
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    version_spans: tuple[tuple[int, int], ...]
    finish_reason: str
    reward: float
    outcome: str
    advantage: float

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of the tokens."""
        return min(version for _first_token, version in self.version_spans)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Every rollout of one prompt, scored and with advantages."""

    group_id: str
    prompt: Prompt
    rollouts: tuple[ScoredRollout, ...]
