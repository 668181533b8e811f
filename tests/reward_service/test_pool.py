"""The pool: no item hurts another, no worker is lost for good, nothing is left behind."""

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from reward_service.config import RewardSettings
from reward_service.outcome import Item, Outcome
from reward_service.pool import WorkerPool
from runtime.errors import BusyError, UnavailableError

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]

RIGHT = Item("math", "\\boxed{7}", "7")


@pytest.fixture
def hanging(hanging_completion: str) -> Item:
    return Item("math", hanging_completion, "7")


async def test_items_behind_a_hanging_one_are_graded_long_before_its_deadline(hanging: Item) -> None:
    async with WorkerPool(RewardSettings(num_workers=2, timeout_seconds=60.0)) as pool, asyncio.TaskGroup() as tasks:
        await pool.wait_until(can_grade=True)
        stuck = tasks.create_task(pool.score([hanging]))
        beside = tasks.create_task(pool.score([RIGHT] * 15))

        begin = time.monotonic()
        grades = await beside

        assert {grade.outcome for grade in grades} == {Outcome.CORRECT}
        assert time.monotonic() - begin < 30.0
        assert not stuck.done()
        stuck.cancel()


async def test_an_item_whose_worker_is_killed_is_graded_by_the_next_one(eventually: Eventually) -> None:
    async with WorkerPool(RewardSettings(num_workers=1, timeout_seconds=60.0)) as pool, asyncio.TaskGroup() as tasks:
        await pool.wait_until(can_grade=True)
        (worker,) = pool.worker_pids
        os.kill(worker, signal.SIGSTOP)
        scoring = tasks.create_task(pool.score([RIGHT] * 3))
        await asyncio.sleep(0)

        os.kill(worker, signal.SIGKILL)

        assert [grade.outcome for grade in await scoring] == [Outcome.CORRECT] * 3
        assert pool.worker_pids != [worker]


async def test_an_item_that_two_workers_die_of_is_an_error(hanging: Item, eventually: Eventually) -> None:
    async with WorkerPool(RewardSettings(num_workers=1, timeout_seconds=60.0)) as pool, asyncio.TaskGroup() as tasks:
        await pool.wait_until(can_grade=True)
        scoring = tasks.create_task(pool.score([hanging, RIGHT]))
        killed: set[int] = set()
        for _ in range(2):
            await eventually(lambda: bool(set(pool.worker_pids) - killed))
            (worker,) = pool.worker_pids
            killed.add(worker)
            os.kill(worker, signal.SIGKILL)

        error, right = await scoring

        assert (error.outcome, error.reward, right.outcome) == (Outcome.ERROR, None, Outcome.CORRECT)
        assert error.reason == "2 workers died while they graded it"


async def test_a_worker_may_take_so_much_memory_and_no_more() -> None:
    async with WorkerPool(RewardSettings(num_workers=1, worker_memory_bytes=128 * 2**20)) as pool:
        await pool.wait_until(can_grade=True)

        assert resource.prlimit(pool.worker_pids[0], resource.RLIMIT_AS) == (128 * 2**20, 128 * 2**20)


async def test_a_memory_bomb_is_no_right_answer_and_hurts_no_other() -> None:
    async with WorkerPool(RewardSettings(num_workers=1, worker_memory_bytes=128 * 2**20)) as pool:
        await pool.wait_until(can_grade=True)

        # The power alone takes 125 MB.
        bomb, right = await pool.score([Item("math", "\\boxed{2^{10^9}}", "7"), RIGHT])

        assert bomb.outcome is not Outcome.CORRECT
        assert right.outcome is Outcome.CORRECT


async def test_closing_while_a_worker_is_being_replaced_leaves_nothing(
    hanging: Item, is_running: Callable[[int], bool]
) -> None:
    async with WorkerPool(RewardSettings(num_workers=1, timeout_seconds=0.2)) as pool:
        await pool.wait_until(can_grade=True)
        pids = pool.worker_pids
        grades = await pool.score([hanging])

    assert grades[0].outcome is Outcome.TIMED_OUT
    assert not any(is_running(pid) for pid in pids)


async def test_a_full_queue_refuses_what_comes_next(hanging: Item) -> None:
    settings = RewardSettings(num_workers=1, timeout_seconds=60.0, max_queued_items=3)
    async with WorkerPool(settings) as pool, asyncio.TaskGroup() as tasks:
        await pool.wait_until(can_grade=True)
        stuck = tasks.create_task(pool.score([hanging, RIGHT]))
        await asyncio.sleep(0)

        with pytest.raises(BusyError, match="2 items are queued, 2 more would pass the bound of 3"):
            await pool.score([RIGHT] * 2)
        stuck.cancel()


async def test_closing_kills_a_worker_in_mid_item(hanging: Item, is_running: Callable[[int], bool]) -> None:
    async with asyncio.TaskGroup() as tasks:
        async with WorkerPool(RewardSettings(num_workers=1, timeout_seconds=60.0)) as pool:
            await pool.wait_until(can_grade=True)
            pids = pool.worker_pids
            scoring = tasks.create_task(_ends_unavailable(pool, hanging))
            await asyncio.sleep(0)

        assert not any(is_running(pid) for pid in pids)
        assert await scoring


async def _ends_unavailable(pool: WorkerPool, item: Item) -> bool:
    with pytest.raises(UnavailableError, match="stopping"):
        await pool.score([item])
    return True


async def test_without_any_worker_the_pool_says_so_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    executable = sys.executable
    async with WorkerPool(RewardSettings(num_workers=1)) as pool:
        await pool.wait_until(can_grade=True)
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        os.kill(pool.worker_pids[0], signal.SIGKILL)

        await pool.wait_until(can_grade=False)
        with pytest.raises(UnavailableError):
            await pool.score([RIGHT])

        monkeypatch.setattr(sys, "executable", executable)
        await pool.wait_until(can_grade=True)
        assert (await pool.score([RIGHT]))[0].outcome is Outcome.CORRECT
