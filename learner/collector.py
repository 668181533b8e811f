"""Collects scored groups while the main thread trains: admission, generation, rewards, advantages, the ledger.

Admission bounds staleness: at most (max_staleness + 1) * prompts_per_step groups are admitted and not yet trained on,
so stale samples are not made rather than thrown away. Waits: `_collect_forever` for a slot, which `release` gives back
after a push; `take` for groups, which `_collect` delivers.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from learner import metrics
from learner.advantage import group_advantages
from learner.background import Background
from learner.config import LearnerSettings
from learner.ledger import Ledger, SampleText
from learner.prompts import PromptSource
from learner.records import Prompt, ScoredGroup, ScoredRollout
from learner.servers import ServerBook
from reward_service.client import RewardClientError, RewardItem, RewardRefusedError, RewardScore
from rollout_server.client import (
    FinishReason,
    GroupRequest,
    Rollout,
    RolloutRefusedError,
    RolloutUnavailableError,
    Sampling,
)
from runtime.disk import NotWrittenError

log = structlog.get_logger()

REWARD_TIMEOUT_SECONDS = 60.0
SMALLEST_GROUP = 2
"""A group with fewer scored rollouts than this has no advantages."""
MAX_REFUSED_IN_A_ROW = 100
"""So many groups refused, and none generated in between, end the run."""


class Collector:
    """Collecting belongs to the event loop; the public methods are the main thread's."""

    def __init__(
        self,
        *,
        prompts: PromptSource,
        servers: ServerBook,
        ledger: Ledger,
        settings: LearnerSettings,
        decode: Callable[[Sequence[int]], str],
        policy_version: int,
    ) -> None:
        self._prompts, self._servers, self._ledger, self._settings = prompts, servers, ledger, settings
        self._decode = decode
        self._policy_version = policy_version
        self._slots = asyncio.Semaphore((settings.max_staleness + 1) * settings.prompts_per_step)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: deque[ScoredGroup] = deque()
        self._delivered = threading.Condition()
        self._failure: BaseException | None = None
        self._num_refused_in_a_row = 0
        self._background: Background | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, background: Background) -> None:
        """Begins to collect; once it has begun, nothing happens."""
        if self._background is None:
            self._background = background
            background.submit(self._collect_forever())

    def stop(self) -> None:
        """Ends collecting; samples in flight are aborted on their servers, and stay open in the ledger."""

        async def cancel() -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=5)

        if self._background is not None:
            self._background.call(cancel(), timeout_seconds=10)

    async def _collect_forever(self) -> None:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._slots.acquire()
                    tasks.create_task(self._collect(self._prompts.next()))
        except BaseException as error:
            with self._delivered:
                self._failure = error
                self._delivered.notify()
            raise

    def take(self, num_groups: int, *, timeout_seconds: float) -> list[ScoredGroup] | None:
        """Takes groups that are fresh enough, in the order in which they were completed.

        Args:
            num_groups: How many.
            timeout_seconds: Longest time to wait for them.

        Returns:
            The groups, or None if there are not enough yet.

        Raises:
            NotWrittenError: The ledger could not be written for so long that it holds too much.
            RuntimeError: Collecting has failed for good.
        """
        with self._delivered:
            self._delivered.wait_for(lambda: len(self._ready) >= num_groups or self._failure, timeout_seconds)
            if self._failure is not None:
                cause = _first(self._failure)
                if isinstance(cause, NotWrittenError):
                    raise cause
                raise RuntimeError(f"collecting has failed: {cause}") from self._failure
            self._drop_stale()
            if len(self._ready) < num_groups:
                return None
            return [self._ready.popleft() for _ in range(num_groups)]

    def _drop_stale(self) -> None:
        oldest = self._policy_version - self._settings.max_staleness
        for group in list(self._ready):
            if min(rollout.oldest_version for rollout in group.rollouts) < oldest:
                self._ready.remove(group)
                self._end([rollout.sample_id for rollout in group.rollouts], end="dropped", reason="stale")
                self.release([group])

    def release(self, groups: Sequence[ScoredGroup]) -> None:
        """Gives the slots of groups back that were trained on; after the push, so that new ones are fresh."""
        assert self._loop is not None, "groups come from collecting"
        for group in groups:
            self._prompts.mark_done(group.prompt.position)
            self._loop.call_soon_threadsafe(self._slots.release)

    def set_version(self, policy_version: int) -> None:
        """The learner has a new version."""
        self._policy_version = policy_version

    async def _collect(self, prompt: Prompt) -> None:
        """The way of one prompt: issued, generated, scored, delivered; or every sample ended with a reason."""
        group_id = f"{self._ledger.incarnation}-{prompt.prompt_id}"
        ids = [f"{group_id}-s{index}" for index in range(self._settings.rollouts_per_prompt)]
        self._ledger.issue(group_id=group_id, prompt=prompt, sample_ids=ids, policy_version=self._policy_version)
        with structlog.contextvars.bound_contextvars(group_id=group_id):
            group = await self._scored_group(group_id, prompt, ids)
        if group is None:
            self._prompts.mark_done(prompt.position)
            self._slots.release()
            return
        with self._delivered:
            self._ready.append(group)
            self._delivered.notify()

    async def _scored_group(self, group_id: str, prompt: Prompt, ids: list[str]) -> ScoredGroup | None:
        settings = self._settings
        sampling = Sampling(temperature=settings.sampling.temperature, max_tokens=settings.sampling.max_tokens)
        try:
            rollouts = await self._servers.fleet.generate_group(
                GroupRequest(group_id, prompt.token_ids, tuple(ids), sampling),
                timeout_seconds=settings.group_timeout_seconds,
                min_policy_version=max(0, self._policy_version - settings.max_staleness),
            )
        except RolloutUnavailableError as error:
            log.warning("group failed", reason=str(error))
            self._end(ids, end="failed", reason="rollout_deadline")
            return None
        except RolloutRefusedError as error:
            self._refuse(ids, error, reason="refused")
            return None
        if again := [rollout.sample_id for rollout in rollouts for _ in range(rollout.attempt)]:
            self._ledger.record_retry(again)
        whole = [rollout for rollout in rollouts if rollout.finish_reason is not FinishReason.ABORTED]
        self._end(_missing(ids, whole), end="failed", reason="aborted_by_engine")
        texts = {rollout.sample_id: self._decode(rollout.token_ids) for rollout in whole}
        items = [RewardItem(sample_id, text, prompt.reference_answer) for sample_id, text in texts.items()]
        try:
            scores = await self._servers.rewards.score(
                items, group_id=group_id, timeout_seconds=REWARD_TIMEOUT_SECONDS
            ) if items else []  # fmt: skip
        except RewardRefusedError as error:
            self._refuse(list(texts), error, reason="reward_refused")
            return None
        except RewardClientError as error:
            log.warning("group could not be scored", reason=str(error))
            self._end(list(texts), end="failed", reason="reward_unavailable")
            return None
        self._num_refused_in_a_row = 0
        self._keep_texts(prompt, whole, texts)
        return self._assemble(group_id, prompt, whole, scores)

    def _refuse(self, ids: Sequence[str], error: RolloutRefusedError | RewardRefusedError, *, reason: str) -> None:
        log.warning("group refused", reason=str(error))
        self._end(ids, end="failed", reason=reason)
        self._num_refused_in_a_row += 1
        if self._num_refused_in_a_row == MAX_REFUSED_IN_A_ROW:
            # Refusals cost no time: the prompts would be gone through without end.
            raise RuntimeError(f"{MAX_REFUSED_IN_A_ROW} groups in a row were refused; last: {error}") from error

    def _assemble(
        self, group_id: str, prompt: Prompt, rollouts: Sequence[Rollout], scores: Sequence[RewardScore]
    ) -> ScoredGroup | None:
        scored: list[tuple[Rollout, RewardScore, float]] = []
        for rollout, score in zip(rollouts, scores, strict=True):
            if score.reward is None:
                # No reward is no zero: the sample is dropped.
                self._end([rollout.sample_id], end="dropped", reason=f"reward_{score.outcome.value}")
            else:
                scored.append((rollout, score, score.reward))
        if len(scored) < SMALLEST_GROUP:
            self._end([r.sample_id for r, _, _ in scored], end="dropped", reason="group_too_small")
            return None
        advantages = group_advantages([reward for _, _, reward in scored])
        return ScoredGroup(
            group_id=group_id,
            prompt=prompt,
            rollouts=tuple(
                ScoredRollout(
                    sample_id=rollout.sample_id,
                    token_ids=rollout.token_ids,
                    behaviour_logprobs=rollout.behaviour_logprobs,
                    version_spans=tuple((span.first_token, span.policy_version) for span in rollout.version_spans),
                    finish_reason=rollout.finish_reason.value,
                    reward=reward,
                    outcome=score.outcome.value,
                    advantage=advantage,
                )
                for (rollout, score, reward), advantage in zip(scored, advantages, strict=True)
            ),
        )

    def _keep_texts(self, prompt: Prompt, rollouts: Sequence[Rollout], texts: dict[str, str]) -> None:
        text = self._decode(prompt.token_ids)
        self._ledger.keep_texts([SampleText(r.sample_id, text, texts[r.sample_id], r.token_ids) for r in rollouts])

    def _end(self, ids: Sequence[str], *, end: str, reason: str) -> None:
        if not ids:
            return
        (self._ledger.end_failed if end == "failed" else self._ledger.end_dropped)(ids, reason=reason)
        metrics.SAMPLES.labels(end, reason).inc(len(ids))


def _missing(ids: Sequence[str], rollouts: Sequence[Rollout]) -> list[str]:
    there = {rollout.sample_id for rollout in rollouts}
    return [sample_id for sample_id in ids if sample_id not in there]


def _first(error: BaseException) -> BaseException:
    """The first error of a group of errors, which says more than the group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
