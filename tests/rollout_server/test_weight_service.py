"""JoinGroup to Resume over real gRPC, with a scripted engine behind them."""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from protos.rollout.v1 import weights_pb2
from rollout_server.served import ServedWeights
from rollout_server.weight_service import WeightServicer
from runtime.weights.manifest import TensorEntry, WeightManifest
from tests.rollout_server.scripted_engine import ScriptedEngine
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

PAUSE = weights_pb2.PauseRequest(timeout_seconds=0.2)
NO_CONTEXT: Any = None
MANIFEST = WeightManifest.make([TensorEntry("weight", "float32", (2, 3))], bucket_bytes=1024)


async def join(server: ScriptedServer, *, epoch: int = 1, **fields: Any) -> weights_pb2.JoinGroupResponse:
    values = {
        "run_id": "run",
        "store_host": "127.0.0.1",
        "store_port": 29_500,
        "world_size": 2,
        "first_rank": 1,
        "transport": "gloo",
        "manifest": MANIFEST.to_proto(),
        "timeout_seconds": 10,
        **fields,
    }
    answer: weights_pb2.JoinGroupResponse = await server.weights.JoinGroup(
        weights_pb2.JoinGroupRequest(epoch=epoch, **values), timeout=5
    )
    return answer


async def stage(server: ScriptedServer, version: int, *, epoch: int = 1, timeout_seconds: float = 10) -> None:
    message = weights_pb2.StageWeightsRequest(
        run_id="run", epoch=epoch, policy_version=version, timeout_seconds=timeout_seconds
    )
    await server.weights.StageWeights(message, timeout=5)


async def commit(server: ScriptedServer, version: int, *, epoch: int = 1) -> weights_pb2.CommitWeightsResponse:
    message = weights_pb2.CommitWeightsRequest(run_id="run", epoch=epoch, policy_version=version)
    answer: weights_pb2.CommitWeightsResponse = await server.weights.CommitWeights(message, timeout=5)
    return answer


async def abort(server: ScriptedServer, *, epoch: int = 1) -> None:
    await server.weights.AbortWeights(weights_pb2.AbortWeightsRequest(run_id="run", epoch=epoch), timeout=5)


async def pause(server: ScriptedServer, *, timeout_seconds: float) -> None:
    await server.weights.Pause(weights_pb2.PauseRequest(timeout_seconds=timeout_seconds), timeout=5)


def refused(code: grpc.StatusCode, *words: str) -> Any:
    def is_it(error: grpc.aio.AioRpcError) -> bool:
        return error.code() is code and all(word in (error.details() or "") for word in words)

    return pytest.raises(grpc.aio.AioRpcError, check=is_it)


WRONG_STATE = grpc.StatusCode.FAILED_PRECONDITION
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_a_push_is_staged_and_committed(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 1)
    answer = await commit(server, 1)

    assert server.engine.calls == ["join 1", "stage 1", "commit 1"]
    assert (server.served.lineage, server.served.policy_version) == ("run", 1)
    assert (answer.stopped_seconds, answer.apply_seconds) == (0.2, 0.1)


async def test_a_repeated_join_changes_nothing(server: ScriptedServer) -> None:
    await join(server, epoch=2)
    await join(server, epoch=2)

    assert server.engine.calls == ["join 2"]


async def test_a_join_says_which_version_is_served() -> None:
    async with scripted_server(served=ServedWeights("run", 7)) as server:
        answer = await join(server)

    assert (answer.lineage, answer.policy_version) == ("run", 7)


async def test_a_newer_epoch_replaces_the_group_and_an_older_one_is_refused(server: ScriptedServer) -> None:
    await join(server, epoch=2)
    await join(server, epoch=3)
    with refused(WRONG_STATE, "epoch = 2", "epoch 3"):
        await join(server, epoch=2)

    assert server.engine.calls == ["join 2", "join 3"]


async def test_another_run_may_begin_at_any_epoch(server: ScriptedServer) -> None:
    await join(server, epoch=9)
    await join(server, epoch=1, run_id="another")

    assert server.engine.calls == ["join 9", "join 1"]


async def test_a_new_group_forgets_what_the_old_one_staged(server: ScriptedServer) -> None:
    await join(server, epoch=1)
    await stage(server, 1)
    await join(server, epoch=2)

    with refused(WRONG_STATE, "staged is None"):
        await commit(server, 1, epoch=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"run_id": "../x"}, ("run_id = ../x", "letters")),
        ({"run_id": ""}, ("run_id", "1 to 128")),
        ({"store_port": 0}, ("store_port = 0", "[1, 65535]")),
        ({"store_port": 70_000}, ("store_port = 70000", "[1, 65535]")),
        ({"transport": "nccl"}, ("transport = nccl", "gloo")),
        ({"first_rank": 0}, ("first_rank = 0", "at least 1")),
        ({"first_rank": 2}, ("first_rank = 2", "below 2")),
        ({"timeout_seconds": 0}, ("timeout_seconds = 0", "(0, 3600]")),
        ({"timeout_seconds": math.nan}, ("timeout_seconds = nan", "(0, 3600]")),
        (
            {"manifest": weights_pb2.WeightManifest(bucket_bytes=1024)},
            ("manifest", "at least one"),
        ),
        (
            {
                "manifest": weights_pb2.WeightManifest(
                    tensors=MANIFEST.to_proto().tensors, bucket_bytes=2048, digest="0"
                )
            },
            ("manifest", "digest"),
        ),
    ],
)
async def test_a_bad_join_is_named_with_its_value_and_bound(
    server: ScriptedServer, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(INVALID, *words):
        await join(server, **fields)

    assert server.engine.calls == []


async def test_a_version_that_is_not_newer_is_not_staged(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 5)
    await commit(server, 5)

    for version in (4, 5):
        with refused(WRONG_STATE, f"policy_version = {version}", "serves 5"):
            await stage(server, version)


async def test_a_push_that_failed_elsewhere_is_made_again_in_the_next_epoch(server: ScriptedServer) -> None:
    await join(server, epoch=1)
    await stage(server, 5)
    await commit(server, 5)

    await join(server, epoch=2)
    await stage(server, 5, epoch=2)
    await commit(server, 5, epoch=2)

    assert server.engine.calls == ["join 1", "stage 5", "commit 5", "join 2", "stage 5", "commit 5"]


async def test_another_run_may_push_a_lower_version() -> None:
    async with scripted_server(served=ServedWeights("another", 50)) as server:
        await join(server)
        await stage(server, 1)
        await commit(server, 1)

        assert (server.served.lineage, server.served.policy_version) == ("run", 1)


async def test_stage_and_commit_need_the_group(server: ScriptedServer) -> None:
    with refused(WRONG_STATE, "no group"):
        await stage(server, 1)
    await join(server, epoch=2)
    with refused(WRONG_STATE, "epoch = 1"):
        await stage(server, 1, epoch=1)
    with refused(WRONG_STATE, "epoch = 1"):
        await commit(server, 1, epoch=1)


async def test_a_commit_needs_that_version_staged(server: ScriptedServer) -> None:
    await join(server)
    with refused(WRONG_STATE, "staged is None"):
        await commit(server, 1)
    await stage(server, 1)
    with refused(WRONG_STATE, "policy_version = 2", "staged is 1"):
        await commit(server, 2)

    assert server.served.policy_version == 0


async def test_a_commit_that_was_carried_out_is_confirmed_again(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 1)
    await commit(server, 1)
    await commit(server, 1)

    assert server.engine.calls == ["join 1", "stage 1", "commit 1"]


async def test_what_the_workers_refuse_is_a_wrong_state(server: ScriptedServer) -> None:
    await join(server)
    server.engine.refusal = "the push before has failed"
    with refused(WRONG_STATE, "the push before has failed"):
        await stage(server, 1)
    server.engine.refusal = ""
    await stage(server, 1)
    server.engine.refusal = "expired"
    with refused(WRONG_STATE, "expired"):
        await commit(server, 1)

    assert server.served.policy_version == 0


async def test_a_commit_that_fails_half_way_makes_the_server_unavailable(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 1)
    server.engine.is_dead = True

    with refused(grpc.StatusCode.UNAVAILABLE, "applying failed"):
        await commit(server, 1)

    assert server.served.policy_version == 0


async def test_a_commit_outlives_its_caller(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 1)
    server.engine.commit_gate.clear()
    message = weights_pb2.CommitWeightsRequest(run_id="run", epoch=1, policy_version=1)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await server.weights.CommitWeights(message, timeout=0.2)

    server.engine.commit_gate.set()
    await commit(server, 1)

    assert server.served.policy_version == 1
    assert server.engine.calls.count("commit 1") == 1


async def test_an_abort_drops_what_is_staged_and_is_no_harm_when_repeated(server: ScriptedServer) -> None:
    await join(server)
    await stage(server, 1)
    await abort(server)
    await abort(server)
    await abort(server, epoch=7)

    with refused(WRONG_STATE, "staged is None"):
        await commit(server, 1)
    assert server.engine.calls == ["join 1", "stage 1", "drop"]


async def test_a_server_leaves_the_group_that_is_named_only(server: ScriptedServer) -> None:
    await join(server, epoch=2)
    for epoch in (1, 2, 2):
        await server.weights.LeaveGroup(weights_pb2.LeaveGroupRequest(run_id="run", epoch=epoch), timeout=5)

    assert server.engine.calls == ["join 2", "leave"]


@pytest.mark.parametrize("seconds", [0, -1, 601, math.nan, math.inf])
async def test_a_pause_has_a_bound(server: ScriptedServer, seconds: float) -> None:
    with refused(INVALID, "timeout_seconds", "(0, 600]"):
        await pause(server, timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
async def test_staging_has_a_bound(server: ScriptedServer, seconds: float) -> None:
    await join(server)
    with refused(INVALID, "timeout_seconds", "(0, 86400]"):
        await stage(server, 1, timeout_seconds=seconds)


async def test_a_pause_ends_by_itself(server: ScriptedServer) -> None:
    await pause(server, timeout_seconds=0.1)

    async with asyncio.timeout(2):
        await server.engine.resumed.wait()


async def test_a_second_pause_moves_the_end(server: ScriptedServer) -> None:
    await pause(server, timeout_seconds=0.3)
    await pause(server, timeout_seconds=60)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.engine.resumed.wait(), 0.6)

    await server.weights.Resume(weights_pb2.ResumeRequest(), timeout=5)
    assert server.engine.calls == ["pause", "resume"]


async def cancel_in_the_engine(handling: Coroutine[Any, Any, Any], engine: ScriptedEngine) -> None:
    """Cancels a call as gRPC does for a client that goes away; over the wire the test could not know when."""
    num_calls = len(engine.calls)
    async with asyncio.timeout(2):
        call = asyncio.ensure_future(handling)
        while len(engine.calls) == num_calls:  # noqa: ASYNC110 - the engine keeps a list
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_pause_whose_caller_is_gone_ends_by_itself() -> None:
    engine = ScriptedEngine()
    engine.pause_gate.clear()
    await cancel_in_the_engine(WeightServicer(engine, ServedWeights()).Pause(PAUSE, NO_CONTEXT), engine)

    engine.pause_gate.set()

    async with asyncio.timeout(2):
        await engine.resumed.wait()


async def test_a_resume_outlives_its_caller() -> None:
    engine = ScriptedEngine()
    servicer = WeightServicer(engine, ServedWeights())
    await servicer.Pause(weights_pb2.PauseRequest(timeout_seconds=60), NO_CONTEXT)
    engine.resume_gate.clear()
    await cancel_in_the_engine(servicer.Resume(weights_pb2.ResumeRequest(), NO_CONTEXT), engine)

    engine.resume_gate.set()

    async with asyncio.timeout(2):
        await engine.resumed.wait()


async def test_a_resume_without_a_pause_changes_nothing(server: ScriptedServer) -> None:
    await server.weights.Resume(weights_pb2.ResumeRequest(), timeout=5)

    assert server.engine.calls == []
