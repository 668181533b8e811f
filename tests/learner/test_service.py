"""LearnerService over a real listener: registrations are checked, an operator looks and ends."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest

from learner.servers import ModelFacts, ServerBook
from learner.service import LearnerServicer, RunStatus
from protos.learner.v1 import learner_pb2
from protos.learner.v1.learner_pb2_grpc import LearnerServiceStub, add_LearnerServiceServicer_to_server
from runtime.dialling import dial
from runtime.serving import Listener
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))


@dataclass(frozen=True, slots=True)
class Service:
    # The published types of a stub are those of a synchronous channel.
    stub: Any
    servers: ServerBook
    status: RunStatus

    async def register(self, kind: learner_pb2.ServerKind, address: str) -> learner_pb2.RegisterServerResponse:
        response: learner_pb2.RegisterServerResponse = await self.stub.RegisterServer(
            learner_pb2.RegisterServerRequest(kind=kind, address=address), timeout=10
        )
        return response


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    servers, status = ServerBook(token=None, model=MODEL), RunStatus("run-1", num_steps=10)
    register = partial(add_LearnerServiceServicer_to_server, LearnerServicer(servers, status))
    listener = await Listener.start(
        host="127.0.0.1", port=0, services=["protos.learner.v1.LearnerService"], register=[register], token=None
    )
    async with dial(listener.address, token=None) as channel:
        yield Service(LearnerServiceStub(channel), servers, status)
    await listener.stop(drain_seconds=0)
    await servers.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


@pytest.mark.parametrize(
    ("kind", "address", "message"),
    [
        (learner_pb2.SERVER_KIND_UNSPECIFIED, "host:1", "kind = 0: must be SERVER_KIND_ROLLOUT or SERVER_KIND_REWARD"),
        (learner_pb2.SERVER_KIND_REWARD, "", "address = : must be host:port"),
        (learner_pb2.SERVER_KIND_REWARD, "host", "address = host: must be host:port"),
        (learner_pb2.SERVER_KIND_REWARD, ":80", "address = :80: must be host:port"),
        (learner_pb2.SERVER_KIND_REWARD, "host:0", "address = host:0: must be host:port"),
        (learner_pb2.SERVER_KIND_ROLLOUT, "host:65536", "address = host:65536: must be host:port"),
        (learner_pb2.SERVER_KIND_ROLLOUT, "host:http", "address = host:http: must be host:port"),
    ],
)
async def test_a_bad_registration_is_refused_with_field_value_and_bound(
    service: Service, kind: learner_pb2.ServerKind, address: str, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.register(kind, address)

    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (error.value.details() or "")
    assert service.servers.known() == ()


async def test_a_registered_server_is_told_the_run(service: Service, server: ScriptedServer) -> None:
    assert (await service.register(learner_pb2.SERVER_KIND_ROLLOUT, server.address)).run_id == "run-1"
    assert (await service.register(learner_pb2.SERVER_KIND_REWARD, "127.0.0.1:9")).run_id == "run-1"

    assert (service.servers.num_rollout, service.servers.num_reward) == (1, 1)


async def test_a_server_of_another_model_is_refused(service: Service) -> None:
    async with scripted_server(tokenizer_fingerprint="0" * 64) as other:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.register(learner_pb2.SERVER_KIND_ROLLOUT, other.address)

    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"has {'f' * 64}" in (error.value.details() or "")


async def test_a_server_that_does_not_answer_may_try_again(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.servers.HANDSHAKE_SECONDS", 0.2)

    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.register(learner_pb2.SERVER_KIND_ROLLOUT, "127.0.0.1:1")

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_servers_are_listed_with_what_they_serve(service: Service, server: ScriptedServer) -> None:
    await service.register(learner_pb2.SERVER_KIND_ROLLOUT, server.address)
    await service.register(learner_pb2.SERVER_KIND_REWARD, "127.0.0.1:9")

    before = (await service.stub.ListServers(learner_pb2.ListServersRequest(), timeout=10)).servers
    await service.servers.note_pushed(service.servers.push_targets(), 4)
    after = (await service.stub.ListServers(learner_pb2.ListServersRequest(), timeout=10)).servers

    reward = learner_pb2.KnownServer(kind=learner_pb2.SERVER_KIND_REWARD, address="127.0.0.1:9", is_ready=True)
    rollout = learner_pb2.KnownServer(kind=learner_pb2.SERVER_KIND_ROLLOUT, address=server.address)
    rollout.reason = "waits for the next weight push"
    assert list(before) == [rollout, reward]
    rollout.is_ready, rollout.policy_version, rollout.reason = True, 4, ""
    assert list(after) == [rollout, reward]


async def test_the_status_says_how_far_the_run_is(service: Service) -> None:
    begun = await service.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=10)

    assert begun == learner_pb2.GetStatusResponse(
        run_id="run-1", phase=learner_pb2.LEARNER_PHASE_STARTING, num_steps=10
    )
    assert not begun.HasField("checkpoint_step")

    service.status.policy_version, service.status.checkpoint_step, service.status.samples_issued = 7, 5, 99
    service.status.phase = learner_pb2.LEARNER_PHASE_TRAINING

    assert await service.stub.GetStatus(learner_pb2.GetStatusRequest(), timeout=10) == learner_pb2.GetStatusResponse(
        run_id="run-1",
        phase=learner_pb2.LEARNER_PHASE_TRAINING,
        policy_version=7,
        num_steps=10,
        checkpoint_step=5,
        samples_issued=99,
    )


async def test_a_checkpoint_is_asked_for_after_the_step_in_progress(service: Service) -> None:
    service.status.policy_version = 3

    response = await service.stub.RequestCheckpoint(learner_pb2.RequestCheckpointRequest(), timeout=10)

    assert response.step == 4
    assert service.status.checkpoint.is_set()
    assert not service.status.stop.is_set()


@pytest.mark.parametrize(("policy_version", "step"), [(3, 4), (10, 10)])
async def test_stop_ends_the_run_after_the_step_in_progress(service: Service, policy_version: int, step: int) -> None:
    service.status.policy_version = policy_version

    response = await service.stub.Stop(learner_pb2.StopRequest(), timeout=10)

    assert response.step == step
    assert service.status.stop.is_set()
