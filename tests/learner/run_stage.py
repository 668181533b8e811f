"""What a test of a whole run needs: its folder, its servers, the steps of the main loop, and what it leaves behind."""

import json
import os
import signal
import socket
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from learner.assignment import LearnerAssignment
from learner.config import LearnerSettings, SamplingSettings
from learner.ledger_verdict import LedgerVerdict, verify
from learner.policy import Policy
from learner.run import Run
from protos.learner.v1 import learner_pb2
from protos.learner.v1.learner_pb2_grpc import LearnerServiceStub
from runtime.dialling import dial
from runtime.problems.tokenizer import tokenizer_fingerprint
from runtime.process import ReadyFile
from tests.learner.conftest import Holder
from tests.learner.receiving_engine import ReceivingEngine
from tests.learner.scripted_rewards import ScriptedRewards, scripted_reward_server
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

NUM_SAMPLES = 4
"""Of one step."""
SETTINGS = LearnerSettings(
    num_steps=100,
    prompts_per_step=2,
    rollouts_per_prompt=2,
    # A step's prompts are issued when the step before has ended: what is issued when is no matter of chance.
    max_staleness=0,
    sampling=SamplingSettings(max_tokens=4),
    checkpoint_every_steps=100,
    push_timeout_seconds=10,
    fleet_timeout_seconds=20,
)


class Stage:
    """One run folder, what runs in it, and the servers that register with it."""

    def __init__(self, holder: Holder, policy: Policy, assignment: LearnerAssignment) -> None:
        self.holder, self.policy, self.assignment = holder, policy, assignment
        self.folder = assignment.run_folder
        self.rewards = ScriptedRewards()
        self.address = ""
        """Of the learner that ran last."""
        self._rewards_address = holder.hold(scripted_reward_server(self.rewards))

    def add_server(self) -> tuple[ScriptedServer, ReceivingEngine]:
        """Starts a rollout server; it does not register."""
        folder = self.assignment.model_folder
        engine = ReceivingEngine(vocabulary_size=json.loads((folder / "config.json").read_text())["vocab_size"])
        return self.holder.hold(receiving_server(engine, tokenizer_fingerprint(folder))), engine

    @contextmanager
    def run(self, *servers: ScriptedServer, resume: bool = False, **changes: Any) -> Iterator[Run]:
        """A run that these servers have registered with, and a reward server."""
        settings = self.assignment.settings.model_copy(update=changes)
        assignment, ready_file = replace(self.assignment, settings=settings, resume=resume), self.folder / "ready.json"
        with Run.begin(assignment, self.policy, ready_file=ready_file) as run:
            ready = ReadyFile.read(ready_file)
            assert ready is not None
            self.address = ready.address
            self.holder.run(self.register(learner_pb2.SERVER_KIND_REWARD, self._rewards_address))
            for server in servers:
                self.holder.run(self.register(learner_pb2.SERVER_KIND_ROLLOUT, server.address))
            yield run

    async def register(self, kind: learner_pb2.ServerKind, address: str) -> None:
        await self._ask("RegisterServer", learner_pb2.RegisterServerRequest(kind=kind, address=address))

    async def stop(self) -> None:
        await self._ask("Stop", learner_pb2.StopRequest())

    async def request_checkpoint(self) -> None:
        await self._ask("RequestCheckpoint", learner_pb2.RequestCheckpointRequest())

    async def _ask(self, method: str, request: Any) -> None:
        async with dial(self.address, token=None) as channel:
            await getattr(LearnerServiceStub(channel), method)(request, timeout=10)

    async def terminate(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def verdict(self) -> LedgerVerdict:
        return verify(self.folder / "ledger.sqlite")

    def select(self, query: str) -> list[Any]:
        """Reads the ledger."""
        with closing(sqlite3.connect(self.folder / "ledger.sqlite")) as connection:
            return connection.execute(query).fetchall()

    @property
    def steps(self) -> list[int]:
        """The steps that metrics.jsonl has."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*"))

    @property
    def exports(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("export/*"))


@asynccontextmanager
async def receiving_server(engine: ReceivingEngine, fingerprint: str) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(engine=engine, tokenizer_fingerprint=fingerprint) as server:
        yield server
        await engine.close()


def assert_ended(stage: Stage) -> None:
    """However a run went: every sample has exactly one end, nobody listens any more, and no thread is left."""
    verdict = stage.verdict()
    assert verdict.problems == ()
    assert (verdict.open, verdict.lost, verdict.trained_twice) == (0, 0, 0)
    host, port = stage.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)
    # The test's own.
    assert [thread.name for thread in threading.enumerate()].count("learner-asyncio") == 1


def begin(run: Run) -> None:
    """What the main loop does first."""
    assert run.wait_for_servers()
    run.push()


def make_step(run: Run) -> None:
    """What the main loop does over and over."""
    groups = run.next_groups()
    assert groups is not None
    report = run.update(groups)
    if report.is_applied:
        run.push()
    run.end_step(groups, report)


@contextmanager
def overflowing(policy: Policy) -> Iterator[None]:
    """Weights with which neither loss nor gradient is finite."""
    *_, (_name, last) = policy.parameters_for_push()
    kept = last.clone()
    last.fill_(float("inf"))
    yield
    last.copy_(kept)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.parameters_for_push()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def versions_committed(engine: ReceivingEngine) -> list[int]:
    return [int(call.removeprefix("commit ")) for call in engine.calls if call.startswith("commit")]


def num_skipped() -> float:
    return REGISTRY.get_sample_value("tandem_learner_nonfinite_steps_total") or 0.0


def hold(stage: Stage) -> None:
    """From now on rewards wait, and calls are counted."""

    async def shut() -> None:
        stage.rewards.gate.clear()
        while not stage.rewards.asked.locked():
            await stage.rewards.asked.acquire()

    stage.holder.run(shut())
