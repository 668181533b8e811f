"""Scores completions on a fleet of reward servers: the least loaded one first, another one if it cannot answer.

    RewardClientError
    ├── RewardUnavailableError   no server answered within the time
    └── RewardRefusedError       a server refused the request, and any other would

A wrong answer is no error, and neither is a grading that timed out or failed: that is an outcome, without a reward.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import structlog

from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from reward_service.outcome import DEFAULT_REWARD_FUNCTION, Outcome
from runtime.dialling import dial

__all__ = [
    "Outcome",
    "RewardClient",
    "RewardClientError",
    "RewardItem",
    "RewardRefusedError",
    "RewardScore",
    "RewardUnavailableError",
]

log = structlog.get_logger()

# Scoring has no effects, so it may be repeated wherever another server, or the same one later, may answer.
_RETRIED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
_FIRST_BACKOFF_SECONDS = 0.05
_LONGEST_BACKOFF_SECONDS = 2.0
# Long enough that a dead server is not asked first by every call, short enough that a restarted one is soon back.
_PASSED_OVER_SECONDS = 2.0
# A server that is gone for good would take every call's first attempt each time it is no longer passed over.
_MAX_FAILURES_IN_A_ROW = 10

_OUTCOMES = {
    reward_pb2.OUTCOME_CORRECT: Outcome.CORRECT,
    reward_pb2.OUTCOME_WRONG: Outcome.WRONG,
    reward_pb2.OUTCOME_NO_ANSWER: Outcome.NO_ANSWER,
    reward_pb2.OUTCOME_UNPARSABLE: Outcome.UNPARSABLE,
    reward_pb2.OUTCOME_TIMED_OUT: Outcome.TIMED_OUT,
    reward_pb2.OUTCOME_ERROR: Outcome.ERROR,
}


class RewardClientError(Exception):
    """Base of what this module raises."""


class RewardUnavailableError(RewardClientError):
    """No reward server answered within the time."""

    def __init__(self, addresses: Sequence[str], *, timeout_seconds: float, last_error: str) -> None:
        """Names the servers that are known and the last reason that one of them gave."""
        known = ", ".join(addresses) or "none known"
        super().__init__(f"no reward server ({known}) answered within {timeout_seconds:g} s: {last_error}")
        self.addresses = tuple(addresses)


class RewardRefusedError(RewardClientError):
    """A reward server refused the request."""

    def __init__(self, address: str, error: grpc.aio.AioRpcError) -> None:
        """Names the server, the status and its details."""
        super().__init__(f"reward server {address}: {error.code().name}: {error.details()}")
        self.address, self.code = address, error.code()


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One completion to score."""

    item_id: str
    """Distinct within a call, at most 128 characters; comes back with the score."""
    completion: str
    """The text that the model wrote, without its stop token."""
    reference_answer: str
    """The right answer, as text or LaTeX."""
    reward_function: str = DEFAULT_REWARD_FUNCTION
    """Name of the reward function."""


@dataclass(frozen=True, slots=True)
class RewardScore:
    """The score of one item."""

    item_id: str
    """As in the item."""
    outcome: Outcome
    """What happened."""
    reward: float | None
    """The reward; None for TIMED_OUT and ERROR, which are no reward at all: drop the sample."""
    extracted_answer: str
    """The answer that was found in the completion; empty if there is none."""
    reason: str
    """Why, in words, for every outcome but CORRECT and WRONG."""
    parts: dict[str, float] = field(default_factory=dict)
    """The parts that the reward is the sum of, by name."""


class _Replica:
    """One server: its channel, the items that are with it, and how long it is passed over after it failed."""

    def __init__(self, address: str, *, token: str | None) -> None:
        self.address = address
        self.num_outstanding = 0
        self.num_calls = 0
        self.passed_over_until = 0.0
        self.num_failures = 0
        """In a row; calls that fail while it is passed over already count as one."""
        self.failing_since = 0.0
        self.answered_at = 0.0
        self.is_removed = False
        self.channel = dial(address, token=token)
        self.stub = reward_pb2_grpc.RewardServiceStub(self.channel)


class RewardClient:
    """A fleet of reward servers, which may change at any time; one event loop only."""

    def __init__(self, *, token: str | None) -> None:
        self._token = token
        self._replicas: dict[str, _Replica] = {}

    @property
    def addresses(self) -> list[str]:
        """host:port of every server, in the order in which they came."""
        return list(self._replicas)

    async def add_server(self, address: str) -> None:
        """Adds the server at host:port; it is dialled when it is first asked. A known one is left as it is."""
        if address not in self._replicas:
            self._replicas[address] = _Replica(address, token=self._token)

    async def remove_server(self, address: str) -> None:
        """Takes a server out; what is with it may still end there. An unknown one is no error."""
        replica = self._replicas.pop(address, None)
        if replica is not None:
            replica.is_removed = True
            await self._close_if_unused(replica)

    async def close(self) -> None:
        """Hangs up everywhere; calls in flight are cancelled."""
        replicas = list(self._replicas.values())
        self._replicas.clear()
        for replica in replicas:
            await replica.channel.close()

    async def score(
        self, items: Sequence[RewardItem], *, group_id: str = "", timeout_seconds: float
    ) -> list[RewardScore]:
        """Scores items; one score an item, in the same order.

        Args:
            items: At least one; ids are distinct.
            group_id: Appears in the logs of the server.
            timeout_seconds: For the whole call, repetitions included.

        Raises:
            RewardUnavailableError: No server answered within the time.
            RewardRefusedError: A server refused the request.
        """
        request = reward_pb2.ScoreRequest(
            items=[
                reward_pb2.ScoreItem(
                    item_id=item.item_id,
                    reward_function=item.reward_function,
                    completion=item.completion,
                    reference_answer=item.reference_answer,
                )
                for item in items
            ],
            group_id=group_id,
        )
        response = await self._ask(request, timeout_seconds=timeout_seconds)
        return [
            RewardScore(
                item_id=score.item_id,
                outcome=_OUTCOMES[score.outcome],
                reward=score.reward if score.HasField("reward") else None,
                extracted_answer=score.extracted_answer,
                reason=score.reason,
                parts=dict(score.parts),
            )
            for score in response.scores
        ]

    async def _ask(self, request: reward_pb2.ScoreRequest, *, timeout_seconds: float) -> reward_pb2.ScoreResponse:
        """Asks one server after another, with growing pauses once every one has failed, until the time is over."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        backoff = _FIRST_BACKOFF_SECONDS
        last_error = "no server was added"
        while (left := deadline - clock()) > 0:
            replica = self._least_loaded()
            if replica is not None:
                try:
                    return await self._call(replica, request, timeout_seconds=left)
                except grpc.aio.AioRpcError as error:
                    last_error = f"{replica.address}: {error.code().name}: {error.details()}"
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        break
                    if error.code() not in _RETRIED:
                        raise RewardRefusedError(replica.address, error) from error
                    log.warning("reward server did not answer", error=last_error)
                if any(other.passed_over_until <= clock() for other in self._replicas.values()):
                    continue
            pause = random.uniform(backoff / 2, backoff)
            await asyncio.sleep(min(pause, max(0.0, deadline - clock())))
            backoff = min(2 * backoff, _LONGEST_BACKOFF_SECONDS)
        raise RewardUnavailableError(self.addresses, timeout_seconds=timeout_seconds, last_error=last_error)

    def _least_loaded(self) -> _Replica | None:
        """The server with the fewest items; one that has just failed only if all have."""
        now = asyncio.get_running_loop().time()
        return min(
            self._replicas.values(),
            key=lambda replica: (replica.passed_over_until > now, replica.num_outstanding, replica.num_calls),
            default=None,
        )

    async def _call(
        self, replica: _Replica, request: reward_pb2.ScoreRequest, *, timeout_seconds: float
    ) -> reward_pb2.ScoreResponse:
        replica.num_outstanding += len(request.items)
        replica.num_calls += 1
        try:
            response: reward_pb2.ScoreResponse = await replica.stub.Score(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            await self._note_failure(replica, error)
            raise
        else:
            replica.num_failures, replica.answered_at = 0, asyncio.get_running_loop().time()
            return response
        finally:
            replica.num_outstanding -= len(request.items)
            await self._close_if_unused(replica)

    async def _note_failure(self, replica: _Replica, error: grpc.aio.AioRpcError) -> None:
        """Passes the server over for a while, or takes it out if others answer and it has long not been there."""
        now = asyncio.get_running_loop().time()
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            replica.num_failures = 0
        elif now >= replica.passed_over_until:
            if replica.num_failures == 0:
                replica.failing_since = now
            replica.num_failures += 1
        replica.passed_over_until = now + _PASSED_OVER_SECONDS
        does_another_answer = any(other.answered_at > replica.failing_since for other in self._replicas.values())
        if replica.num_failures >= _MAX_FAILURES_IN_A_ROW and does_another_answer and not replica.is_removed:
            log.warning("reward server dropped", address=replica.address, num_failures=replica.num_failures)
            await self.remove_server(replica.address)

    @staticmethod
    async def _close_if_unused(replica: _Replica) -> None:
        if replica.is_removed and replica.num_outstanding == 0:
            await replica.channel.close()
