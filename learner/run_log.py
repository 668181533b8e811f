"""What a step leaves behind: a line of metrics.jsonl, the gauges of /metrics, a line of training.log."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from learner import metrics
from learner.ledger import LedgerCounts
from learner.policy import UpdateReport
from learner.records import ScoredGroup
from runtime.patient_file import PatientFile

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl."""

    step: int
    policy_version: int
    time_unix: float
    reward_mean: float
    accuracy: float
    """Share of correct rollouts among those scored."""
    num_rollouts: int
    tokens: int
    """Completion tokens trained on."""
    tokens_per_second: float
    response_tokens_mean: float
    staleness_mean: float
    """In policy versions."""
    staleness_max: int
    loss: float
    grad_norm: float
    learning_rate: float
    clip_share: float
    truncated_share: float
    mismatch_kl: float
    max_logprob_difference: float | None
    """Learner's against server's logprobs of the same weights; None if no token could be compared."""
    wait_seconds: float
    train_seconds: float
    push_seconds: float
    stopped_seconds: float
    """Longest time in the push in which a server sampled nothing."""
    probe_seconds: float
    """Comparing logprobs with the servers' after the push."""
    checkpoint_seconds: float
    step_seconds: float
    samples_issued: int
    samples_dropped: int
    """Samples that ended otherwise than trained, so far."""
    checkpoint_failures: int
    """Checkpoints that could not be written, since the learner was started."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What the groups of a step say."""

    reward_mean: float
    accuracy: float
    num_rollouts: int
    tokens: int
    staleness_mean: float
    staleness_max: int

    @classmethod
    def of(cls, groups: Sequence[ScoredGroup], *, policy_version: int) -> "GroupFigures":
        """Sums the rollouts up; staleness is counted from the version that is about to be updated."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        staleness = [policy_version - rollout.oldest_version for rollout in rollouts]
        for versions in staleness:
            metrics.STALENESS.observe(versions)
        return cls(
            reward_mean=sum(rollout.reward for rollout in rollouts) / len(rollouts),
            accuracy=sum(rollout.outcome == "correct" for rollout in rollouts) / len(rollouts),
            num_rollouts=len(rollouts),
            tokens=sum(len(rollout.token_ids) for rollout in rollouts),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
        )


class StepClock:
    """Gathers what a step's record needs while the step goes on."""

    def __init__(self) -> None:
        self.stopped_seconds = 0.0
        self.checkpoint_failures = 0
        self.probe_difference: float | None = None
        self.figures: GroupFigures | None = None
        self.restart()

    def restart(self) -> None:
        """Begins a step."""
        self._begin = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Books the time inside under a phase."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - begin

    def record(self, report: UpdateReport, counts: LedgerCounts) -> StepRecord:
        """The record of the step that ends now."""
        assert self.figures is not None, "a step has groups"
        figures, seconds = self.figures, time.monotonic() - self._begin
        return StepRecord(
            step=report.policy_version,
            policy_version=report.policy_version,
            time_unix=time.time(),
            reward_mean=figures.reward_mean,
            accuracy=figures.accuracy,
            num_rollouts=figures.num_rollouts,
            tokens=figures.tokens,
            tokens_per_second=figures.tokens / seconds,
            response_tokens_mean=figures.tokens / figures.num_rollouts,
            staleness_mean=figures.staleness_mean,
            staleness_max=figures.staleness_max,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            clip_share=report.clip_share,
            truncated_share=report.truncated_share,
            mismatch_kl=report.mismatch_kl,
            max_logprob_difference=_largest(self.probe_difference, report.max_logprob_difference),
            wait_seconds=self._seconds["wait"],
            train_seconds=self._seconds["train"],
            push_seconds=self._seconds["push"],
            stopped_seconds=self.stopped_seconds,
            probe_seconds=self._seconds["probe"],
            checkpoint_seconds=self._seconds["checkpoint"],
            step_seconds=seconds,
            samples_issued=counts.issued,
            samples_dropped=sum(counts.dropped.values()) + sum(counts.failed.values()),
            checkpoint_failures=self.checkpoint_failures,
        )


class RunLog:
    """Appends to metrics.jsonl; what an earlier incarnation wrote after its last checkpoint is cut off first.

    Lines that a full disk has no room for are written once it has.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        if path.exists():
            # A power cut may leave anything behind the last whole line.
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) <= start_step]
            part = path.with_suffix(".part")
            part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            part.replace(path)
        self._file = PatientFile(path)

    def record(self, record: StepRecord) -> None:
        """Writes one step."""
        self._file.write(f"{json.dumps(asdict(record))}\n".encode())
        if self._file.num_held:
            log.warning("metrics.jsonl cannot be written", num_lines_held=self._file.num_held)
        metrics.STEP.set(record.step)
        metrics.LAST_STEP.set(time.time())
        metrics.LOSS.set(record.loss)
        metrics.GRAD_NORM.set(record.grad_norm)
        metrics.REWARD.set(record.reward_mean)
        metrics.ACCURACY.set(record.accuracy)
        metrics.MISMATCH_KL.set(record.mismatch_kl)
        metrics.CLIP.set(record.clip_share)
        metrics.TRUNCATED.set(record.truncated_share)
        metrics.TOKENS.inc(record.tokens)
        if record.max_logprob_difference is not None:
            metrics.LOGPROB_DIFFERENCE.set(record.max_logprob_difference)
        for phase in ("wait", "train", "push", "probe", "checkpoint"):
            metrics.STEP_SECONDS.labels(phase).observe(getattr(record, f"{phase}_seconds"))
        log.info(
            "step",
            step=record.step,
            reward=round(record.reward_mean, 4),
            loss=round(record.loss, 5),
            grad_norm=round(record.grad_norm, 4),
            staleness=round(record.staleness_mean, 2),
            seconds=round(record.step_seconds, 3),
        )

    def close(self) -> None:
        """Writes what has waited for room, if there is some now."""
        self._file.close()
        if self._file.num_held:
            log.error("metrics.jsonl lacks its last lines, for want of space", num_lines=self._file.num_held)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        # A line that a crash has cut short.
        return 1 << 62


def _largest(*differences: float | None) -> float | None:
    return max((difference for difference in differences if difference is not None), default=None)
