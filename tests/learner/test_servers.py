"""Who gets traffic: servers that fit, once they serve the learner's weights."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from learner.servers import KnownServer, ModelFacts, ServerBook, ServerKind
from rollout_server.client import FleetMismatchError, RolloutUnavailableError, ServerInfo
from rollout_server.served import ServedWeights
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))


@pytest.fixture
async def servers() -> AsyncIterator[ServerBook]:
    book = ServerBook(token=None, model=MODEL)
    yield book
    await book.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


async def registered(servers: ServerBook, address: str) -> ServerInfo:
    await servers.register(ServerKind.ROLLOUT, address)
    (info,) = [target for target in servers.push_targets() if target.address == address]
    return info


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"tokenizer_fingerprint": "e" * 64}, f"tokenizer_fingerprint: the learner has {'e' * 64}, .* has {'f' * 64}"),
        ({"vocabulary_size": 99}, "vocabulary_size: the learner has 99, .* has 100"),
        ({"stop_token_ids": (2, 3)}, r"stop_token_ids: the learner has \(2, 3\), .* has \(1,\)"),
    ],
)
async def test_a_server_of_another_model_is_refused_with_both_values(
    server: ScriptedServer, ours: dict[str, Any], message: str
) -> None:
    servers = ServerBook(token=None, model=replace(MODEL, **ours))

    with pytest.raises(FleetMismatchError, match=message):
        await servers.register(ServerKind.ROLLOUT, server.address)

    assert servers.known() == ()
    await servers.close()


async def test_a_server_that_does_not_answer_is_not_known(servers: ServerBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.servers.HANDSHAKE_SECONDS", 0.2)

    with pytest.raises(RolloutUnavailableError, match=r"127\.0\.0\.1:1"):
        await servers.register(ServerKind.ROLLOUT, "127.0.0.1:1")

    assert servers.num_rollout == 0


async def test_a_server_gets_no_traffic_before_it_has_the_weights(servers: ServerBook, server: ScriptedServer) -> None:
    info = await registered(servers, server.address)

    assert (servers.fleet.servers, servers.has_waiting, servers.num_rollout, servers.num_ready) == ((), True, 1, 0)
    assert servers.known() == (
        KnownServer(ServerKind.ROLLOUT, server.address, False, 0, "waits for the next weight push"),
    )

    await servers.note_pushed([info], 3)

    assert [ready.address for ready in servers.fleet.servers] == [server.address]
    assert (servers.has_waiting, servers.num_rollout, servers.num_ready) == (False, 1, 1)
    assert servers.known() == (KnownServer(ServerKind.ROLLOUT, server.address, True, 3, ""),)


async def test_a_server_that_registers_twice_keeps_its_traffic(servers: ServerBook, server: ScriptedServer) -> None:
    info = await registered(servers, server.address)
    await servers.note_pushed([info], 3)

    await servers.register(ServerKind.ROLLOUT, server.address)

    assert servers.known() == (KnownServer(ServerKind.ROLLOUT, server.address, True, 3, ""),)


async def test_a_restarted_server_waits_for_weights_again(servers: ServerBook) -> None:
    async with scripted_server() as first:
        old = await registered(servers, first.address)
        await servers.note_pushed([old], 3)
        port = int(first.address.rpartition(":")[2])
    async with scripted_server(port=port) as second:
        new = await registered(servers, second.address)

        assert (servers.fleet.servers, servers.push_targets()) == ((), (new,))

        # What is said of the process that is gone does not concern the one at its address.
        await servers.note_pushed([old], 4)
        await servers.lose(old, "gone")

        assert (servers.fleet.servers, servers.push_targets()) == ((), (new,))


async def test_a_server_that_restarted_during_its_first_push_gets_no_traffic(servers: ServerBook) -> None:
    async with scripted_server() as first:
        info = await registered(servers, first.address)
        port = int(first.address.rpartition(":")[2])
    async with scripted_server(port=port):
        await servers.note_pushed([info], 1)

    assert servers.fleet.servers == ()
    assert [known.reason for known in servers.known()] == ["restarted after the weight push"]


async def test_a_lost_server_is_listed_with_its_reason_and_may_come_back(
    servers: ServerBook, server: ScriptedServer
) -> None:
    info = await registered(servers, server.address)
    await servers.note_pushed([info], 3)

    await servers.lose(info, "missed a deadline")

    assert (servers.fleet.servers, servers.push_targets()) == ((), ())
    assert servers.known() == (KnownServer(ServerKind.ROLLOUT, server.address, False, 0, "missed a deadline"),)

    assert servers.push_targets() == ()
    await registered(servers, server.address)

    assert [known.reason for known in servers.known()] == ["waits for the next weight push"]


async def test_a_waiting_server_is_listed_with_the_version_it_serves(servers: ServerBook) -> None:
    async with scripted_server(served=ServedWeights("run", 7)) as server:
        await servers.register(ServerKind.ROLLOUT, server.address)

        assert [known.policy_version for known in servers.known()] == [7]


async def test_a_reward_server_is_ready_at_once(servers: ServerBook) -> None:
    await servers.register(ServerKind.REWARD, "127.0.0.1:9")
    await servers.register(ServerKind.REWARD, "127.0.0.1:9")

    assert servers.num_reward == 1
    assert servers.known() == (KnownServer(ServerKind.REWARD, "127.0.0.1:9", True, 0, ""),)
