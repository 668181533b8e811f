"""One gRPC listener as every service of ours has it: options, token, metrics, health, reflection, a drained end."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from runtime.credentials import require_token_off_loopback
from runtime.grpc_options import SERVER_OPTIONS
from runtime.interceptors import OutcomeInterceptor, TokenInterceptor

Register = Callable[[grpc.aio.Server], None]
"""Adds a servicer to the server, e.g. `partial(add_RewardServiceServicer_to_server, servicer)`."""


class Listener:
    """A running gRPC server on one port; NOT_SERVING until `set_serving(True)`."""

    def __init__(self, server: grpc.aio.Server, health: HealthServicer, services: Sequence[str], address: str) -> None:
        self._server, self._health, self._services = server, health, tuple(services)
        self.address = address
        """host:port as bound."""

    @classmethod
    async def start(
        cls, *, host: str, port: int, services: Sequence[str], register: Sequence[Register], token: str | None
    ) -> "Listener":
        """Binds and starts.

        Args:
            host: Address to bind.
            port: Port to bind; 0 for a free one.
            services: Full names of the gRPC services, for health and reflection.
            register: One per servicer.
            token: Bearer token that every call but health must carry; None for none, on loopback only.

        Raises:
            ValueError: The port is taken or may not be bound, or the token is missing off loopback.
        """
        require_token_off_loopback(host, token)
        interceptors: list[Any] = [OutcomeInterceptor()]
        if token is not None:
            interceptors.insert(0, TokenInterceptor(token))
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for add in register:
            add(server)
        reflection.enable_server_reflection((*services, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise ValueError(f"cannot listen on {host}:{port}: the port is in use or may not be bound") from error
        await server.start()
        listener = cls(server, health, services, f"{host}:{bound}")
        await listener.set_serving(False)
        return listener

    async def set_serving(self, is_serving: bool) -> None:
        """Says by health whether the services would answer correctly."""
        status = health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, *, drain_seconds: float) -> None:
        """Says NOT_SERVING, refuses new calls, waits for those in flight at most this long, then ends them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(drain_seconds)


async def wait_until_serving(channel: grpc.aio.Channel, *, service: str, timeout_seconds: float) -> None:
    """Waits until the peer's health says SERVING for a service.

    Raises:
        TimeoutError: It did not within the time.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    async with asyncio.timeout(timeout_seconds):
        while not await is_serving(stub, service=service):  # noqa: ASYNC110 - the peer is another process
            await asyncio.sleep(0.1)


async def is_serving(stub: health_pb2_grpc.HealthStub, *, service: str, timeout_seconds: float = 5.0) -> bool:
    """Whether the peer answers SERVING for a service within the time."""
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
