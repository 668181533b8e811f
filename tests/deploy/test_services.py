"""The services of a run on a real Ray: brought up, watched, taken down; a scripted process stands for each."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from deploy.child_process import ChildSpec
from deploy.errors import RunFailedError, UserError
from deploy.local_ray import ray_cluster
from deploy.placement import Bundle, ClusterFacts, Service, plan_placement
from deploy.run_file import RaySection, load_run_file
from deploy.run_folder import RunFolder
from deploy.services import Services
from deploy.supervisor import ServicePhase, ServiceState
from protos.learner.v1 import learner_pb2
from protos.learner.v1.learner_pb2_grpc import LearnerServiceStub
from runtime.dialling import dial
from runtime.process import ReadyFile

pytestmark = pytest.mark.slow

CLUSTER = RaySection(num_cpus=1, object_store_bytes=80_000_000)


class ScriptedServices(Services):
    """Starts another command than `tandem serve`; all the rest is what a run does."""

    def _spec(self, bundle: Bundle, options: tuple[str, ...], environment: dict[str, str]) -> ChildSpec:
        spec = super()._spec(bundle, options, environment)
        return replace(spec, arguments=("-m", "tests.deploy.scripted_service", bundle.service.value))


@pytest.fixture(scope="module")
def facts() -> Iterator[ClusterFacts]:
    with ray_cluster(CLUSTER) as cluster:
        yield cluster


def services_of(facts: ClusterFacts, folder: Path, *, max_restarts: int = 5) -> ScriptedServices:
    config = load_run_file(None, {"services.max_restarts": str(max_restarts)})
    return ScriptedServices(config, folder=RunFolder(folder), bundles=plan_placement(config, facts), token=None)


@asynccontextmanager
async def brought_up(facts: ClusterFacts, folder: Path, *, max_restarts: int = 5) -> AsyncIterator[ScriptedServices]:
    """Services that serve and are registered."""
    services = services_of(facts, folder, max_restarts=max_restarts)
    try:
        async with asyncio.timeout(60):
            await services.launch(is_resumed=False)
            await services.until_ready(tuple(Service), on_ready=lambda _name: None)
            await services.register_servers()
            yield services
    finally:
        await services.stop(within_seconds=15, server_grace_seconds=2)


def pid_of(folder: Path, name: str) -> int:
    ready = ReadyFile.read(RunFolder(folder).log_file(name).with_suffix(".ready"))
    assert ready is not None
    return ready.pid


async def ask_learner(services: Services, method: str, request: Any) -> Any:
    (address,) = services.addresses(Service.LEARNER)
    async with dial(address, token=None) as channel:
        return await getattr(LearnerServiceStub(channel), method)(request, timeout=10)


async def known_addresses(services: Services) -> set[str]:
    answer = await ask_learner(services, "ListServers", learner_pb2.ListServersRequest())
    return {server.address for server in answer.servers}


async def ignore(bundle: Bundle, before: ReadyFile | None, state: ServiceState) -> None:
    """A change that does not matter."""


async def test_services_come_up_and_the_learner_knows_the_servers(facts: ClusterFacts, tmp_path: Path) -> None:
    services, names = services_of(facts, tmp_path), set[str]()

    async with asyncio.timeout(60):
        await services.launch(is_resumed=False)
        await services.until_ready(tuple(Service), on_ready=names.add)
        await services.register_servers()
        known = await known_addresses(services)
        servers = {*services.addresses(Service.ROLLOUT), *services.addresses(Service.REWARD)}
        await services.stop(within_seconds=15, server_grace_seconds=2)

    assert names == {"rollout-0", "reward-0", "learner-0"}
    assert known == servers
    assert len(servers) == 2


@pytest.mark.parametrize("service", [Service.ROLLOUT, Service.REWARD])
async def test_a_server_that_is_killed_is_started_and_registered_again(
    facts: ClusterFacts, tmp_path: Path, service: Service
) -> None:
    changes = asyncio.Queue[tuple[Bundle, ReadyFile | None, ServiceState]]()

    async def on_change(bundle: Bundle, before: ReadyFile | None, state: ServiceState) -> None:
        await changes.put((bundle, before, state))

    async with brought_up(facts, tmp_path) as services, asyncio.TaskGroup() as tasks:
        (first,) = services.addresses(service)
        tasks.create_task(services.watch(on_change))
        os.kill(pid_of(tmp_path, f"{service}-0"), signal.SIGKILL)
        bundle, before, died = await changes.get()
        _bundle, nothing, serves = await changes.get()
        known = await known_addresses(services)
        # So the watch returns: the learner ends as it should.
        await ask_learner(services, "Stop", learner_pb2.StopRequest())

    assert bundle.name == f"{service}-0"
    assert before is not None
    assert before.address == first
    assert (died.phase, died.reason) == (ServicePhase.STARTING, "was killed by SIGKILL")
    assert nothing is None
    assert serves.ready is not None
    assert serves.num_restarts == 1
    assert serves.ready.address in known


async def test_a_learner_that_is_killed_ends_the_run(facts: ClusterFacts, tmp_path: Path) -> None:
    async with brought_up(facts, tmp_path) as services:
        os.kill(pid_of(tmp_path, "learner-0"), signal.SIGKILL)

        with pytest.raises(RunFailedError, match="learner-0 was killed by SIGKILL; its log: "):
            await services.watch(ignore)


async def test_a_server_that_died_too_often_ends_the_run(facts: ClusterFacts, tmp_path: Path) -> None:
    async with brought_up(facts, tmp_path, max_restarts=0) as services:
        os.kill(pid_of(tmp_path, "reward-0"), signal.SIGKILL)

        with pytest.raises(RunFailedError, match="reward-0 was killed by SIGKILL; its log: "):
            await services.watch(ignore)


async def test_stop_ends_all_within_its_time_and_gives_the_room_back(facts: ClusterFacts, tmp_path: Path) -> None:
    async with brought_up(facts, tmp_path) as services:
        pids = [pid_of(tmp_path, f"{service}-0") for service in Service]
        # It does not hear SIGTERM.
        os.kill(pid_of(tmp_path, "reward-0"), signal.SIGSTOP)

        begin = time.monotonic()
        await services.stop(within_seconds=5, server_grace_seconds=0.5)

        # Two seconds for a busy machine, beside what was asked for.
        assert time.monotonic() - begin < 5 + 2
        assert [pid for pid in pids if psutil.pid_exists(pid)] == []
        groups = ray.util.placement_group_table().values()
        assert {group["state"] for group in groups} == {"REMOVED"}


async def test_a_cluster_without_room_is_said_in_one_line(
    facts: ClusterFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.services._PLACE_SECONDS", 1)
    config = load_run_file(None, {})
    bundles = [
        replace(bundle, num_cpus=64.0) if bundle.service is Service.LEARNER else bundle
        for bundle in plan_placement(config, facts)
    ]
    services = ScriptedServices(config, folder=RunFolder(tmp_path), bundles=bundles, token=None)

    with pytest.raises(UserError) as error:
        await services.launch(is_resumed=False)
    await services.stop(within_seconds=0.1, server_grace_seconds=0)

    words = str(error.value)
    assert words.startswith("the Ray cluster has no room for 1 x learner: {'CPU': 64.0} each is wanted, ")
    assert "\n" not in words
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}
