"""One run from its services' start to its last evaluation."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.disk import DiskWatch
from deploy.errors import RunFailedError, first_cause
from deploy.live_table import Display
from deploy.placement import Bundle, Service
from deploy.run_file import RunConfig
from deploy.run_folder import RunFolder
from deploy.run_records import (
    EvaluationRecord,
    Moment,
    ShownStep,
    StepFollower,
    append_evaluation,
    read_evaluations,
    read_steps,
)
from deploy.service_handle import last_words
from deploy.services import Services
from deploy.supervisor import ServicePhase, ServiceState
from evaluation.accuracy import EvaluationError, evaluate
from reward_service.client import RewardClient
from rollout_server.client import RolloutError, RolloutFleet
from runtime.credentials import read_token
from runtime.problems.problem import Problem
from runtime.problems.tokenizer import load_tokenizer
from runtime.process import ReadyFile, wait_for_stop_signal

_FOLLOW_SECONDS = 0.25
_HANDSHAKE_SECONDS = 30.0
# Together with Ray's own end it stays below the 15 s in which a Ctrl-C must be done.
_STOP_SECONDS = 13.0
_SERVER_GRACE_SECONDS = 2.0


class TrainRun:
    """One run. One event loop owns an object of this class."""

    def __init__(
        self,
        config: RunConfig,
        *,
        folder: RunFolder,
        bundles: Sequence[Bundle],
        held_out: Sequence[Problem],
        is_resumed: bool,
        display: Display,
        watch: DiskWatch,
    ) -> None:
        self._config, self._folder, self._is_resumed = config, folder, is_resumed
        self._display, self._watch = display, watch
        self._num_checkpoint_failures = 0
        token = read_token()
        self._services = Services(config, folder=folder, bundles=bundles, token=token)
        self._fleet, self._rewards = RolloutFleet(token=token), RewardClient(token=token)
        self._tokenizer = load_tokenizer(Path(config.rollout.model))
        self._held_out = held_out
        self._waiting = [bundle.name for bundle in bundles]
        self._learner_ended = asyncio.Event()
        self._begin_unix = time.time()
        self._is_evaluating = False

    async def run(self) -> None:
        """Starts the services, evaluates, trains, evaluates again, and stops the services, whatever happens.

        Raises:
            UserError: A service cannot start because of a setting, a file or a port.
            RunFailedError: A service ended that must not, or an evaluation failed.
        """
        try:
            self._display.phase("placing the services")
            await self._services.launch(is_resumed=self._is_resumed)
            await self._until_ready()
            await self._services.register_servers()
            self._display.phase("waiting for the first step")
            await self._train()
            await self._evaluate_at_the_end()
        finally:
            self._display.phase("stopping the services")
            await self._fleet.close()
            await self._rewards.close()
            await self._services.stop(within_seconds=_STOP_SECONDS, server_grace_seconds=_SERVER_GRACE_SECONDS)
            self._display.phase("")

    async def _until_ready(self) -> None:
        """Waits for the services; while the learner still loads, the servers are evaluated as they are."""
        self._on_ready(None)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._services.until_ready((Service.LEARNER,), on_ready=self._on_ready))
                await self._services.until_ready((Service.ROLLOUT, Service.REWARD), on_ready=self._on_ready)
                for address in self._services.addresses(Service.ROLLOUT):
                    await self._fleet.add_server(address, timeout_seconds=_HANDSHAKE_SECONDS)
                for address in self._services.addresses(Service.REWARD):
                    await self._rewards.add_server(address)
                known = read_evaluations(self._folder.evaluations_file)
                for record in known:
                    self._display.evaluation(record)
                if not any(record.moment == "before" for record in known):
                    await self._evaluate("before", step=0, exact_policy_version=0)
        except ExceptionGroup as group:
            raise first_cause(group) from group

    def _on_ready(self, name: str | None) -> None:
        if name is not None:
            self._waiting.remove(name)
        # Ranks besides the first one never say that they are ready.
        waiting = [name for name in self._waiting if not name.startswith(Service.LEARNER) or name == "learner-0"]
        self._display.phase(f"starting {', '.join(waiting)}" if waiting else "evaluating before training")

    async def _train(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(tasks))
                await self._services.watch(self._on_change)
                self._learner_ended.set()
        except ExceptionGroup as group:
            raise first_cause(group) from group

    async def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Shows the steps that the learner writes, and evaluates now and then, until the learner has ended."""
        follower = StepFollower(self._folder.metrics_file)
        is_last = False
        while not is_last:
            is_last = self._learner_ended.is_set()
            records = await asyncio.to_thread(follower.new_records)
            if news := await asyncio.to_thread(self._watch.news):
                self._display.note(news)
            if records:
                self._note_checkpoint_failures(records)
                self._display.phase("")
                self._display.steps(records)
                self._note_version(records[-1].policy_version)
            due = [record for record in records if self._is_evaluation_due(record)]
            if due and not self._is_evaluating:
                self._is_evaluating = True
                tasks.create_task(self._evaluate_meanwhile(due[-1]))
            with suppress(TimeoutError):
                async with asyncio.timeout(_FOLLOW_SECONDS):
                    await self._learner_ended.wait()

    def _note_checkpoint_failures(self, records: Sequence[ShownStep]) -> None:
        for record in records:
            if record.time_unix >= self._begin_unix and record.checkpoint_failures > self._num_checkpoint_failures:
                self._num_checkpoint_failures = record.checkpoint_failures
                self._display.note(
                    f"ALARM: the checkpoint of step {record.step} could not be written ({self._folder.kept()}); "
                    "training goes on, and the next one is tried when it is due; training.log says why"
                )

    def _is_evaluation_due(self, record: ShownStep) -> bool:
        every = self._config.evaluation.every_steps
        is_new = record.time_unix >= self._begin_unix
        return every > 0 and is_new and record.step % every == 0 and record.step < self._config.learner.num_steps

    async def _evaluate_meanwhile(self, record: ShownStep) -> None:
        """Weights change meanwhile: the record says which versions answered."""
        try:
            await self._evaluate("during", step=record.step, min_policy_version=record.policy_version)
        except RunFailedError as error:
            self._display.note(str(error))
        finally:
            self._is_evaluating = False

    async def _evaluate_at_the_end(self) -> None:
        steps = read_steps(self._folder.metrics_file)
        step, version = (steps[-1].step, steps[-1].policy_version) if steps else (0, 0)
        self._note_version(version)
        self._display.phase("evaluating after training")
        await self._evaluate("after", step=step, exact_policy_version=version)

    async def _evaluate(
        self,
        moment: Moment,
        *,
        step: int,
        exact_policy_version: int | None = None,
        min_policy_version: int | None = None,
    ) -> None:
        if not self._held_out:
            return
        try:
            result = await evaluate(
                self._held_out,
                tokenizer=self._tokenizer,
                fleet=self._fleet,
                rewards=self._rewards,
                settings=self._config.evaluation,
                exact_policy_version=exact_policy_version,
                min_policy_version=min_policy_version,
            )
        except EvaluationError as error:
            raise RunFailedError(f"evaluation {moment} training, step {step}: {error}") from error
        record = EvaluationRecord(moment=moment, step=step, time_unix=time.time(), result=result)
        try:
            append_evaluation(self._folder.evaluations_file, record)
        except OSError as error:
            self._display.note(f"{self._folder.evaluations_file.name}: {error.strerror}: the report will lack this")
        self._display.evaluation(record)

    def _note_version(self, policy_version: int) -> None:
        for info in self._fleet.servers:
            self._fleet.note_version(info.address, policy_version)

    async def _on_change(self, bundle: Bundle, before: ReadyFile | None, state: ServiceState) -> None:
        """A server died or serves again: the evaluations must know, and so must whoever watches."""
        is_rollout = bundle.service is Service.ROLLOUT
        if before is not None:
            await (self._fleet if is_rollout else self._rewards).remove_server(before.address)
        if state.phase is not ServicePhase.READY or state.ready is None:
            words = last_words(state)
            self._display.note(f"{bundle.name} {state.reason}{f' ({words})' if words else ''}; it is started again")
            return
        self._display.note(f"{bundle.name} serves again")
        if not is_rollout:
            await self._rewards.add_server(state.ready.address)
            return
        # Should it have died once more, its next start is announced as well.
        with suppress(RolloutError):
            await self._fleet.add_server(state.ready.address, timeout_seconds=_HANDSHAKE_SECONDS)


async def run_until_signal(work: Coroutine[Any, Any, None]) -> bool:
    """Runs to the end, or until SIGINT or SIGTERM, which cancels the work and waits for it to clean up.

    Returns:
        Whether the work came to its end.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            main = tasks.create_task(work)
            stop = tasks.create_task(wait_for_stop_signal())
            await asyncio.wait((main, stop), return_when=asyncio.FIRST_COMPLETED)
            is_stopped = stop.done()
            (main if is_stopped else stop).cancel()
    except ExceptionGroup as group:
        raise first_cause(group) from group
    return not is_stopped
