"""Puts the reward server together: pool, gRPC listener, health, `/metrics`, and an orderly end."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from protos.reward.v1 import reward_pb2, reward_pb2_grpc
from reward_service.config import RewardSettings
from reward_service.outcome import DEFAULT_REWARD_FUNCTION, Item, Outcome
from reward_service.pool import WorkerPool
from reward_service.service import RewardServicer
from runtime.credentials import read_token, require_token_off_loopback
from runtime.errors import ServiceError
from runtime.process import ReadyFile, wait_for_stop_signal
from runtime.serving import Listener
from runtime.telemetry import serve_metrics

log = structlog.get_logger()

SERVICE = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name

_SELF_TEST = Item(DEFAULT_REWARD_FUNCTION, "One half is \\boxed{\\frac{2}{4} x}.", "\\frac{x}{2}")
_SELF_TEST_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A reward server that listens."""

    address: str
    """host:port of the gRPC listener."""
    pool: WorkerPool
    """Its workers."""
    is_serving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while health says SERVING."""


async def serve(settings: RewardSettings, *, ready_file: Path | None) -> None:
    """Serves until SIGTERM or SIGINT, then drains and ends.

    Args:
        settings: How to serve.
        ready_file: Written when the server is SERVING for the first time; None for no such file.

    Raises:
        ValueError: A port is taken, or the token is missing off loopback or is too short.
    """
    listen = settings.listen
    token = read_token()
    require_token_off_loopback(listen.host, token)
    metrics_address = serve_metrics(host=listen.host, port=listen.metrics_port)
    async with running(settings, token=token) as server, asyncio.TaskGroup() as tasks:
        announcement = tasks.create_task(_announce(server, metrics_address=metrics_address, ready_file=ready_file))
        signal = await wait_for_stop_signal()
        log.info("reward server stops", signal=signal.name, drain_seconds=listen.drain_seconds)
        announcement.cancel()


async def _announce(server: RewardServer, *, metrics_address: str, ready_file: Path | None) -> None:
    """Logs that the server serves, and writes the ready file, once it does."""
    await server.is_serving.wait()
    instance_id = uuid.uuid4().hex
    log.info("reward server serves", address=server.address, metrics_address=metrics_address, instance_id=instance_id)
    if ready_file is not None:
        ReadyFile(
            pid=os.getpid(), address=server.address, metrics_address=metrics_address, instance_id=instance_id
        ).write(ready_file)


@asynccontextmanager
async def running(settings: RewardSettings, *, token: str | None) -> AsyncIterator[RewardServer]:
    """A reward server while the context lasts; calls in flight at its end get `drain_seconds`.

    Raises:
        ValueError: The port is taken, or the token is missing off loopback.
    """
    pool = WorkerPool(settings)
    add_servicer = partial(reward_pb2_grpc.add_RewardServiceServicer_to_server, RewardServicer(pool, settings))
    listener = await Listener.start(
        host=settings.listen.host,
        port=settings.listen.port,
        services=[SERVICE],
        register=[add_servicer],
        token=token,
    )
    server = RewardServer(listener.address, pool)
    async with pool, asyncio.TaskGroup() as tasks:
        health = tasks.create_task(_report_health(server, listener))
        try:
            yield server
        finally:
            health.cancel()
            await listener.stop(drain_seconds=settings.listen.drain_seconds)


async def _report_health(server: RewardServer, listener: Listener) -> None:
    """Says SERVING while the pool grades, and only after it has graded one item right."""
    while True:
        await server.pool.wait_until(can_grade=True)
        if not await _grades_right(server.pool):
            await asyncio.sleep(_SELF_TEST_RETRY_SECONDS)
            continue
        await listener.set_serving(True)
        server.is_serving.set()
        await server.pool.wait_until(can_grade=False)
        server.is_serving.clear()
        await listener.set_serving(False)
        log.error("no worker can be started: not serving")


async def _grades_right(pool: WorkerPool) -> bool:
    try:
        grade = (await pool.score([_SELF_TEST]))[0]
    except ServiceError as error:
        log.warning("self-test was not graded", error=str(error))
        return False
    if grade.outcome is not Outcome.CORRECT:
        log.error("self-test failed", outcome=grade.outcome.value, reason=grade.reason)
    return grade.outcome is Outcome.CORRECT
