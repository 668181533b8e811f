"""What every call to a server of ours passes through: the token, the public gRPC metrics, errors to statuses."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeAlias

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

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""What a handler is given besides the request."""
# The published types know handlers of synchronous servers only.
_Handler: TypeAlias = Any
_Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]]


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Ends every call without the right token with UNAUTHENTICATED; health is open to all."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Passes the call on, or hands it to a handler that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_PREFIX):
            return handler
        if is_authorized(dict(handler_call_details.invocation_metadata), self._token):
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        return _replace(handler, _refuse)


async def _refuse(_request: object, context: Context) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")


class OutcomeInterceptor(grpc.aio.ServerInterceptor):
    """Counts and times every call, and ends those whose handler raised with the status that the error means."""

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler:
        """Wraps the call's handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        _, service, method = handler_call_details.method.split("/", 2)
        labels = ("server_stream" if handler.response_streaming else "unary", service, method)
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def observed(request: Any, context: Context) -> Any:
            async with _observed(labels, context):
                answer = inner(request, context)
                if not isinstance(answer, AsyncGenerator):
                    return await answer
                # gRPC does not close a generator when its call is cancelled between two responses.
                async with aclosing(answer) as responses:
                    async for response in responses:
                        await context.write(response)
                return None

        return _replace(handler, observed)


@asynccontextmanager
async def _observed(labels: tuple[str, str, str], context: Context) -> AsyncIterator[None]:
    STARTED.labels(*labels).inc()
    begin = time.monotonic()
    # CancelledError passes below: the client went away, or its deadline came.
    code = grpc.StatusCode.CANCELLED
    try:
        yield
        code = grpc.StatusCode.OK
    except grpc.aio.AbortError:
        code = _status_code(context)
        raise
    except Exception as error:
        code = status_of(error)
        if not isinstance(error, ServiceError):
            log.exception("handler failed", method="/".join(labels[1:]))
        await context.abort(code, str(error) or type(error).__name__)
    finally:
        if code is grpc.StatusCode.CANCELLED and (context.time_remaining() or 1.0) <= 0:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
        HANDLED.labels(*labels, code.name).inc()
        HANDLING_SECONDS.labels(*labels).observe(time.monotonic() - begin)


def _status_code(context: Context) -> grpc.StatusCode:
    """The status that an abort has set; the context keeps it as a number."""
    number: Any = context.code()
    return next((code for code in grpc.StatusCode if number in (code, code.value[0])), grpc.StatusCode.UNKNOWN)


def _replace(handler: _Handler, behaviour: Callable[..., Any]) -> _Handler:
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(
        behaviour,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
