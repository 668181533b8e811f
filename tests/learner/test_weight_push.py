"""Pushes over real gloo to servers that really receive, and to servers that fail in every phase."""

import concurrent.futures
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager

import pytest
import torch

from learner.config import LearnerSettings
from learner.servers import ModelFacts, ServerBook, ServerKind
from learner.weight_push import PushReport, WeightPush, WeightPushError
from runtime.weights.manifest import TensorEntry, WeightManifest
from tests.learner.conftest import Holder
from tests.learner.receiving_engine import ReceivingEngine
from tests.rollout_server.scripted_server import ScriptedServer, scripted_server

MODEL = ModelFacts(tokenizer_fingerprint="f" * 64, vocabulary_size=100, stop_token_ids=(1,))
SHAPES = {"embedding": (100, 300), "layer.weight": (128, 128), "norm": (7,)}
# Three buckets.
MANIFEST = WeightManifest.make(
    [TensorEntry(name, "float32", shape) for name, shape in SHAPES.items()], bucket_bytes=1 << 16
)
SETTINGS = LearnerSettings(push_timeout_seconds=10, fleet_timeout_seconds=20)


def weights(policy_version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(policy_version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Fleet:
    """A learner's end of the pushes, and the servers that have registered."""

    def __init__(self, holder: Holder, settings: LearnerSettings = SETTINGS) -> None:
        self.holder = holder
        self.servers = ServerBook(token=None, model=MODEL)
        self.stop = threading.Event()
        self.num_gathers = 0
        self.gathering_error: Exception | None = None
        self.weight_push = WeightPush(
            background=holder.background,
            servers=self.servers,
            manifest=MANIFEST,
            settings=settings,
            run_id="run",
            device=torch.device("cpu"),
            stop=self.stop,
        )

    def add_server(self) -> tuple[ScriptedServer, ReceivingEngine]:
        engine = ReceivingEngine()
        server = self.holder.hold(receiving_server(engine))
        self.register(server)
        return server, engine

    def register(self, server: ScriptedServer) -> None:
        self.holder.run(self.servers.register(ServerKind.ROLLOUT, server.address))

    def push(self, policy_version: int) -> PushReport:
        def tensors() -> Generator[tuple[str, torch.Tensor], None, None]:
            self.num_gathers += 1
            yield from weights(policy_version).items()
            if self.gathering_error is not None:
                raise self.gathering_error

        return self.weight_push.push(tensors, policy_version=policy_version)

    @property
    def reasons(self) -> dict[str, str]:
        """Why servers take no requests."""
        return {known.address: known.reason for known in self.servers.known() if not known.is_ready}

    @property
    def ready(self) -> dict[str, int]:
        """The versions of those that do."""
        return {known.address: known.policy_version for known in self.servers.known() if known.is_ready}

    def end(self) -> None:
        self.weight_push.leave()
        self.holder.run(self.servers.close())


@asynccontextmanager
async def receiving_server(engine: ReceivingEngine) -> AsyncIterator[ScriptedServer]:
    async with scripted_server(engine=engine) as server:
        yield server
        await engine.close()


@pytest.fixture
def fleet(holder: Holder) -> Iterator[Fleet]:
    yield (made := Fleet(holder))
    made.end()


def hang_up(fleet: Fleet, server: ScriptedServer) -> None:
    """The server goes away."""

    async def stop() -> None:
        await server.engine.close()
        for listener in (server.public, server.admin):
            await listener.stop(drain_seconds=0)

    fleet.holder.run(stop())


def assert_serves(engine: ReceivingEngine, policy_version: int) -> None:
    assert engine.policy_version == policy_version
    for name, expected in weights(policy_version).items():
        assert torch.equal(engine.weights[name].view(torch.int32), expected.view(torch.int32)), name


def epochs(engine: ReceivingEngine) -> list[int]:
    return [int(call.removeprefix("join ")) for call in engine.calls if call.startswith("join")]


def test_every_server_gets_equal_bits_and_serves_the_version(fleet: Fleet) -> None:
    (one, first), (other, second) = fleet.add_server(), fleet.add_server()

    report = fleet.push(1)

    assert_serves(first, 1)
    assert_serves(second, 1)
    assert (one.served.lineage, one.served.policy_version) == ("run", 1)
    assert fleet.ready == {one.address: 1, other.address: 1}
    assert report.num_servers == 2
    assert report.stopped_seconds == pytest.approx(0.2)
    assert report.push_seconds > 0


def test_a_group_is_kept_from_push_to_push(fleet: Fleet) -> None:
    _server, engine = fleet.add_server()

    for version in (1, 2, 3):
        fleet.push(version)

        assert_serves(engine, version)
    assert len(epochs(engine)) == 1


def test_a_server_that_is_gone_leaves_and_the_rest_goes_on_in_a_newer_epoch(fleet: Fleet) -> None:
    (gone, _), (stays, engine) = fleet.add_server(), fleet.add_server()
    fleet.push(1)
    hang_up(fleet, gone)

    report = fleet.push(2)

    assert_serves(engine, 2)
    assert fleet.ready == {stays.address: 2}
    assert "UNAVAILABLE" in fleet.reasons[gone.address]
    assert report.num_servers == 1
    assert sorted(set(epochs(engine))) == epochs(engine)
    assert len(epochs(engine)) == 2


def test_a_server_that_registers_between_pushes_is_in_the_next_and_only_then_gets_traffic(fleet: Fleet) -> None:
    old, first = fleet.add_server()
    fleet.push(1)
    new, second = fleet.add_server()

    assert fleet.ready == {old.address: 1}

    # The version need not be new for those that have it.
    fleet.push(1)

    assert fleet.ready == {old.address: 1, new.address: 1}
    assert_serves(first, 1)
    assert_serves(second, 1)


def test_a_server_that_registers_again_does_not_disturb_the_group(fleet: Fleet) -> None:
    server, engine = fleet.add_server()
    fleet.push(1)
    fleet.register(server)

    fleet.push(2)

    assert_serves(engine, 2)
    assert len(epochs(engine)) == 1


def test_without_a_server_a_push_waits_for_one(fleet: Fleet) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        pushing = threads.submit(fleet.push, 1)
        server, engine = fleet.add_server()

        assert pushing.result(20).num_servers == 1
    assert_serves(engine, 1)
    assert fleet.ready == {server.address: 1}


def test_without_a_server_a_push_ends_when_the_run_is_asked_to_stop(fleet: Fleet) -> None:
    fleet.stop.set()

    with pytest.raises(WeightPushError, match="policy version 1: there is no rollout server"):
        fleet.push(1)


def test_without_a_server_a_push_ends_after_its_time(holder: Holder) -> None:
    fleet = Fleet(holder, SETTINGS.model_copy(update={"fleet_timeout_seconds": 0.1}))

    with pytest.raises(WeightPushError, match="no rollout server"):
        fleet.push(1)
    fleet.end()


@pytest.mark.parametrize("phase", ["refusal", "commit_refusal"])
def test_a_server_that_refuses_a_phase_leaves_and_no_other(fleet: Fleet, phase: str) -> None:
    (stays, engine), (refuses, refusing) = fleet.add_server(), fleet.add_server()
    setattr(refusing, phase, "not now")

    fleet.push(1)

    assert_serves(engine, 1)
    assert fleet.ready == {stays.address: 1}
    assert fleet.reasons == {refuses.address: "FAILED_PRECONDITION: not now"}


def test_when_every_server_refuses_the_push_ends(fleet: Fleet) -> None:
    for _ in range(2):
        _server, engine = fleet.add_server()
        engine.commit_refusal = "not now"
    fleet.stop.set()

    with pytest.raises(WeightPushError):
        fleet.push(1)

    assert fleet.servers.num_rollout == 0
    assert fleet.num_gathers == 1


def test_who_is_to_blame_is_found_out_when_nobody_is_named(fleet: Fleet) -> None:
    (stays, engine), (forgets, forgetful) = fleet.add_server(), fleet.add_server()
    forgetful.is_forgetful = True

    fleet.push(1)

    assert_serves(engine, 1)
    assert fleet.ready == {stays.address: 1}
    assert "rank 1 could not receive: the push was given up" in fleet.reasons[forgets.address]
    fleet.push(2)
    assert_serves(engine, 2)


def test_a_receiver_that_missed_a_push_gets_it_in_a_new_group(holder: Holder) -> None:
    fleet = Fleet(holder, SETTINGS.model_copy(update={"push_timeout_seconds": 1}))
    (one, first), (other, second) = fleet.add_server(), fleet.add_server()
    fleet.push(1)
    assert second.receiver is not None
    second.receiver.leave()

    fleet.push(2)

    assert_serves(first, 2)
    assert_serves(second, 2)
    assert fleet.ready == {one.address: 2, other.address: 2}
    fleet.end()


def test_the_learners_own_failure_is_not_blamed_on_servers(fleet: Fleet) -> None:
    server, _engine = fleet.add_server()
    fleet.push(1)
    fleet.gathering_error = RuntimeError("out of memory")

    with pytest.raises(WeightPushError, match="could not gather its weights: out of memory"):
        fleet.push(2)

    assert fleet.ready == {server.address: 1}


@pytest.mark.parametrize(("kv_on_commit", "is_recomputed"), [("keep", False), ("recompute", True)])
def test_the_kv_cache_is_kept_or_recomputed_as_set(holder: Holder, kv_on_commit: str, is_recomputed: bool) -> None:
    fleet = Fleet(holder, SETTINGS.model_copy(update={"kv_on_commit": kv_on_commit}))
    _server, engine = fleet.add_server()

    fleet.push(1)

    assert engine.is_recomputed == [is_recomputed]
    fleet.end()
