"""A reward server that a test tells how to score."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from runtime.interceptors import Context
from runtime.serving import Listener

REWARDS = {
    reward_pb2.OUTCOME_CORRECT: 1.0,
    reward_pb2.OUTCOME_WRONG: 0.0,
    reward_pb2.OUTCOME_TIMED_OUT: None,
    reward_pb2.OUTCOME_ERROR: None,
}


def first_is_correct(sample_id: str) -> reward_pb2.Outcome:
    return reward_pb2.OUTCOME_CORRECT if sample_id.endswith("-s0") else reward_pb2.OUTCOME_WRONG


class ScriptedRewards(reward_pb2_grpc.RewardServiceServicer):
    """Scores by sample id, once its gate is open, and remembers what it was asked."""

    def __init__(self, outcome_of: Callable[[str], reward_pb2.Outcome] = first_is_correct) -> None:
        self.outcome_of = outcome_of
        self.items: list[reward_pb2.ScoreItem] = []
        self.asked = asyncio.Semaphore(0)
        """Released when a call comes."""
        self.gate = asyncio.Event()
        """A call waits for it; set at first."""
        self.gate.set()

    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
        self.items += request.items
        self.asked.release()
        await self.gate.wait()
        scores = []
        for item in request.items:
            outcome = self.outcome_of(item.item_id)
            scores.append(reward_pb2.Score(item_id=item.item_id, outcome=outcome, reward=REWARDS[outcome]))
        return reward_pb2.ScoreResponse(scores=scores)


@asynccontextmanager
async def scripted_reward_server(servicer: ScriptedRewards) -> AsyncIterator[str]:
    """Serves on a free port and yields its address."""
    listener = await Listener.start(
        host="127.0.0.1",
        port=0,
        services=["protos.reward.v1.RewardService"],
        register=[partial(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer)],
        token=None,
    )
    await listener.set_serving(True)
    try:
        yield listener.address
    finally:
        await listener.stop(drain_seconds=0)
