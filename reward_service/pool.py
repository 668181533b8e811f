"""A pool of worker processes that no item can hurt: whatever holds a worker past the deadline is alone charged.

A worker is handed a chunk of items, answers at once what needs no parser, and then item by item. The item in hand has
`timeout_seconds`; then its worker is killed and replaced. Long before that, the items that wait behind it go back to
the queue, for the other workers. Grading has no effects, so an item that is graded twice does no harm.
"""

import asyncio
import contextlib
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

import structlog

from reward_service import metrics
from reward_service.config import RewardSettings
from reward_service.outcome import Grade, Item, Outcome
from reward_service.worker_process import WorkerLostError, WorkerProcess
from runtime.errors import BusyError, UnavailableError

log = structlog.get_logger()

MAX_CHUNK_ITEMS = 64
"""Most items that a worker holds."""
PATIENCE_SECONDS = 0.1
"""How long items wait behind the one in hand before they go back to the queue."""
MAX_DEATHS = 2
"""Workers that may die of an item before it is an ERROR."""
MAX_FAILED_STARTS = 3
"""Starts that fail in a row, with no worker left, before the pool cannot grade."""
IDLE_CHECK_SECONDS = 1.0
"""How often an idle worker is looked after."""


class _Job:
    """An item on its way, and the future that its grade goes to."""

    __slots__ = ("future", "is_queued", "item", "num_deaths")

    def __init__(self, item: Item) -> None:
        self.item = item
        self.future: asyncio.Future[Grade] = asyncio.get_running_loop().create_future()
        self.is_queued = False
        self.num_deaths = 0

    def finish(self, grade: Grade) -> None:
        """Delivers the grade, unless another worker was first or the caller has gone."""
        if not self.future.done():
            metrics.ANSWERS.labels(grade.outcome).inc()
            self.future.set_result(grade)


class WorkerPool:
    """Grades items in worker processes; an async context manager whose end leaves no process behind."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._queue: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._open: set[_Job] = set()
        self._workers: set[WorkerProcess] = set()
        self._num_failed_starts = 0
        self._able, self._unable = asyncio.Event(), asyncio.Event()
        self._unable.set()
        self._tasks = asyncio.TaskGroup()
        self._slots: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Starts the workers, without waiting for them."""
        await self._tasks.__aenter__()
        self._slots = [self._tasks.create_task(self._keep_worker()) for _ in range(self._settings.num_workers)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills the workers; items not yet graded end with UnavailableError."""
        self._give_up("the reward server is stopping")
        for slot in self._slots:
            slot.cancel()
        # Without the body's own error, which would come out wrapped in a group.
        cancelled = (kind, error, trace) if kind is asyncio.CancelledError else (None, None, None)
        await self._tasks.__aexit__(*cancelled)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are ready."""
        return [worker.pid for worker in self._workers]

    @property
    def can_grade(self) -> bool:
        """Whether items are graded: from the first worker on, until no worker is left and none can be started."""
        return self._able.is_set()

    async def wait_until(self, *, can_grade: bool) -> None:
        """Waits until `can_grade` is that."""
        await (self._able if can_grade else self._unable).wait()

    async def score(self, items: Sequence[Item]) -> list[Grade]:
        """Grades items, apart from each other; one grade an item, in the same order.

        Raises:
            BusyError: `max_queued_items` would be passed.
            UnavailableError: No worker is ready yet or can be started, or the pool is closing.
        """
        if not self.can_grade:
            raise UnavailableError("no worker is ready to grade")
        bound = self._settings.max_queued_items
        if len(self._open) + len(items) > bound:
            raise BusyError(f"{len(self._open)} items are queued, {len(items)} more would pass the bound of {bound}")
        jobs = [_Job(item) for item in items]
        self._open.update(jobs)
        metrics.QUEUED_ITEMS.set(len(self._open))
        try:
            self._enqueue(jobs)
            return list(await asyncio.gather(*(job.future for job in jobs)))
        finally:
            self._open.difference_update(jobs)
            metrics.QUEUED_ITEMS.set(len(self._open))

    async def _keep_worker(self) -> None:
        """Keeps one worker running: starts it, feeds it until it is lost, starts the next."""
        while True:
            try:
                worker = await WorkerProcess.start(self._settings)
            except (WorkerLostError, TimeoutError, OSError) as error:
                await self._back_off(error)
                continue
            try:
                self._note_ready(worker)
                reason = await self._feed(worker)
                log.warning("worker lost", pid=worker.pid, reason=reason)
                metrics.WORKER_RESTARTS.labels(reason).inc()
            finally:
                self._workers.discard(worker)
                metrics.WORKERS.set(len(self._workers))
                await worker.kill()

    def _note_ready(self, worker: WorkerProcess) -> None:
        self._num_failed_starts = 0
        self._workers.add(worker)
        metrics.WORKERS.set(len(self._workers))
        self._unable.clear()
        self._able.set()

    async def _back_off(self, error: Exception) -> None:
        """Counts a start that failed, and waits: 0.1 s at first, 5 s at most."""
        self._num_failed_starts += 1
        log.error("worker failed to start", error=str(error) or type(error).__name__, failures=self._num_failed_starts)
        metrics.WORKER_RESTARTS.labels("failed_to_start").inc()
        if self._num_failed_starts >= MAX_FAILED_STARTS and not self._workers:
            self._give_up("no worker can be started")
        longest = min(5.0, 0.1 * 2 ** min(self._num_failed_starts, 10))
        await asyncio.sleep(random.uniform(longest / 2, longest))

    def _give_up(self, reason: str) -> None:
        self._able.clear()
        self._unable.set()
        self._queue.clear()
        for job in self._open:
            if not job.future.done():
                job.future.set_exception(UnavailableError(reason))

    async def _feed(self, worker: WorkerProcess) -> str:
        """Hands the worker chunk after chunk until it is lost; returns why, as the metric's label."""
        while True:
            chunk = await self._take_chunk(worker)
            if not chunk:
                return "died"
            worker.send([job.item for job in chunk.values()])
            while chunk:
                reason = await self._await_answers(worker, chunk)
                if reason is not None:
                    self._enqueue_again(chunk.values())
                    return reason

    async def _take_chunk(self, worker: WorkerProcess) -> dict[int, _Job]:
        """Waits for items and takes a fair share of them, numbered; none only if the worker has ended meanwhile."""
        while not worker.has_ended:
            share = min(MAX_CHUNK_ITEMS, math.ceil(len(self._queue) / self._settings.num_workers))
            chunk: dict[int, _Job] = {}
            while self._queue and len(chunk) < share:
                job = self._queue.popleft()
                job.is_queued = False
                if not job.future.done():
                    chunk[len(chunk)] = job
            if chunk:
                return chunk
            if not self._queue:
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_CHECK_SECONDS):
                        await self._arrived.wait()
        return {}

    async def _await_answers(self, worker: WorkerProcess, chunk: dict[int, _Job]) -> str | None:
        """Waits for answers and takes their items off the chunk; returns why the worker is lost, if it is."""
        timeout_seconds = self._settings.timeout_seconds
        patience = min(PATIENCE_SECONDS, timeout_seconds)
        in_hand = next(iter(chunk))
        try:
            try:
                answers = await worker.receive(timeout_seconds=patience)
            except TimeoutError:
                self._enqueue_again(job for index, job in chunk.items() if index != in_hand)
                answers = await worker.receive(timeout_seconds=timeout_seconds - patience)
        except TimeoutError:
            metrics.GRADE_SECONDS.observe(timeout_seconds)
            reason = f"not graded within {timeout_seconds:g} s"
            chunk.pop(in_hand).finish(Grade(Outcome.TIMED_OUT, None, reason=reason))
            return "timed_out"
        except WorkerLostError:
            self._note_death(chunk[in_hand])
            return "died"
        for answer in answers:
            metrics.GRADE_SECONDS.observe(answer.seconds)
            chunk.pop(answer.index).finish(answer.grade)
        return None

    @staticmethod
    def _note_death(job: _Job) -> None:
        job.num_deaths += 1
        if job.num_deaths >= MAX_DEATHS:
            reason = f"{job.num_deaths} workers died while they graded it"
            job.finish(Grade(Outcome.ERROR, None, reason=reason))

    def _enqueue(self, jobs: Iterable[_Job]) -> None:
        for job in jobs:
            job.is_queued = True
            self._queue.append(job)
        self._arrived.set()

    def _enqueue_again(self, jobs: Iterable[_Job]) -> None:
        """Puts unfinished items back in front of those that came later."""
        for job in reversed(list(jobs)):
            if not job.is_queued and not job.future.done():
                job.is_queued = True
                self._queue.appendleft(job)
        self._arrived.set()
