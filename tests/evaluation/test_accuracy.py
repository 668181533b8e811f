"""Held-out accuracy over real gRPC: a scripted rollout server, and a real reward server where scoring matters."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from evaluation.accuracy import Answer, EvaluationError, evaluate, summarise
from evaluation.config import EvaluationSettings
from reward_service.client import Outcome, RewardClient
from reward_service.config import RewardSettings
from reward_service.server import running
from rollout_server.client import RolloutFleet
from runtime.problems.problem import Problem
from runtime.problems.tokenizer import TextTokenizer, load_tokenizer
from tests.evaluation.scripted_rollout_server import (
    STOP_TOKEN_ID,
    ScriptedRolloutServicer,
    scripted_rollout_server,
)

WORDS = ["<pad>", "<eos>", "\\boxed{", "}", "one", "two", "0", "1", "2", "3"]
SETTINGS = EvaluationSettings(num_problems=100, max_tokens=8, timeout_seconds=20)


def _problem(index: int, prompt: str, answer: str, kind: str = "sum") -> Problem:
    return Problem(problem_id=str(index), prompt=prompt, answer=answer, kind=kind)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path)


def _script(prompt: tuple[int, ...]) -> list[int]:
    """Answers 1 to `one` and 3 to anything else."""
    digit = "1" if prompt == (WORDS.index("one"),) else "3"
    return [WORDS.index("\\boxed{"), WORDS.index(digit), WORDS.index("}"), STOP_TOKEN_ID]


@pytest_asyncio.fixture
async def servicer() -> ScriptedRolloutServicer:
    return ScriptedRolloutServicer(_script)


@pytest_asyncio.fixture
async def fleet(servicer: ScriptedRolloutServicer) -> AsyncIterator[RolloutFleet]:
    fleet = RolloutFleet(token=None)
    async with scripted_rollout_server(servicer) as address:
        await fleet.add_server(address, timeout_seconds=5)
        yield fleet
        await fleet.close()


@pytest_asyncio.fixture
async def rewards() -> AsyncIterator[RewardClient]:
    client = RewardClient(token=None)
    async with running(RewardSettings(num_workers=1), token=None) as server:
        await client.add_server(server.address)
        await server.pool.wait_until(can_grade=True)
        yield client
        await client.close()


@pytest.mark.slow
async def test_accuracy_is_the_share_of_correct_answers(
    tokenizer: TextTokenizer, fleet: RolloutFleet, rewards: RewardClient
) -> None:
    problems = [
        _problem(0, "one", "1", "small"),
        _problem(1, "two", "2"),
        _problem(2, "one", "1"),
        _problem(3, "0", "0"),
    ]

    result = await evaluate(problems, tokenizer=tokenizer, fleet=fleet, rewards=rewards, settings=SETTINGS)

    assert (result.num_correct, result.num_problems, result.num_unscored) == (2, 4, 0)
    assert result.accuracy == 0.5
    assert result.standard_error == pytest.approx(0.25)
    assert result.accuracy_by_kind == {"small": 1.0, "sum": pytest.approx(1 / 3)}
    assert result.policy_versions == (0, 0)
    assert result.response_tokens_mean == 4


async def test_an_answer_from_another_version_than_the_pinned_one_is_no_answer(
    tokenizer: TextTokenizer, fleet: RolloutFleet
) -> None:
    settings = SETTINGS.model_copy(update={"timeout_seconds": 0.5})

    with pytest.raises(EvaluationError):
        await evaluate(
            [_problem(0, "one", "1")],
            tokenizer=tokenizer,
            fleet=fleet,
            rewards=RewardClient(token=None),
            settings=settings,
            exact_policy_version=7,
        )


async def test_a_reward_service_that_does_not_answer_fails_the_evaluation(
    tokenizer: TextTokenizer, fleet: RolloutFleet
) -> None:
    settings = SETTINGS.model_copy(update={"timeout_seconds": 0.5})

    with pytest.raises(EvaluationError):
        await evaluate(
            [_problem(0, "one", "1")],
            tokenizer=tokenizer,
            fleet=fleet,
            rewards=RewardClient(token=None),
            settings=settings,
        )


def _answer(outcome: Outcome, *, version: int = 0) -> Answer:
    return Answer(_problem(0, "one", "1"), "", outcome, num_tokens=2, policy_versions=(version, version))


def test_gradings_that_failed_are_left_out_and_counted() -> None:
    answers = [_answer(Outcome.CORRECT, version=3), _answer(Outcome.TIMED_OUT), _answer(Outcome.ERROR, version=5)]

    result = summarise(answers, seconds=1.0)

    assert (result.accuracy, result.num_problems, result.num_unscored) == (1.0, 1, 2)
    assert result.policy_versions == (0, 5)


def test_nothing_scored_is_no_accuracy() -> None:
    with pytest.raises(EvaluationError, match="none of 1 answers could be scored"):
        summarise([_answer(Outcome.ERROR)], seconds=1.0)


async def test_no_problem_is_refused(tokenizer: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="at least one"):
        await evaluate(
            [],
            tokenizer=tokenizer,
            fleet=RolloutFleet(token=None),
            rewards=RewardClient(token=None),
            settings=SETTINGS,
        )
