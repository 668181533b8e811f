"""What every call to a server of ours passes through: the token, the public gRPC metrics, errors to statuses."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog
from prometheus_client import Counter, Histogram

from runtime.credentials import is_authorized
from runtime.errors import ServiceError, status_of

log = structlog.get_logger()

# The public names and labels, so that dashboards made for any gRPC server work.
_LABELS = ("grpc_type", "grpc_service", "grpc_method")
STARTED = Counter("grpc_server_started_total", "Calls started on the server.", _LABELS)
HANDLED = Counter("grpc_server_handled_total", "Calls completed on the server, by status.", (*_LABELS, "grpc_code"))
HANDLING_SECONDS = Histogram("grpc_server_handling_seconds", "Duration of calls on the server in seconds.", _LABELS)

HEALTH_PREFIX = "/grpc.health.v1.Health/"

Handler = grpc.RpcMethodHandler
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends every call without the right token with UNAUTHENTICATED; health is open to all."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Passes the call on, or hands it to a handler that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        if is_authorized(dict(handler_call_details.invocation_metadata or ()), self._token):
            return handler
        return _replace(handler, unary=_refuse, stream=_refuse_stream)


async def _refuse(_request: object, context: grpc.aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")
    raise AssertionError("abort raises")


async def _refuse_stream(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
    await _refuse(request, context)
    yield


class OutcomeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts and times every call, and ends those whose handler raised with the status that the error means."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wraps the call's handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        _, service, method = handler_call_details.method.split("/", 2)
        labels = ("server_stream" if handler.response_streaming else "unary", service, method)
        inner_unary, inner_stream = handler.unary_unary, handler.unary_stream

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with _observed(labels, context):
                return await inner_unary(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with _observed(labels, context):
                # Closed by hand: a cancel that comes between two responses must reach the handler at once.
                async with aclosing(inner_stream(request, context)) as responses:
                    async for response in responses:
                        yield response

        return _replace(handler, unary=unary, stream=stream)


@asynccontextmanager
async def _observed(labels: tuple[str, str, str], context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    STARTED.labels(*labels).inc()
    begin = time.monotonic()
    # CancelledError and GeneratorExit pass below: the client went away, or its deadline came.
    code = grpc.StatusCode.CANCELLED
    try:
        yield
        code = grpc.StatusCode.OK
    except grpc.aio.AbortError:
        code = context.code() or grpc.StatusCode.UNKNOWN
        raise
    except Exception as error:
        code = status_of(error)
        if not isinstance(error, ServiceError):
            log.exception("handler failed", method="/".join(labels[1:]))
        await context.abort(code, str(error) or type(error).__name__)
    finally:
        HANDLED.labels(*labels, code.name).inc()
        HANDLING_SECONDS.labels(*labels).observe(time.monotonic() - begin)


def _replace(handler: Handler, *, unary: Callable[..., Any], stream: Callable[..., Any]) -> Handler:
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        stream if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
