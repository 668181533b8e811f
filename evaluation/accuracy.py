"""Held-out accuracy: one completion a problem from live rollout servers, scored by the reward service."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.config import EvaluationSettings
from reward_service.client import Outcome, RewardClient, RewardClientError, RewardItem
from rollout_server.client import GroupRequest, Rollout, RolloutError, RolloutFleet, Sampling
from runtime.problems.problem import Problem
from runtime.problems.tokenizer import TextTokenizer

_NO_REWARD = frozenset({Outcome.TIMED_OUT, Outcome.ERROR})


class EvaluationError(Exception):
    """An evaluation could not be finished: a server refused, or not all answers came in time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One problem as the model answered it.

    Attributes:
        problem: What was asked.
        completion: The model's text, without its stop token.
        outcome: What the reward service says.
        num_tokens: Tokens of the completion, the stop token included.
        policy_versions: The lowest and the highest policy version that sampled a token of it.
    """

    problem: Problem
    completion: str
    outcome: Outcome
    num_tokens: int
    policy_versions: tuple[int, int]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The accuracy on a list of problems.

    Attributes:
        accuracy: Share of the scored problems whose answer is correct, in [0, 1].
        standard_error: Of the accuracy, as of a share of independent answers.
        num_correct: Problems with a correct answer.
        num_problems: Problems that were scored.
        num_unscored: Problems whose grading timed out or failed; they count nowhere else.
        policy_versions: The lowest and the highest policy version that sampled a token.
        response_tokens_mean: Tokens of a completion, the stop token included.
        seconds: How long the evaluation took.
        accuracy_by_kind: The same share for each kind of problem.
    """

    accuracy: float
    standard_error: float
    num_correct: int
    num_problems: int
    num_unscored: int
    policy_versions: tuple[int, int]
    response_tokens_mean: float
    seconds: float
    accuracy_by_kind: dict[str, float]


async def evaluate(
    problems: Sequence[Problem],
    *,
    tokenizer: TextTokenizer,
    fleet: RolloutFleet,
    rewards: RewardClient,
    settings: EvaluationSettings,
    exact_policy_version: int | None = None,
    min_policy_version: int | None = None,
) -> EvaluationResult:
    """Measures the accuracy on the first `settings.num_problems` problems, whatever else the servers do meanwhile.

    Args:
        problems: At least one.
        tokenizer: That of the model which is served.
        fleet: The rollout servers.
        rewards: The reward services.
        settings: How many problems, how to sample, how long.
        exact_policy_version: Only tokens of this policy version; None for any.
        min_policy_version: Only servers with at least this policy version; None for any.

    Raises:
        ValueError: No problem.
        EvaluationError: A server refused, not all answers came in time, or none could be scored.
    """
    if not problems:
        raise ValueError("problems: must be at least one")
    begin = time.monotonic()
    sampling = Sampling(temperature=settings.temperature, max_tokens=settings.max_tokens)
    places = asyncio.Semaphore(settings.max_concurrent)

    async def answer(problem: Problem) -> Answer:
        async with places:
            request = GroupRequest(
                group_id=f"evaluation/{problem.problem_id}",
                prompt_token_ids=tuple(tokenizer.encode(problem.prompt)),
                sample_ids=("0",),
                sampling=sampling,
            )
            (rollout,) = await fleet.generate_group(
                request,
                timeout_seconds=settings.timeout_seconds,
                exact_policy_version=exact_policy_version,
                min_policy_version=min_policy_version,
            )
            completion = _text(rollout, tokenizer=tokenizer)
            item = RewardItem(item_id="0", completion=completion, reference_answer=problem.answer)
            (score,) = await rewards.score([item], timeout_seconds=settings.timeout_seconds)
            versions = [span.policy_version for span in rollout.version_spans]
            return Answer(problem, completion, score.outcome, len(rollout.token_ids), (min(versions), max(versions)))

    try:
        async with asyncio.timeout(settings.timeout_seconds), asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(answer(problem)) for problem in problems[: settings.num_problems]]
    except TimeoutError as error:
        raise EvaluationError(f"not all answers came within {settings.timeout_seconds:g} s") from error
    except ExceptionGroup as group:
        _, ours = group.split((RolloutError, RewardClientError))
        if ours is not None:
            raise ours from group
        raise EvaluationError(str(group.exceptions[0])) from group
    return summarise([task.result() for task in asked], seconds=time.monotonic() - begin)


def summarise(answers: Sequence[Answer], *, seconds: float) -> EvaluationResult:
    """The accuracy of answers; those without a score are counted and left out.

    Raises:
        EvaluationError: None of them has a score.
    """
    scored = [answer for answer in answers if answer.outcome not in _NO_REWARD]
    if not scored:
        raise EvaluationError(f"none of {len(answers)} answers could be scored: see the reward service's log")
    num_correct = _num_correct(scored)
    accuracy = num_correct / len(scored)
    by_kind = {
        kind: [answer for answer in scored if answer.problem.kind == kind]
        for kind in sorted({answer.problem.kind for answer in scored})
    }
    return EvaluationResult(
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(scored)),
        num_correct=num_correct,
        num_problems=len(scored),
        num_unscored=len(answers) - len(scored),
        policy_versions=(
            min(answer.policy_versions[0] for answer in answers),
            max(answer.policy_versions[1] for answer in answers),
        ),
        response_tokens_mean=sum(answer.num_tokens for answer in answers) / len(answers),
        seconds=seconds,
        accuracy_by_kind={kind: _num_correct(those) / len(those) for kind, those in by_kind.items()},
    )


def _num_correct(answers: Sequence[Answer]) -> int:
    return sum(answer.outcome is Outcome.CORRECT for answer in answers)


def _text(rollout: Rollout, *, tokenizer: TextTokenizer) -> str:
    """The completion without its stop token, which need not be a special token that decoding leaves out."""
    is_stopped = rollout.stop_token_id is not None and rollout.token_ids[-1:] == (rollout.stop_token_id,)
    return tokenizer.decode(rollout.token_ids[:-1] if is_stopped else rollout.token_ids)
