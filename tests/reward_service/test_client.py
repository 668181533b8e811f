"""The client of a fleet of reward servers."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from reward_service.client import Outcome, RewardClient, RewardItem, RewardUnavailableError
from reward_service.server import RewardServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = RewardItem("1", "\\boxed{7}", "7")
DEAD_ADDRESS = "127.0.0.1:1"


async def test_a_call_in_flight_goes_to_another_server_when_its_own_is_killed(
    server: RewardServer,
    start_server_process: Callable[[str], Any],
    read_metrics: Callable[[str], Awaitable[str]],
    hanging_completion: str,
) -> None:
    victim = start_server_process("RewardSettings(num_workers=1, timeout_seconds=60)")
    client = RewardClient(token=None)
    await client.add_server(victim.ready.address)
    async with asyncio.TaskGroup() as tasks:
        items = [RewardItem("hanging", hanging_completion, "7"), RIGHT]
        scoring = tasks.create_task(client.score(items, timeout_seconds=60.0))
        while "tandem_reward_queued_items 2.0" not in await read_metrics(victim.ready.metrics_address):
            pass
        await client.add_server(server.address)
        # The victim is stuck, so only the idle server can answer this.
        assert (await client.score([RIGHT], timeout_seconds=20.0))[0].outcome is Outcome.CORRECT

        os.kill(victim.process.pid, signal.SIGKILL)

        assert [score.outcome for score in await scoring] == [Outcome.TIMED_OUT, Outcome.CORRECT]
    await client.close()


async def test_a_dead_server_is_passed_over(server: RewardServer) -> None:
    client = RewardClient(token=None)
    await client.add_server(DEAD_ADDRESS)
    await client.add_server(server.address)

    scores = await client.score([RIGHT], timeout_seconds=20.0)

    assert scores[0].outcome is Outcome.CORRECT
    await client.close()


async def test_a_server_that_is_gone_for_good_is_dropped(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_service.client._PASSED_OVER_SECONDS", 0.0)
    client = RewardClient(token=None)
    await client.add_server(DEAD_ADDRESS)
    await client.add_server(server.address)

    async with asyncio.timeout(20):
        while DEAD_ADDRESS in client.addresses:
            assert (await client.score([RIGHT], timeout_seconds=20.0))[0].outcome is Outcome.CORRECT

    assert client.addresses == [server.address]
    await client.close()


async def test_servers_are_kept_while_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reward_service.client._PASSED_OVER_SECONDS", 0.0)
    monkeypatch.setattr("reward_service.client._MAX_FAILURES_IN_A_ROW", 2)
    client = RewardClient(token=None)
    for address in (DEAD_ADDRESS, "127.0.0.1:2"):
        await client.add_server(address)

    with pytest.raises(RewardUnavailableError):
        await client.score([RIGHT], timeout_seconds=0.5)

    assert client.addresses == [DEAD_ADDRESS, "127.0.0.1:2"]
    await client.close()


async def test_a_server_that_comes_later_is_found(server: RewardServer) -> None:
    client = RewardClient(token=None)
    async with asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(client.score([RIGHT], timeout_seconds=30.0))
        await asyncio.sleep(0)

        await client.add_server(server.address)

        assert (await scoring)[0].outcome is Outcome.CORRECT
    await client.close()


async def test_when_none_answers_the_error_names_the_servers() -> None:
    client = RewardClient(token=None)
    await client.add_server(DEAD_ADDRESS)

    with pytest.raises(RewardUnavailableError, match=rf"\({DEAD_ADDRESS}\) answered within 0.5 s: .*UNAVAILABLE"):
        await client.score([RIGHT], timeout_seconds=0.5)
    await client.close()


async def test_a_removed_server_still_answers_what_is_with_it(server: RewardServer, hanging_completion: str) -> None:
    client = RewardClient(token=None)
    await client.add_server(server.address)
    async with asyncio.TaskGroup() as tasks:
        scoring = tasks.create_task(client.score([RewardItem("1", hanging_completion, "7")], timeout_seconds=60.0))
        await asyncio.sleep(0)

        await client.remove_server(server.address)

        assert (await scoring)[0].outcome is Outcome.TIMED_OUT
    assert client.addresses == []


async def test_the_client_imports_no_grader() -> None:
    source = "import sys, reward_service.client; sys.exit(bool({'sympy', 'math_verify'} & set(sys.modules)))"

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", source, cwd=Path(__file__).parents[2])

    assert await process.wait() == 0
