"""Both listeners of a rollout server over a scripted engine, in this process."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from protos.rollout.v1.rollout_pb2_grpc import RolloutServiceStub, add_RolloutServiceServicer_to_server
from protos.rollout.v1.weights_pb2_grpc import WeightServiceStub, add_WeightServiceServicer_to_server
from rollout_server.rollout_service import RolloutServicer, ServedModel, ServerFacts
from rollout_server.served import ServedWeights
from rollout_server.server import ROLLOUT_SERVICE, WEIGHT_SERVICE
from rollout_server.weight_service import WeightServicer
from runtime.dialling import dial
from runtime.serving import Listener
from tests.rollout_server.scripted_engine import ScriptedEngine


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """What a test needs of it. The stubs are Any: their published types are those of synchronous channels."""

    engine: ScriptedEngine
    served: ServedWeights
    public: Listener
    admin: Listener
    rollouts: Any
    weights: Any

    @property
    def address(self) -> str:
        return self.public.address


@asynccontextmanager
async def scripted_server(
    *,
    token: str | None = None,
    served: ServedWeights | None = None,
    max_queued_samples: int = 64,
    tokenizer_fingerprint: str = "f" * 64,
    engine: ScriptedEngine | None = None,
    port: int = 0,
) -> AsyncIterator[ScriptedServer]:
    """Serves until the block ends; the stubs carry the token."""
    engine = engine or ScriptedEngine()
    served = served or ServedWeights()
    engine.policy_version = served.policy_version
    admin = await Listener.start(
        host="127.0.0.1",
        port=0,
        services=[WEIGHT_SERVICE],
        register=[partial(add_WeightServiceServicer_to_server, WeightServicer(engine, served))],
        token=token,
    )
    facts = ServerFacts(
        model=ServedModel("folder", tokenizer_fingerprint, (1,)),
        build="0",
        admin_address=admin.address,
        instance_id=uuid.uuid4().hex,
    )
    servicer = RolloutServicer(engine, served, facts, max_queued_samples=max_queued_samples)
    public = await Listener.start(
        host="127.0.0.1",
        port=port,
        services=[ROLLOUT_SERVICE],
        register=[partial(add_RolloutServiceServicer_to_server, servicer)],
        token=token,
    )
    try:
        async with dial(public.address, token=token) as channel, dial(admin.address, token=token) as admin_channel:
            for listener in (public, admin):
                await listener.set_serving(True)
            yield ScriptedServer(
                engine, served, public, admin, RolloutServiceStub(channel), WeightServiceStub(admin_channel)
            )
    finally:
        for listener in (public, admin):
            await listener.stop(drain_seconds=0)
