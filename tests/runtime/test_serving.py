"""One listener: who may call, where it may bind, what the call's metrics say."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import REGISTRY

from protos.learner.v1 import learner_pb2, learner_pb2_grpc
from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from runtime.credentials import read_token
from runtime.dialling import dial
from runtime.errors import BusyError, InvalidRequestError, UnavailableError, WrongStateError
from runtime.serving import Listener, is_serving, wait_until_serving

TOKEN = "a token that is long enough"
SERVICES = [
    (rollout_pb2_grpc, "RolloutService", rollout_pb2),
    (weights_pb2_grpc, "WeightService", weights_pb2),
    (reward_pb2_grpc, "RewardService", reward_pb2),
    (learner_pb2_grpc, "LearnerService", learner_pb2),
]
METHODS = [
    (service, method.name)
    for _, service, module in SERVICES
    for method in module.DESCRIPTOR.services_by_name[service].methods
]


class Answers(rollout_pb2_grpc.RolloutServiceServicer):
    """Raises what it is told to; a generator where `Generate` is called."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    async def GetServerInfo(self, request: Any, context: Any) -> rollout_pb2.GetServerInfoResponse:
        if self.error is not None:
            raise self.error
        return rollout_pb2.GetServerInfoResponse(model="answers")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield rollout_pb2.GenerateResponse()
        if self.error is not None:
            raise self.error
        yield rollout_pb2.GenerateResponse()


async def start(answers: Answers, *, token: str | None = None, host: str = "127.0.0.1", port: int = 0) -> Listener:
    return await Listener.start(
        host=host,
        port=port,
        services=["protos.rollout.v1.RolloutService"],
        register=[
            partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, answers),
            *(
                partial(getattr(module, f"add_{name}Servicer_to_server"), getattr(module, f"{name}Servicer")())
                for module, name, _ in SERVICES[1:]
            ),
        ],
        token=token,
    )


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
async def listener(answers: Answers) -> AsyncIterator[Listener]:
    running = await start(answers)
    yield running
    await running.stop(drain_seconds=0)


@pytest.fixture
async def guarded(answers: Answers) -> AsyncIterator[Listener]:
    running = await start(answers, token=TOKEN)
    yield running
    await running.stop(drain_seconds=0)


async def call(channel: grpc.aio.Channel, service: str, method: str) -> grpc.StatusCode:
    """The status of a call; the message is empty, which every request can be."""
    path = f"/{service}/{method}"
    try:
        if method == "Generate":
            stream: Any = channel.unary_stream(path)
            async for _ in stream(b"", timeout=5):
                pass
        else:
            unary: Any = channel.unary_unary(path)
            await unary(b"", timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(("service", "method"), METHODS)
@pytest.mark.parametrize("token", [None, "another token that is long enough"])
async def test_every_method_needs_the_token(guarded: Listener, service: str, method: str, token: str | None) -> None:
    full_name = next(
        module.DESCRIPTOR.services_by_name[service].full_name for _, name, module in SERVICES if name == service
    )
    async with dial(guarded.address, token=token) as channel:
        assert await call(channel, full_name, method) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_right_token_opens_unary_and_stream(guarded: Listener) -> None:
    async with dial(guarded.address, token=TOKEN) as channel:
        for method in ("GetServerInfo", "Generate"):
            assert await call(channel, "protos.rollout.v1.RolloutService", method) is grpc.StatusCode.OK


async def test_health_needs_no_token(guarded: Listener) -> None:
    async with dial(guarded.address, token=None) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=5)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await guarded.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await is_serving(stub, service="protos.rollout.v1.RolloutService")
        watch.cancel()


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_reflection_needs_the_token_where_there_is_one(answers: Answers, token: str | None) -> None:
    listener = await start(answers, token=token)
    try:
        async with dial(listener.address, token=None) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = stub.ServerReflectionInfo(timeout=5)
            await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            if token is None:
                services = (await stream.read()).list_services_response.service
                assert "protos.rollout.v1.RolloutService" in {service.name for service in services}
                stream.cancel()
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stream.read()
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await listener.stop(drain_seconds=0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
async def test_a_listener_off_loopback_needs_a_token(answers: Answers, host: str) -> None:
    with pytest.raises(ValueError, match=rf"host = {host}: .* TANDEM_TOKEN"):
        await start(answers, host=host)


async def test_a_listener_off_loopback_serves_with_a_token(answers: Answers) -> None:
    listener = await start(answers, host="0.0.0.0", token=TOKEN)
    try:
        async with dial(listener.address.replace("0.0.0.0", "127.0.0.1"), token=TOKEN) as channel:
            assert await call(channel, "protos.rollout.v1.RolloutService", "GetServerInfo") is grpc.StatusCode.OK
    finally:
        await listener.stop(drain_seconds=0)


async def test_a_taken_port_is_named(listener: Listener, answers: Answers) -> None:
    port = int(listener.address.rsplit(":", 1)[1])

    with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{port}"):
        await start(answers, port=port)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("field", 3, "below 3"), grpc.StatusCode.INVALID_ARGUMENT),
        (WrongStateError("state"), grpc.StatusCode.FAILED_PRECONDITION),
        (BusyError("busy"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (UnavailableError("later"), grpc.StatusCode.UNAVAILABLE),
        (KeyError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("method", ["GetServerInfo", "Generate"])
async def test_an_error_becomes_its_status_and_is_counted(
    listener: Listener, answers: Answers, error: Exception, code: grpc.StatusCode, method: str
) -> None:
    answers.error = error
    labels = {
        "grpc_type": "server_stream" if method == "Generate" else "unary",
        "grpc_service": "protos.rollout.v1.RolloutService",
        "grpc_method": method,
        "grpc_code": code.name,
    }
    before = REGISTRY.get_sample_value("grpc_server_handled_total", labels) or 0.0

    async with dial(listener.address, token=None) as channel:
        assert await call(channel, "protos.rollout.v1.RolloutService", method) is code

    assert REGISTRY.get_sample_value("grpc_server_handled_total", labels) == before + 1


async def test_waiting_for_a_server_ends_when_it_serves_or_with_the_time(listener: Listener) -> None:
    async with dial(listener.address, token=None) as channel:
        with pytest.raises(TimeoutError):
            await wait_until_serving(channel, service="", timeout_seconds=0.2)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(wait_until_serving(channel, service="", timeout_seconds=5))
            await listener.set_serving(True)
        assert waiting.done()


def test_a_token_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TANDEM_TOKEN", raising=False)
    monkeypatch.delenv("TANDEM_TOKEN_FILE", raising=False)
    assert read_token() is None

    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n", encoding="utf-8")
    monkeypatch.setenv("TANDEM_TOKEN_FILE", str(file))
    assert read_token() == TOKEN

    monkeypatch.setenv("TANDEM_TOKEN", "short")
    with pytest.raises(ValueError, match="TANDEM_TOKEN has 5 characters: must have at least 16"):
        read_token()


def test_a_token_file_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TANDEM_TOKEN", raising=False)
    monkeypatch.setenv("TANDEM_TOKEN_FILE", "/nowhere/token")

    with pytest.raises(ValueError, match="TANDEM_TOKEN_FILE = /nowhere/token: No such file"):
        read_token()
