"""How clients reach a service: one channel per address, with the fleet's options and token."""

from collections.abc import Callable
from typing import Any

import grpc

from runtime.grpc_options import CHANNEL_OPTIONS


def dial(address: str, *, token: str | None) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects when it is first used, and again by itself when the peer comes back."""
    interceptors = [] if token is None else [_UnaryBearer(token), _StreamBearer(token)]
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)


def _with_token(details: grpc.aio.ClientCallDetails, token: str) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {token}"))
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


# grpc.aio registers an interceptor for the first kind of call that it implements only, so there is one class per kind.
class _UnaryBearer(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)


class _StreamBearer(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(_with_token(client_call_details, self._token), request)
