"""A supervised service: start, restart, stop, and its end with the actor that runs it."""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from deploy.child_process import ChildSpec
from deploy.local_ray import ray_cluster
from deploy.run_file import RaySection
from deploy.supervisor import ServicePhase, ServiceSupervisor, restart_pause_seconds


def _spec(behaviour: str, folder: Path, *, start_timeout_seconds: float = 20) -> ChildSpec:
    return ChildSpec(
        name="trivial-0",
        arguments=("-m", "tests.deploy.trivial_service", behaviour),
        environment={"INSTANCE": "one"},
        log_file=folder / "logs" / "trivial-0.log",
        start_timeout_seconds=start_timeout_seconds,
    )


async def _wait_for_end(pid: int) -> None:
    """Waits for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert await asyncio.to_thread(select.select, [descriptor], [], [], 10.0) != ([], [], [])


async def test_a_service_is_ready_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    supervisor = ServiceSupervisor()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run(_spec("serve", tmp_path), max_restarts=3))
        state = await supervisor.next_state(0)
        await supervisor.stop(grace_seconds=10)

    assert state.phase is ServicePhase.READY
    assert state.ready is not None
    assert state.ready.instance_id == "one"
    assert run.result().phase is ServicePhase.ENDED
    assert run.result().returncode == -signal.SIGTERM
    assert "trivial service: serve" in (tmp_path / "logs" / "trivial-0.log").read_text(encoding="utf-8")


async def test_a_service_that_does_not_hear_is_killed_after_the_grace(tmp_path: Path) -> None:
    supervisor = ServiceSupervisor()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(supervisor.run(_spec("deaf", tmp_path), max_restarts=3))
        await supervisor.next_state(0)
        await supervisor.stop(grace_seconds=0.2)

    assert run.result().reason == "was killed by SIGKILL"


async def test_a_start_that_fails_shows_the_end_of_the_log(tmp_path: Path) -> None:
    end = await ServiceSupervisor().run(_spec("fail", tmp_path), max_restarts=0)

    assert end.phase is ServicePhase.ENDED
    assert end.reason == "ended with exit code 3"
    assert end.log_tail == ("trivial service: fail", "the reason why it fails")


async def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    end = await ServiceSupervisor().run(_spec("hang", tmp_path, start_timeout_seconds=0.3), max_restarts=0)

    assert end.reason == "did not serve within 0.3 s"


async def test_a_service_that_dies_is_started_again_with_a_new_process(tmp_path: Path) -> None:
    supervisor = ServiceSupervisor()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(supervisor.run(_spec("serve", tmp_path), max_restarts=3))
        first = await supervisor.next_state(0)
        assert first.ready is not None
        os.kill(first.ready.pid, signal.SIGKILL)
        died = await supervisor.next_state(first.generation)
        second = await supervisor.next_state(died.generation)
        await supervisor.stop(grace_seconds=10)

    assert died.phase is ServicePhase.STARTING
    assert died.reason == "was killed by SIGKILL"
    assert second.ready is not None
    assert second.ready.pid != first.ready.pid
    assert second.num_restarts == 1


async def test_restarts_have_a_bound(tmp_path: Path) -> None:
    end = await ServiceSupervisor().run(_spec("end", tmp_path), max_restarts=1)

    assert (end.phase, end.num_restarts, end.returncode) == (ServicePhase.ENDED, 1, 0)


def test_pauses_between_restarts_grow_up_to_a_bound() -> None:
    assert [restart_pause_seconds(n) for n in (1, 2, 3, 10)] == [0.5, 1.0, 2.0, 30.0]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with ray_cluster(RaySection(num_cpus=1, object_store_bytes=80_000_000)):
        yield


@pytest.mark.slow
async def test_a_service_ends_with_the_actor_that_runs_it(tmp_path: Path, local_ray: None) -> None:
    actor = ray.remote(ServiceSupervisor).options(num_cpus=0).remote()
    async with asyncio.timeout(60):
        actor.run.remote(_spec("serve", tmp_path), max_restarts=3)
        state = await actor.next_state.remote(0)

        ray.kill(actor)

        await _wait_for_end(state.ready.pid)


@pytest.mark.slow
async def test_a_stranger_s_ray_in_the_environment_is_not_joined(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    ray.shutdown()

    with ray_cluster(RaySection(num_cpus=1, object_store_bytes=80_000_000)) as facts:
        assert facts.num_cpus == 1
