"""One run on rank 0: its parts put together, and what the main loop asks of them."""

import json
import os
import signal
import threading
import types
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import structlog

from learner import metrics
from learner.assignment import LearnerAssignment
from learner.background import Background
from learner.batch import pack
from learner.checkpoint import CheckpointError
from learner.collector import Collector
from learner.ledger import Ledger, LedgerUnwritableError
from learner.policy import Policy, UpdateReport
from learner.probe import Probe
from learner.prompts import PromptSource
from learner.ranks import Leader
from learner.records import ScoredGroup, ScoredRollout
from learner.run_checkpoints import RunCheckpoints
from learner.run_log import GroupFigures, RunLog, StepClock
from learner.servers import ModelFacts, ServerBook
from learner.service import LearnerServicer, RunStatus
from learner.weight_push import PushReport, WeightPush, WeightPushError
from protos.learner.v1 import learner_pb2
from protos.learner.v1.learner_pb2_grpc import add_LearnerServiceServicer_to_server
from runtime.credentials import read_token
from runtime.problems.tokenizer import load_tokenizer, stop_token_ids, tokenizer_fingerprint
from runtime.process import ReadyFile
from runtime.serving import Listener
from runtime.telemetry import serve_metrics
from runtime.weights.manifest import WeightManifest

log = structlog.get_logger()

LEARNER_SERVICE = learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name
POLL_SECONDS = 0.2
"""How often a wait looks at whether the run was asked to stop."""
MAX_SKIPPED_STEPS = 10
"""So many steps in a row that are not finite end the run."""


class Run:
    """Rank 0 of one run; every method is called on the main thread."""

    def __init__(self, assignment: LearnerAssignment, policy: Policy, leader: Leader) -> None:
        """Use `begin`."""
        self._assignment, self._settings = assignment, assignment.settings
        self._policy, self._leader = policy, leader
        self._background = Background()
        self._status = RunStatus(assignment.run_id, assignment.settings.num_steps)
        self._token = read_token()
        folder = assignment.model_folder
        self._servers = ServerBook(token=self._token, model=_model_facts(folder))
        self._tokenizer = load_tokenizer(folder)
        self._prompts = PromptSource(assignment.problems, encode=self._tokenizer.encode, seed=assignment.seed)
        self._checkpoints = RunCheckpoints(assignment, leader=leader, prompts=self._prompts)
        start_step = self._checkpoints.begin()
        self._status.policy_version = start_step
        self._status.checkpoint_step = start_step or None
        self._ledger = Ledger(assignment.run_folder / "ledger.sqlite", start_step=start_step)
        self._log = RunLog(assignment.run_folder / "metrics.jsonl", start_step=start_step)
        self._collector = Collector(
            prompts=self._prompts,
            servers=self._servers,
            ledger=self._ledger,
            settings=self._settings,
            decode=self._tokenizer.decode,
            policy_version=start_step,
        )
        self._push = WeightPush(
            background=self._background,
            servers=self._servers,
            manifest=WeightManifest.make(policy.manifest_entries(), bucket_bytes=self._settings.bucket_bytes),
            settings=self._settings,
            run_id=assignment.run_id,
            device=policy.device,
            stop=self._status.stop,
        )
        self._probe = Probe(
            background=self._background,
            servers=self._servers,
            problem=assignment.problems[0],
            encode=self._tokenizer.encode,
            settings=self._settings,
            stop=self._status.stop,
        )
        self._listener: Listener | None = None
        self._clock = StepClock()
        self._num_skipped_in_a_row = 0

    @classmethod
    def begin(cls, assignment: LearnerAssignment, policy: Policy, *, ready_file: Path | None) -> Self:
        """Loads the newest checkpoint where the run is resumed, and takes registrations from now on."""
        run = cls(assignment, policy, Leader(policy))
        listen = assignment.settings.listen
        run._listener = run._background.call(
            Listener.start(
                host=listen.host,
                port=listen.port,
                services=[LEARNER_SERVICE],
                register=[partial(add_LearnerServiceServicer_to_server, LearnerServicer(run._servers, run._status))],
                token=run._token,
            ),
            timeout_seconds=30,
        )
        run._background.call(run._listener.set_serving(True), timeout_seconds=10)
        metrics_address = serve_metrics(host=listen.host, port=listen.metrics_port)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, run._on_signal)
        log.info("taking registrations", address=run._listener.address, policy_version=run._status.policy_version)
        if ready_file is not None:
            ReadyFile(os.getpid(), run._listener.address, metrics_address, uuid.uuid4().hex).write(ready_file)
        return run

    def _on_signal(self, number: int, _frame: types.FrameType | None) -> None:
        if self._status.stop.is_set():
            os._exit(128 + number)
        # Not here: the main thread may hold the event's lock at this moment.
        threading.Thread(target=self._status.stop.set).start()

    @property
    def is_going_on(self) -> bool:
        """Whether there is a step to make, and nobody asked to stop."""
        return self._status.policy_version < self._settings.num_steps and not self._status.stop.is_set()

    def wait_for_servers(self) -> bool:
        """Waits until as many servers as the assignment names have registered; False if asked to stop before."""
        while not self._status.stop.wait(POLL_SECONDS):
            enough_rollout = self._servers.num_rollout >= self._assignment.num_rollout_servers
            if enough_rollout and self._servers.num_reward >= self._assignment.num_reward_servers:
                # The wait for servers is no part of the first step.
                self._clock.restart()
                return True
        return False

    def push(self) -> None:
        """Pushes the learner's version to every rollout server, and proves it by a few samples."""
        self._status.phase = learner_pb2.LEARNER_PHASE_PUSHING
        version = self._status.policy_version
        with self._clock.phase("push"):
            pushed = self._push_version()
        if pushed is None:
            return
        self._clock.stopped_seconds = pushed.stopped_seconds
        self._collector.set_version(version)
        with self._clock.phase("probe"):
            # Before slots reopen: behind a step's worth of new rollouts the answer would hold up the next update.
            self._probe.ask(version)
            self._clock.probe_difference = self._probe.max_difference(self._leader)
        self._collector.start(self._background)

    def _push_version(self) -> PushReport | None:
        """Pushes the learner's version; None if the run was asked to stop before there was a server."""
        try:
            return self._push.push(self._leader.parameters_for_push, policy_version=self._status.policy_version)
        except WeightPushError:
            if self._status.stop.is_set():
                return None
            raise

    def next_groups(self) -> list[ScoredGroup] | None:
        """Waits for the groups of a step; servers that register meanwhile are given weights. None if asked to stop."""
        self._status.phase = learner_pb2.LEARNER_PHASE_WAITING
        with self._clock.phase("wait"):
            while not self._status.stop.is_set():
                groups = self._collector.take(self._settings.prompts_per_step, timeout_seconds=POLL_SECONDS)
                if groups is not None:
                    return groups
                if self._servers.has_waiting:
                    self._push_version()
        return None

    def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """One optimizer step on the groups; the ledger books them as trained, or dropped if it was skipped."""
        self._status.phase = learner_pb2.LEARNER_PHASE_TRAINING
        with self._clock.phase("train"):
            shares = pack(
                groups,
                num_ranks=self._settings.num_ranks,
                tokens_per_micro_batch=self._settings.tokens_per_micro_batch,
                tokens_per_shared_row=self._settings.tokens_per_shared_row,
                policy_version=self._status.policy_version,
            )
            report = self._leader.update(shares)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if report.is_applied:
            self._num_skipped_in_a_row = 0
            self._ledger.end_trained(step=report.policy_version, rollouts=rollouts)
            metrics.SAMPLES.labels("trained", "").inc(len(rollouts))
        else:
            self._skip(rollouts)
        self._clock.figures = GroupFigures.of(groups, policy_version=self._status.policy_version)
        self._status.policy_version = report.policy_version
        return report

    def _skip(self, rollouts: Sequence[ScoredRollout]) -> None:
        self._ledger.end_dropped([rollout.sample_id for rollout in rollouts], reason="nonfinite_step")
        metrics.SAMPLES.labels("dropped", "nonfinite_step").inc(len(rollouts))
        metrics.NONFINITE_STEPS.inc()
        self._num_skipped_in_a_row += 1
        log.error("step skipped: loss or gradient is not finite", step=self._status.policy_version + 1)
        if self._num_skipped_in_a_row == MAX_SKIPPED_STEPS:
            raise RuntimeError(f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite")

    def end_step(self, groups: Sequence[ScoredGroup], report: UpdateReport) -> None:
        """Gives the groups' slots back, makes a checkpoint if one is due, and records the step."""
        self._collector.release(groups)
        status, settings = self._status, self._settings
        is_due = status.policy_version % settings.checkpoint_every_steps == 0 or status.checkpoint.is_set()
        if report.is_applied and (is_due or not self.is_going_on):
            status.checkpoint.clear()
            with self._clock.phase("checkpoint"):
                self._checkpoint()
        counts = self._ledger.counts()
        status.samples_issued = counts.issued
        self._clock.checkpoint_failures = self._checkpoints.num_failures
        if report.is_applied:
            self._log.record(self._clock.record(report, counts))
        self._clock.restart()

    def _checkpoint(self) -> bool:
        """Whether it was written. It counts no sample that the ledger's file does not hold."""
        step, samples_issued = self._status.policy_version, self._ledger.counts().issued
        try:
            self._ledger.sync()
        except LedgerUnwritableError as error:
            self._checkpoints.note_failure(step, error)
            return False
        if not self._checkpoints.save(step, samples_issued=samples_issued):
            return False
        self._status.checkpoint_step = step
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Ends the accounts and every connection; after a failure the newest checkpoint stays what it is."""
        # Each part ends whatever became of the others; the last one named here is the first to end.
        with ExitStack() as ends:
            ends.callback(self._background.close)
            ends.callback(self._close_connections)
            if error is None:
                # After a failure ranks may be in different collectives: they end with this process instead.
                ends.callback(self._leader.stop)
            ends.callback(self._push.leave)
            ends.callback(self._log.close)
            ends.callback(self._close_ledger, "failed" if error is not None else "run_ended")
            if error is None:
                ends.callback(self._keep_result)
            else:
                log.error("run failed", error=f"{type(error).__name__}: {error}")
            ends.callback(self._collector.stop)
        log.info("run ended", policy_version=self._status.policy_version, was_stopped=self._status.stop.is_set())

    def _keep_result(self) -> None:
        step, kept = self._status.policy_version, self._status.checkpoint_step or 0
        is_kept = step == kept or self._checkpoint()
        if not self._status.stop.is_set():
            self._checkpoints.export(step)
        if not is_kept:
            raise CheckpointError(
                f"the last checkpoint, of step {step}, could not be written ({self._checkpoints.last_failure}); "
                f"{f'that of step {kept} is whole' if kept else 'there is none before it'}"
            )
        self._status.phase = learner_pb2.LEARNER_PHASE_DONE

    def _close_ledger(self, reason: str) -> None:
        metrics.SAMPLES.labels("dropped", "run_ended").inc(self._ledger.counts().open)
        self._ledger.close_run(reason)

    def _close_connections(self) -> None:
        if self._listener is not None:
            self._background.call(self._listener.stop(drain_seconds=1), timeout_seconds=10)
        self._background.call(self._servers.close(), timeout_seconds=10)


def _model_facts(folder: Path) -> ModelFacts:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return ModelFacts(
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        vocabulary_size=int(config["vocab_size"]),
        stop_token_ids=tuple(stop_token_ids(folder)),
    )
