"""Generate and GetServerInfo over real gRPC, with a scripted engine behind them."""

import asyncio
import math
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from protos.rollout.v1 import rollout_pb2, weights_pb2, weights_pb2_grpc
from rollout_server.engine import EngineDeadError
from rollout_server.served import ServedWeights
from rollout_server.server import ROLLOUT_SERVICE
from runtime.dialling import dial
from runtime.serving import is_serving
from tests.rollout_server.scripted_engine import CONTEXT_LENGTH, VOCABULARY_SIZE
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server


def request(
    *,
    num_samples: int = 1,
    prompt: tuple[int, ...] = (5, 6, 7),
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> rollout_pb2.GenerateRequest:
    fields.setdefault(
        "samples", [rollout_pb2.SampleRequest(sample_id=f"s{index}", seed=index) for index in range(num_samples)]
    )
    parameters = rollout_pb2.SamplingParameters(**{"max_tokens": 4, **(sampling or {})})
    return rollout_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=parameters, **fields)


async def generate(server: ScriptedServer, message: rollout_pb2.GenerateRequest) -> list[rollout_pb2.GenerateResponse]:
    return [response async for response in server.rollouts.Generate(message, timeout=10)]


async def refusal(server: ScriptedServer, message: rollout_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await generate(server, message)
    return refused.value


def samples_named(*names: str) -> list[rollout_pb2.SampleRequest]:
    return [rollout_pb2.SampleRequest(sample_id=name) for name in names]


@pytest.mark.parametrize(
    ("message", "field", "value", "bound"),
    [
        (request(prompt=()), "prompt_token_ids", "[]", "at least one"),
        (request(prompt=(3, 100)), "prompt_token_ids", "100", f"below vocabulary_size = {VOCABULARY_SIZE}"),
        (request(prompt=(3,) * CONTEXT_LENGTH), "sampling.max_tokens", "4", f"context_length = {CONTEXT_LENGTH}"),
        (request(sampling={"max_tokens": 30}), "sampling.max_tokens", "30", "at most 29"),
        (request(sampling={"max_tokens": 0}), "sampling.max_tokens", "0", "at least 1"),
        (request(samples=[]), "samples", "[]", "at least one"),
        (request(samples=samples_named("a", "b", "a")), "samples.sample_id", "a", "unique"),
        (request(samples=samples_named("")), "samples.sample_id", "", "1 to 128"),
        (request(samples=samples_named("x" * 129)), "samples.sample_id", "xxx", "1 to 128"),
        (
            request(samples=[rollout_pb2.SampleRequest(sample_id="a", seed=2**63)]),
            "samples.seed",
            str(2**63),
            "below 2^63",
        ),
        (request(group_id="g" * 129), "group_id", "ggg", "at most 128"),
        (request(sampling={"temperature": -0.5}), "sampling.temperature", "-0.5", "[0, 100]"),
        (request(sampling={"temperature": 101}), "sampling.temperature", "101", "[0, 100]"),
        (request(sampling={"temperature": math.nan}), "sampling.temperature", "nan", "[0, 100]"),
        (request(sampling={"top_p": 0}), "sampling.top_p", "0", "(0, 1]"),
        (request(sampling={"top_p": 1.5}), "sampling.top_p", "1.5", "(0, 1]"),
        (request(sampling={"top_p": math.nan}), "sampling.top_p", "nan", "(0, 1]"),
        (
            request(sampling={"stop_token_ids": [100]}),
            "sampling.stop_token_ids",
            "100",
            f"below vocabulary_size = {VOCABULARY_SIZE}",
        ),
    ],
)
async def test_a_bad_field_is_named_with_its_value_and_bound(
    server: ScriptedServer, message: rollout_pb2.GenerateRequest, field: str, value: str, bound: str
) -> None:
    error = await refusal(server, message)

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = error.details() or ""
    assert details.startswith(f"{field} = {value}")
    assert bound in details
    assert server.engine.num_running == 0


async def test_a_sample_comes_back_with_its_id_attempt_and_seeded_tokens(server: ScriptedServer) -> None:
    wanted = [rollout_pb2.SampleRequest(sample_id="a", attempt=3, seed=9)]

    (response,) = await generate(server, request(samples=wanted))

    sample = response.sample
    assert (sample.sample_id, sample.attempt, list(sample.token_ids)) == ("a", 3, [9] * 4)
    assert list(sample.behaviour_logprobs) == [-0.5] * 4
    assert sample.finish_reason == rollout_pb2.FINISH_REASON_LENGTH
    assert not sample.HasField("stop_token_id")


async def test_samples_stream_back_in_the_order_in_which_they_end(server: ScriptedServer) -> None:
    server.engine.shut(0, 1, 2)
    call = server.rollouts.Generate(request(num_samples=3), timeout=10)
    ended = []

    for seed in (2, 0, 1):
        server.engine.gates[seed].set()
        ended.append((await call.read()).sample.sample_id)

    assert ended == ["s2", "s0", "s1"]
    assert await call.read() is grpc.aio.EOF


async def test_progress_comes_when_it_is_asked_for(server: ScriptedServer) -> None:
    responses = await generate(server, request(progress_every_tokens=2))

    assert [response.WhichOneof("event") for response in responses] == ["progress", "sample"]
    assert responses[0].progress.num_tokens == 2


async def test_more_samples_than_the_bound_are_refused_as_busy() -> None:
    async with scripted_server(max_queued_samples=4) as server:
        server.engine.shut(0, 1, 2)
        running = server.rollouts.Generate(request(num_samples=3), timeout=10)
        for _ in range(3):
            await server.engine.started.acquire()

        error = await refusal(server, request(num_samples=2))
        admitted = await generate(server, request(samples=[rollout_pb2.SampleRequest(sample_id="fits", seed=9)]))

        running.cancel()
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_queued_samples = 4" in (error.details() or "")
    assert len(admitted) == 1


@pytest.mark.parametrize(
    ("bounds", "is_admitted"),
    [
        ({"min_policy_version": 5}, True),
        ({"min_policy_version": 6}, False),
        ({"exact_policy_version": 5}, True),
        ({"exact_policy_version": 4}, False),
        ({"min_policy_version": 0}, True),
        ({"exact_policy_version": 0}, False),
    ],
)
async def test_version_bounds_are_held(bounds: dict[str, Any], is_admitted: bool) -> None:
    async with scripted_server(served=ServedWeights("run", 5)) as server:
        if is_admitted:
            assert len(await generate(server, request(**bounds))) == 1
        else:
            error = await refusal(server, request(**bounds))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "the server serves 5" in (error.details() or "")


async def test_a_sample_of_another_version_than_the_exact_one_is_not_sent(server: ScriptedServer) -> None:
    server.engine.shut(0)
    call = server.rollouts.Generate(request(exact_policy_version=0), timeout=10)
    await server.engine.started.acquire()

    server.engine.policy_version = 1
    server.engine.gates[0].set()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "tokens came from [1]" in (refused.value.details() or "")


async def test_a_cancel_aborts_every_sample_in_the_engine_at_once(server: ScriptedServer) -> None:
    server.engine.shut(0, 1)
    call = server.rollouts.Generate(request(num_samples=2), timeout=60)
    for _ in range(2):
        await server.engine.started.acquire()

    call.cancel()

    async with asyncio.timeout(1):
        for _ in range(2):
            await server.engine.aborted.acquire()


async def test_a_cancel_while_a_sample_is_being_sent_aborts_the_rest(server: ScriptedServer) -> None:
    server.engine.shut(1)
    call = server.rollouts.Generate(request(num_samples=2), timeout=60)
    assert (await call.read()).sample.sample_id == "s0"

    call.cancel()

    async with asyncio.timeout(1):
        await server.engine.aborted.acquire()


async def test_a_passed_deadline_aborts_in_the_engine(server: ScriptedServer) -> None:
    server.engine.shut(0)

    with pytest.raises(grpc.aio.AioRpcError) as late:
        async for _ in server.rollouts.Generate(request(), timeout=0.2):
            pass

    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(1):
        await server.engine.aborted.acquire()


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineDeadError("gone"), grpc.StatusCode.UNAVAILABLE),
        (RuntimeError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_one_failed_sample_ends_the_call_with_its_own_status(
    server: ScriptedServer, failure: Exception, code: grpc.StatusCode
) -> None:
    server.engine.shut(1)
    server.engine.failures[0] = failure

    error = await refusal(server, request(num_samples=2))

    assert error.code() is code
    assert str(failure) in (error.details() or "")
    async with asyncio.timeout(1):
        await server.engine.aborted.acquire()


async def test_a_dead_engine_is_unavailable(server: ScriptedServer) -> None:
    server.engine.is_dead = True

    error = await refusal(server, request())

    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stopping_server_finishes_calls_in_flight_and_refuses_new_ones(server: ScriptedServer) -> None:
    server.engine.shut(0)
    in_flight = server.rollouts.Generate(request(), timeout=10)
    await server.engine.started.acquire()

    async with asyncio.TaskGroup() as tasks:
        stopping = tasks.create_task(server.public.stop(drain_seconds=10))
        await asyncio.wait((stopping,), timeout=0.2)
        error = await refusal(server, request(samples=samples_named("late")))
        server.engine.gates[0].set()
        answer = await in_flight.read()

    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.sample.sample_id == "s0"


async def test_a_drain_that_takes_too_long_is_cut(server: ScriptedServer) -> None:
    server.engine.shut(0)
    in_flight = server.rollouts.Generate(request(), timeout=60)
    await server.engine.started.acquire()

    async with asyncio.timeout(5):
        await server.public.stop(drain_seconds=0.2)
        await server.engine.aborted.acquire()

    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await in_flight.read()
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_server_says_what_it_serves() -> None:
    async with scripted_server(served=ServedWeights("run", 5)) as server:
        info = await server.rollouts.GetServerInfo(rollout_pb2.GetServerInfoRequest(), timeout=5)

    assert (info.lineage, info.policy_version) == ("run", 5)
    assert (info.vocabulary_size, info.context_length) == (VOCABULARY_SIZE, CONTEXT_LENGTH)
    assert info.logprob_semantics == rollout_pb2.LOGPROB_SEMANTICS_PROCESSED
    assert info.admin_address == server.admin.address
    assert list(info.stop_token_ids) == [1]


async def test_weights_are_controlled_on_the_admin_listener_only(server: ScriptedServer) -> None:
    async with dial(server.public.address, token=None) as channel:
        stub: Any = weights_pb2_grpc.WeightServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Pause(weights_pb2.PauseRequest(timeout_seconds=1), timeout=5)

    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_set_serving(server: ScriptedServer) -> None:
    async with dial(server.address, token=None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await is_serving(stub, service=ROLLOUT_SERVICE)
        await server.public.set_serving(False)
        assert not await is_serving(stub, service=ROLLOUT_SERVICE)
