"""The fleet over scripted servers: routing, retries elsewhere, the handshake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.client import (
    FinishReason,
    FleetMismatchError,
    GroupRequest,
    RolloutFleet,
    RolloutRefusedError,
    RolloutUnavailableError,
    Sampling,
    VersionSpan,
)
from rollout_server.served import ServedWeights
from runtime.serving import Listener
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server
from tests.rollout_server.tcp_proxy import TcpProxy, tcp_proxy


def group(*seeds: int, name: str = "group", max_tokens: int = 4) -> GroupRequest:
    return GroupRequest(
        group_id=name,
        prompt_token_ids=(5, 6, 7),
        sample_ids=tuple(f"{name}/{seed}" for seed in seeds),
        sampling=Sampling(max_tokens=max_tokens),
        seeds=seeds,
    )


@asynccontextmanager
async def fleet_of(*addresses: str, token: str | None = None) -> AsyncIterator[RolloutFleet]:
    fleet = RolloutFleet(token=token)
    try:
        for address in addresses:
            await fleet.add_server(address, timeout_seconds=5)
        yield fleet
    finally:
        await fleet.close()


@pytest.fixture
async def servers() -> AsyncIterator[tuple[ScriptedServer, ScriptedServer]]:
    async with scripted_server() as one, scripted_server() as other:
        yield one, other


async def test_rollouts_come_in_the_order_of_their_ids(server: ScriptedServer) -> None:
    async with fleet_of(server.address) as fleet:
        rollouts = await fleet.generate_group(group(3, 1, 2), timeout_seconds=5)

    assert [rollout.sample_id for rollout in rollouts] == ["group/3", "group/1", "group/2"]
    assert [rollout.token_ids for rollout in rollouts] == [(3,) * 4, (1,) * 4, (2,) * 4]
    assert {rollout.attempt for rollout in rollouts} == {0}
    assert rollouts[0].version_spans == (VersionSpan(0, 0),)
    assert rollouts[0].finish_reason is FinishReason.LENGTH
    assert rollouts[0].server == server.address


async def test_a_group_goes_to_the_server_with_the_fewest_outstanding_tokens(
    servers: tuple[ScriptedServer, ScriptedServer],
) -> None:
    one, other = servers
    one.engine.shut(1)
    other.engine.shut(1)
    async with fleet_of(one.address, other.address) as fleet, asyncio.TaskGroup() as tasks:
        long = tasks.create_task(fleet.generate_group(group(1, name="long", max_tokens=20), timeout_seconds=10))
        await one.engine.started.acquire()
        short = tasks.create_task(fleet.generate_group(group(1, name="short", max_tokens=4), timeout_seconds=10))
        await other.engine.started.acquire()

        # 20 tokens here, 4 there.
        third = await fleet.generate_group(group(2, name="third"), timeout_seconds=5)
        one.engine.gates[1].set()
        await long
        # None here, 4 there.
        fourth = await fleet.generate_group(group(2, name="fourth"), timeout_seconds=5)
        other.engine.gates[1].set()
        await short

    assert third[0].server == other.address
    assert fourth[0].server == one.address


async def test_only_servers_with_a_version_new_enough_are_chosen() -> None:
    async with (
        scripted_server(served=ServedWeights("run", 3)) as old,
        scripted_server(served=ServedWeights("run", 4)) as new,
        fleet_of(old.address, new.address) as fleet,
    ):
        rollouts = await fleet.generate_group(group(1), timeout_seconds=5, min_policy_version=4)

    assert rollouts[0].server == new.address


async def test_a_group_waits_for_a_server_with_its_version(server: ScriptedServer) -> None:
    async with fleet_of(server.address) as fleet, asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(fleet.generate_group(group(1), timeout_seconds=10, min_policy_version=1))
        await asyncio.wait((waiting,), timeout=0.2)
        assert not waiting.done()

        server.served.policy_version = 1
        fleet.note_version(server.address, 1)

    assert len(waiting.result()) == 1


async def test_a_server_that_fell_behind_is_asked_for_its_version(
    servers: tuple[ScriptedServer, ScriptedServer],
) -> None:
    restarted, current = servers
    current.served.policy_version = 2
    async with fleet_of(restarted.address, current.address) as fleet:
        fleet.note_version(restarted.address, 2)
        current.engine.shut(9)

        rollouts = await fleet.generate_group(group(1), timeout_seconds=5, min_policy_version=2)

        assert rollouts[0].server == current.address
        assert fleet.policy_version(restarted.address) == 0


async def test_samples_that_a_killed_server_owes_come_from_another(
    servers: tuple[ScriptedServer, ScriptedServer],
) -> None:
    killed, survivor = servers
    killed.engine.shut(2, 3)
    async with AsyncExitStack() as stack:
        proxy: TcpProxy = await stack.enter_async_context(tcp_proxy(killed.address))
        fleet = await stack.enter_async_context(fleet_of(proxy.address, survivor.address))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        asked = tasks.create_task(fleet.generate_group(group(1, 2, 3), timeout_seconds=20))
        for _ in range(3):
            await killed.engine.started.acquire()
        # The one without a gate has been sent before the line breaks.
        while fleet._servers[proxy.address].outstanding_tokens != 8:  # noqa: ASYNC110 - only the fleet knows
            await asyncio.sleep(0.01)

        await proxy.kill()
        rollouts = await asked

    assert [rollout.attempt for rollout in rollouts] == [0, 1, 1]
    assert [rollout.server for rollout in rollouts] == [proxy.address, survivor.address, survivor.address]
    assert [rollout.sample_id for rollout in rollouts] == ["group/1", "group/2", "group/3"]


async def test_calls_of_a_removed_server_are_made_elsewhere(servers: tuple[ScriptedServer, ScriptedServer]) -> None:
    removed, other = servers
    removed.engine.shut(1)
    async with fleet_of(removed.address, other.address) as fleet, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(fleet.generate_group(group(1), timeout_seconds=10))
        await removed.engine.started.acquire()
        await fleet.remove_server(removed.address)

    assert asked.result()[0].server == other.address
    assert asked.result()[0].attempt == 1


async def test_a_busy_server_is_not_waited_for() -> None:
    async with (
        scripted_server(max_queued_samples=1) as busy,
        scripted_server() as idle,
        fleet_of(busy.address, idle.address) as fleet,
    ):
        rollouts = await fleet.generate_group(group(1, 2), timeout_seconds=5)

    assert {rollout.server for rollout in rollouts} == {idle.address}
    assert {rollout.attempt for rollout in rollouts} == {1}


class LateAnswers(rollout_pb2_grpc.RolloutServiceServicer):
    """Sends an answer to an earlier attempt before the one that was asked for."""

    async def GetServerInfo(self, request: Any, context: Any) -> rollout_pb2.GetServerInfoResponse:
        return rollout_pb2.GetServerInfoResponse(logprob_semantics=rollout_pb2.LOGPROB_SEMANTICS_PROCESSED)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        (wanted,) = request.samples
        for sample_id, attempt, token in (
            (wanted.sample_id, wanted.attempt + 1, 7),
            ("unknown", wanted.attempt, 8),
            (wanted.sample_id, wanted.attempt, 9),
        ):
            yield rollout_pb2.GenerateResponse(
                sample=rollout_pb2.Sample(
                    sample_id=sample_id,
                    attempt=attempt,
                    token_ids=[token],
                    behaviour_logprobs=[-1.0],
                    finish_reason=rollout_pb2.FINISH_REASON_STOP,
                    stop_token_id=token,
                )
            )


async def test_answers_to_other_attempts_are_ignored() -> None:
    listener = await Listener.start(
        host="127.0.0.1",
        port=0,
        services=[],
        register=[partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, LateAnswers())],
        token=None,
    )
    try:
        async with fleet_of(listener.address) as fleet:
            (rollout,) = await fleet.generate_group(group(1), timeout_seconds=5)
    finally:
        await listener.stop(drain_seconds=0)

    assert (rollout.token_ids, rollout.stop_token_id) == ((9,), 9)


async def test_servers_with_different_tokenizers_do_not_fit() -> None:
    async with (
        scripted_server() as one,
        scripted_server(tokenizer_fingerprint="0" * 64) as other,
        fleet_of(one.address) as fleet,
    ):
        with pytest.raises(FleetMismatchError, match=r"tokenizer_fingerprint: .* has 0{64}, .* has f{64}"):
            await fleet.add_server(other.address, timeout_seconds=5)

        assert [info.address for info in fleet.servers] == [one.address]


async def test_a_refused_request_is_not_tried_again(server: ScriptedServer) -> None:
    async with fleet_of(server.address) as fleet:
        with pytest.raises(
            RolloutRefusedError, match=r"INVALID_ARGUMENT: sampling.max_tokens = 40: must be at most 29"
        ):
            await fleet.generate_group(group(1, max_tokens=40), timeout_seconds=60)


async def test_a_group_that_takes_too_long_is_given_up_and_aborted(server: ScriptedServer) -> None:
    server.engine.shut(2)
    async with fleet_of(server.address) as fleet:
        with pytest.raises(RolloutUnavailableError, match=r"1 of 2 samples did not come within"):
            await fleet.generate_group(group(1, 2), timeout_seconds=0.5)
    async with asyncio.timeout(1):
        await server.engine.aborted.acquire()


async def test_a_cancelled_group_is_aborted(server: ScriptedServer) -> None:
    server.engine.shut(1)
    async with fleet_of(server.address) as fleet:
        asked = asyncio.ensure_future(fleet.generate_group(group(1), timeout_seconds=60))
        await server.engine.started.acquire()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        async with asyncio.timeout(1):
            await server.engine.aborted.acquire()
        assert fleet._servers[server.address].outstanding_tokens == 0


async def test_an_absent_server_is_unavailable() -> None:
    async with fleet_of() as fleet:
        with pytest.raises(RolloutUnavailableError, match=r"127.0.0.1:1: "):
            await fleet.add_server("127.0.0.1:1", timeout_seconds=0.5)


async def test_the_token_travels_with_every_call() -> None:
    token = "a token that is long enough"
    async with scripted_server(token=token) as server, fleet_of(server.address, token=token) as fleet:
        assert len(await fleet.generate_group(group(1), timeout_seconds=5)) == 1

        async with fleet_of() as strangers:
            with pytest.raises(RolloutUnavailableError, match="UNAUTHENTICATED"):
                await strangers.add_server(server.address, timeout_seconds=5)


async def test_a_proxy_in_the_environment_is_not_asked(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async with fleet_of(server.address) as fleet:
        assert len(await fleet.generate_group(group(1), timeout_seconds=5)) == 1
