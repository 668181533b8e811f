"""A rollout server announces itself to a learner, and ends, with a scripted engine and a scripted learner."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from protos.learner.v1 import learner_pb2, learner_pb2_grpc
from rollout_server.server import announce, run_until_stopped
from runtime.errors import WrongStateError
from runtime.interceptors import Context
from runtime.serving import Listener
from tests.rollout_server.scripted_server import ScriptedServer


class SilentLearner(learner_pb2_grpc.LearnerServiceServicer):
    """Answers no one before it is told to, and then refuses."""

    def __init__(self) -> None:
        self.was_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def RegisterServer(
        self, request: learner_pb2.RegisterServerRequest, context: Context
    ) -> learner_pb2.RegisterServerResponse:
        self.was_asked.set()
        await self.may_answer.wait()
        raise WrongStateError("vocabulary_size: the learner has 7")

    async def ListServers(
        self, request: learner_pb2.ListServersRequest, context: Context
    ) -> learner_pb2.ListServersResponse:
        raise NotImplementedError

    async def GetStatus(self, request: learner_pb2.GetStatusRequest, context: Context) -> learner_pb2.GetStatusResponse:
        raise NotImplementedError

    async def RequestCheckpoint(
        self, request: learner_pb2.RequestCheckpointRequest, context: Context
    ) -> learner_pb2.RequestCheckpointResponse:
        raise NotImplementedError

    async def Stop(self, request: learner_pb2.StopRequest, context: Context) -> learner_pb2.StopResponse:
        raise NotImplementedError


@asynccontextmanager
async def listening(learner: SilentLearner) -> AsyncIterator[str]:
    listener = await Listener.start(
        host="127.0.0.1",
        port=0,
        services=[],
        register=[partial(learner_pb2_grpc.add_LearnerServiceServicer_to_server, learner)],
        token=None,
    )
    try:
        yield listener.address
    finally:
        await listener.stop(drain_seconds=0)


def run(server: ScriptedServer, learner_address: str) -> Coroutine[Any, Any, None]:
    return run_until_stopped(
        server.engine,
        server.public,
        server.admin,
        announce=partial(announce, learner_address, server.address, "instance", token=None),
        drain_seconds=5,
    )


async def test_a_signal_ends_a_server_whose_learner_does_not_answer(server: ScriptedServer) -> None:
    learner = SilentLearner()
    async with listening(learner) as address, asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run(server, address))
        await learner.was_asked.wait()

        os.kill(os.getpid(), signal.SIGTERM)

        await running


async def test_a_server_that_the_learner_refuses_ends_with_the_reason(server: ScriptedServer) -> None:
    learner = SilentLearner()
    learner.may_answer.set()
    async with listening(learner) as address, asyncio.timeout(5):
        words = f"learner_address = {address}: .* vocabulary_size: the learner has 7"
        with pytest.raises(ValueError, match=words):
            await run(server, address)
