"""The proof, after a push, that learner and servers mean the same weights: logprobs of a few fresh samples compared."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import structlog

from learner.background import Background
from learner.batch import MicroBatch, pack
from learner.config import LearnerSettings
from learner.loss import max_logprob_difference
from learner.ranks import Leader
from learner.records import Prompt, ScoredGroup, ScoredRollout
from learner.servers import ServerBook
from rollout_server.client import FinishReason, GroupRequest, Rollout, RolloutError, Sampling
from runtime.problems.problem import Problem

log = structlog.get_logger()

NUM_SAMPLES = 2
MAX_TOKENS = 16
"""Enough to compare; longer samples would not be there when the next step begins."""
TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.05
"""How often a wait looks at whether it is of use still."""


class Probe:
    """Asks for samples of one fixed prompt under exactly one version, while the main thread does something else."""

    def __init__(
        self,
        *,
        background: Background,
        servers: ServerBook,
        problem: Problem,
        encode: Callable[[str], Sequence[int]],
        settings: LearnerSettings,
        stop: threading.Event,
    ) -> None:
        self._stop = stop
        self._background, self._servers, self._settings = background, servers, settings
        self._prompt = Prompt("probe", 0, problem.problem_id, tuple(encode(problem.prompt)), problem.answer)
        self._asked: concurrent.futures.Future[list[Rollout]] | None = None
        self._version = 0

    def ask(self, policy_version: int) -> None:
        """Asks for samples of this version; `max_difference` waits for them."""
        sampling = self._settings.sampling
        request = GroupRequest(
            f"probe-{policy_version}",
            self._prompt.token_ids,
            tuple(f"probe-{policy_version}-{index}" for index in range(NUM_SAMPLES)),
            Sampling(temperature=sampling.temperature, max_tokens=min(sampling.max_tokens, MAX_TOKENS)),
        )
        if self._asked is not None:
            self._asked.cancel()
        self._version = policy_version
        self._asked = self._background.submit(
            self._servers.fleet.generate_group(
                request, exact_policy_version=policy_version, timeout_seconds=TIMEOUT_SECONDS
            )
        )

    def max_difference(self, leader: Leader) -> float | None:
        """Largest difference between learner's and server's logprobs of the samples asked for; None without any."""
        micro_batch = self._micro_batch()
        if micro_batch is None:
            return None
        difference = max_logprob_difference(
            leader.logprobs(micro_batch), micro_batch.behaviour_logprobs, micro_batch.on_policy_mask
        ).item()
        return difference if difference >= 0 else None

    def _micro_batch(self) -> MicroBatch | None:
        if self._asked is None:
            return None
        asked, self._asked = self._asked, None
        while not asked.done():
            # A server that waits for weights may be the only one left, and gets them when this returns.
            if self._stop.is_set() or self._servers.has_waiting:
                asked.cancel()
                return None
            concurrent.futures.wait([asked], timeout=POLL_SECONDS)
        try:
            rollouts = asked.result()
        except (RolloutError, concurrent.futures.CancelledError) as error:
            log.warning("no probe", policy_version=self._version, reason=str(error))
            return None
        group = ScoredGroup(
            group_id=f"probe-{self._version}",
            prompt=self._prompt,
            rollouts=tuple(
                ScoredRollout(
                    sample_id=rollout.sample_id,
                    token_ids=rollout.token_ids,
                    behaviour_logprobs=rollout.behaviour_logprobs,
                    version_spans=tuple((span.first_token, span.policy_version) for span in rollout.version_spans),
                    finish_reason=rollout.finish_reason.value,
                    reward=0.0,
                    outcome="probe",
                    advantage=0.0,
                )
                for rollout in rollouts
                if rollout.finish_reason is not FinishReason.ABORTED
            ),
        )
        if not group.rollouts:
            return None
        (share,) = pack(
            [group],
            num_ranks=1,
            tokens_per_micro_batch=1 << 30,
            tokens_per_shared_row=0,
            policy_version=self._version,
        )
        return share.micro_batches[0]
