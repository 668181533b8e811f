"""A service of a run without vLLM and torch: `python -m tests.deploy.scripted_service KIND --ready-file=FILE`."""

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from deploy.placement import Service
from learner.servers import ModelFacts, ServerBook
from learner.service import LearnerServicer, RunStatus
from protos.learner.v1.learner_pb2_grpc import add_LearnerServiceServicer_to_server
from runtime.process import ReadyFile, exit_with_parent, wait_for_stop_signal
from runtime.serving import Listener
from tests.learner.scripted_rewards import ScriptedRewards, scripted_reward_server
from tests.rollout_server.scripted_server import scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))


@asynccontextmanager
async def running(service: Service, status: RunStatus) -> AsyncIterator[str]:
    """Serves and yields the address."""
    match service:
        case Service.ROLLOUT:
            async with scripted_server() as server:
                yield server.address
        case Service.REWARD:
            async with scripted_reward_server(ScriptedRewards()) as address:
                yield address
        case Service.LEARNER:
            servers = ServerBook(token=None, model=MODEL)
            listener = await Listener.start(
                host="127.0.0.1",
                port=0,
                services=["protos.learner.v1.LearnerService"],
                register=[partial(add_LearnerServiceServicer_to_server, LearnerServicer(servers, status))],
                token=None,
            )
            await listener.set_serving(True)
            yield listener.address
            await listener.stop(drain_seconds=1)
            await servers.close()


async def serve(service: Service, ready_file: Path) -> None:
    """Serves until SIGTERM, or for a learner until it is asked to stop."""
    status = RunStatus("run", num_steps=10)

    async def stop_on_signal() -> None:
        await wait_for_stop_signal()
        status.stop.set()

    async with running(service, status) as address, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(stop_on_signal())
        ReadyFile(os.getpid(), address, "127.0.0.1:2", uuid.uuid4().hex).write(ready_file)
        await asyncio.to_thread(status.stop.wait)
        waiting.cancel()


if __name__ == "__main__":
    exit_with_parent()
    kind, *options = sys.argv[1:]
    values = dict(option.removeprefix("--").split("=", 1) for option in options)
    asyncio.run(serve(Service(kind), Path(values["ready-file"])))
