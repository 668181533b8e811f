"""The reward server over gRPC, with real workers."""

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from reward_service.client import Outcome, RewardClient, RewardItem, RewardRefusedError
from reward_service.config import RewardSettings
from reward_service.server import SERVICE, RewardServer, running
from runtime.dialling import dial
from runtime.serving import is_serving
from runtime.settings import ListenSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKEN = "a token of some length"


async def test_every_outcome_is_distinct(client: RewardClient, hanging_completion: str) -> None:
    items = [
        RewardItem("right", "So \\boxed{7}", "7"),
        RewardItem("wrong", "So \\boxed{8}", "7"),
        RewardItem("none", "So 7", "7"),
        RewardItem("unparsable", "So \\boxed{&&&}", "7"),
        RewardItem("hanging", hanging_completion, "7"),
        RewardItem("broken", "So \\boxed{x}", "&&&"),
    ]

    scores = await client.score(items, group_id="group-1", timeout_seconds=60.0)

    assert [(score.item_id, score.outcome, score.reward) for score in scores] == [
        ("right", Outcome.CORRECT, 1.0),
        ("wrong", Outcome.WRONG, 0.0),
        ("none", Outcome.NO_ANSWER, 0.0),
        ("unparsable", Outcome.UNPARSABLE, 0.0),
        ("hanging", Outcome.TIMED_OUT, None),
        ("broken", Outcome.ERROR, None),
    ]
    assert [score.extracted_answer for score in scores[:2]] == ["7", "8"]
    assert [bool(score.reason) for score in scores] == [False, False, True, True, True, True]
    assert scores[0].parts == {"math": 1.0}


async def test_a_hundred_items_beside_a_hanging_one_get_their_rewards(
    client: RewardClient, hanging_completion: str
) -> None:
    items = [RewardItem(str(number), f"\\boxed{{{number}}}", "7") for number in range(100)]
    items.insert(50, RewardItem("hanging", hanging_completion, "7"))

    scores = {score.item_id: score for score in await client.score(items, timeout_seconds=60.0)}

    assert scores.pop("hanging").outcome is Outcome.TIMED_OUT
    assert {item_id for item_id, score in scores.items() if score.reward == 1.0} == {"7"}
    assert {score.outcome for score in scores.values()} == {Outcome.CORRECT, Outcome.WRONG}


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"items": []}, "items = 0 items: must be at least 1 and at most 200"),
        ({"items": [{"item_id": str(n)} for n in range(201)]}, "items = 201 items: must be at least 1 and at most 200"),
        (
            {"items": [{}], "group_id": "g" * 129},
            "group_id = 129 characters: must be at most 128",
        ),
        ({"items": [{"item_id": "i" * 129}]}, "items[0].item_id = 129 characters: must be at most 128"),
        (
            {"items": [{"item_id": "a", "reference_answer": "1"}] * 2},
            "items[1].item_id = a: must be unique within the request",
        ),
        ({"items": [{"reward_function": "maths"}]}, "items[0].reward_function = maths: must be one of math"),
        ({"items": [{}]}, "items[0].reference_answer = '': must be at least 1 character long"),
        (
            {"items": [{"reference_answer": "1" * 101}]},
            "reference_answer = 101 characters: must be at most 100",
        ),
    ],
)
async def test_a_bad_field_is_refused_by_name_value_and_bound(
    server: RewardServer, request_fields: dict[str, Any], message: str
) -> None:
    async with dial(server.address, token=None) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Score(reward_pb2.ScoreRequest(**request_fields), timeout=10.0)

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")


async def test_an_empty_reward_function_means_math(server: RewardServer) -> None:
    async with dial(server.address, token=None) as channel:
        item = reward_pb2.ScoreItem(item_id="1", completion="\\boxed{7}", reference_answer="7")

        response = await reward_pb2_grpc.RewardServiceStub(channel).Score(
            reward_pb2.ScoreRequest(items=[item]), timeout=10.0
        )

    assert response.scores[0].outcome == reward_pb2.OUTCOME_CORRECT


async def test_a_caller_without_the_token_is_turned_away() -> None:
    async with running(RewardSettings(num_workers=1), token=TOKEN) as server:
        await server.is_serving.wait()
        item = RewardItem("1", "\\boxed{7}", "7")
        stranger, friend = RewardClient(token=None), RewardClient(token=TOKEN)
        await stranger.add_server(server.address)
        await friend.add_server(server.address)

        with pytest.raises(RewardRefusedError, match="UNAUTHENTICATED"):
            await stranger.score([item], timeout_seconds=10.0)
        assert (await friend.score([item], timeout_seconds=10.0))[0].outcome is Outcome.CORRECT
        await stranger.close()
        await friend.close()


async def test_off_loopback_a_token_is_required() -> None:
    settings = RewardSettings(num_workers=1, listen=ListenSettings(host="0.0.0.0"))

    with pytest.raises(ValueError, match="a token is required"):
        async with running(settings, token=None):
            pass


async def test_health_says_serving_only_after_a_worker_has_graded() -> None:
    async with (
        running(RewardSettings(num_workers=1), token=None) as server,
        dial(server.address, token=None) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)

        assert not await is_serving(health, service=SERVICE)
        await server.is_serving.wait()
        assert await is_serving(health, service=SERVICE)


async def test_a_server_process_announces_itself_and_ends_with_its_workers(
    start_server_process: Callable[[str], Any],
    is_running: Callable[[int], bool],
    read_metrics: Callable[[str], Awaitable[str]],
) -> None:
    server = start_server_process("RewardSettings(num_workers=1)")
    workers = server.worker_pids
    metrics = await read_metrics(server.ready.metrics_address)

    server.process.send_signal(signal.SIGTERM)

    assert server.process.wait(timeout=10.0) == 0
    assert server.ready.pid == server.process.pid
    assert 'tandem_reward_answers_total{outcome="correct"} 1.0' in metrics
    assert "tandem_reward_workers 1.0" in metrics
    assert len(workers) == 1
    assert not is_running(workers[0])


async def test_a_busy_worker_ends_with_a_killed_server(
    start_server_process: Callable[[str], Any],
    is_running: Callable[[int], bool],
    eventually: Callable[[Callable[[], bool]], Awaitable[None]],
    hanging_completion: str,
) -> None:
    server = start_server_process("RewardSettings(num_workers=1, timeout_seconds=60)")
    (worker,) = server.worker_pids
    async with dial(server.ready.address, token=None) as channel:
        item = reward_pb2.ScoreItem(item_id="1", completion=hanging_completion, reference_answer="7")
        with pytest.raises(grpc.aio.AioRpcError):
            await reward_pb2_grpc.RewardServiceStub(channel).Score(reward_pb2.ScoreRequest(items=[item]), timeout=0.3)

        os.kill(server.process.pid, signal.SIGKILL)

    await eventually(lambda: not is_running(worker))
