"""The record of one problem: what is asked and what the right answer is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with a verifiable answer.

    Attributes:
        problem_id: Distinct within a dataset, stable between runs of the same settings.
        prompt: The text that is tokenised as it stands; any template has been applied already.
        answer: The reference answer, without a box around it.
        kind: The class of problem that accuracy is broken down by, e.g. "sum".
    """

    problem_id: str
    prompt: str
    answer: str
    kind: str
