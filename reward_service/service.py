"""RewardService: checks a request, has its items graded, answers."""

import structlog

from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from reward_service.config import RewardSettings
from reward_service.outcome import DEFAULT_REWARD_FUNCTION, REWARD_FUNCTIONS, Grade, Item, Outcome
from reward_service.pool import WorkerPool
from runtime.errors import InvalidRequestError
from runtime.grpc_options import MAX_ID_CHARACTERS

log = structlog.get_logger()

_OUTCOMES = {
    Outcome.CORRECT: reward_pb2.OUTCOME_CORRECT,
    Outcome.WRONG: reward_pb2.OUTCOME_WRONG,
    Outcome.NO_ANSWER: reward_pb2.OUTCOME_NO_ANSWER,
    Outcome.UNPARSABLE: reward_pb2.OUTCOME_UNPARSABLE,
    Outcome.TIMED_OUT: reward_pb2.OUTCOME_TIMED_OUT,
    Outcome.ERROR: reward_pb2.OUTCOME_ERROR,
}


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves `protos.reward.v1.RewardService` from a pool."""

    def __init__(self, pool: WorkerPool, settings: RewardSettings) -> None:
        self._pool, self._settings = pool, settings

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        """Grades the items of a request.

        Raises:
            InvalidRequestError: A field is out of its bounds.
            BusyError: Too many items are queued.
            UnavailableError: The pool cannot grade.
        """
        _check_request(request, self._settings)
        items = [
            Item(item.reward_function or DEFAULT_REWARD_FUNCTION, item.completion, item.reference_answer)
            for item in request.items
        ]
        grades = await self._pool.score(items)
        scores = [_score(item.item_id, grade) for item, grade in zip(request.items, grades, strict=True)]
        for item, grade in zip(request.items, grades, strict=True):
            if grade.reward is None:
                log.warning(
                    "no reward",
                    group_id=request.group_id,
                    item_id=item.item_id,
                    outcome=grade.outcome.value,
                    reason=grade.reason,
                )
        return reward_pb2.ScoreResponse(scores=scores)


def _score(item_id: str, grade: Grade) -> reward_pb2.Score:
    return reward_pb2.Score(
        item_id=item_id,
        outcome=_OUTCOMES[grade.outcome],
        reward=grade.reward,
        extracted_answer=grade.extracted_answer,
        reason=grade.reason,
        parts=grade.parts,
    )


def _check_request(request: reward_pb2.ScoreRequest, settings: RewardSettings) -> None:
    num_items, most = len(request.items), settings.max_queued_items
    if not 1 <= num_items <= most:
        raise InvalidRequestError("items", f"{num_items} items", f"at least 1 and at most {most}")
    _check_length("group_id", request.group_id, MAX_ID_CHARACTERS)
    ids: set[str] = set()
    for index, item in enumerate(request.items):
        field = f"items[{index}]"
        _check_length(f"{field}.item_id", item.item_id, MAX_ID_CHARACTERS)
        if item.item_id in ids:
            raise InvalidRequestError(f"{field}.item_id", item.item_id, "unique within the request")
        ids.add(item.item_id)
        if item.reward_function and item.reward_function not in REWARD_FUNCTIONS:
            raise InvalidRequestError(
                f"{field}.reward_function", item.reward_function, f"one of {', '.join(REWARD_FUNCTIONS)}"
            )
        if not item.reference_answer:
            raise InvalidRequestError(f"{field}.reference_answer", "''", "at least 1 character long")
        _check_length(f"{field}.reference_answer", item.reference_answer, settings.max_answer_chars)


def _check_length(field: str, value: str, most: int) -> None:
    if len(value) > most:
        raise InvalidRequestError(field, f"{len(value)} characters", f"at most {most} characters long")
