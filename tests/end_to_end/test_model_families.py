"""Real vLLM serves every tested family, and a push reaches every one of its weights."""

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.client import RolloutFleet
from tests.end_to_end.rollout_servers import PROMPT, Running, generate, group, largest_difference, reference_logprobs
from tests.end_to_end.weight_pusher import WeightPusher
from tests.models import SHAPES, Shape, save_tiny_model
from tests.rollout_server.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def join(running: Running) -> WeightPusher:
    with grpc.insecure_channel(running.ready.address) as channel:
        info = rollout_pb2_grpc.RolloutServiceStub(channel).GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=5)
    return WeightPusher.join(info.admin_address, dict(running.model.named_parameters()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_a_push_reaches_every_weight(shape: Shape, tmp_path: Path, fleet: RolloutFleet) -> None:
    model = save_tiny_model(tmp_path / "model", shape, seed=0)
    pushed = save_tiny_model(tmp_path / "pushed", shape, seed=1)
    settings = {
        "model": str(tmp_path / "model"),
        "dtype": "float32",
        "context_length": 128,
        "max_running_samples": 16,
        "kv_cache_bytes": 64 << 20,
        "block_size": 32,
        "max_batched_tokens": 256,
    }
    process = ServerProcess(tmp_path, settings)
    try:
        running = Running(process, await asyncio.to_thread(process.wait_until_ready), model)
        before = await generate(fleet, running, group())
        pusher = await asyncio.to_thread(join, running)
        weights = {name: parameter.detach() for name, parameter in pushed.named_parameters()}

        await asyncio.to_thread(pusher.push, weights)
        after = await generate(fleet, running, group())
        pusher.group.abort()
    finally:
        process.process.kill()
        process.process.wait()

    for rollouts, expected in ((before, model), (after, pushed)):
        for rollout in rollouts:
            reference = reference_logprobs(expected, PROMPT, rollout)
            assert largest_difference(rollout.behaviour_logprobs, reference) < 1e-4
