"""The errors that services share, and the one table from error to gRPC status.

    ServiceError
    ├── InvalidRequestError    INVALID_ARGUMENT      the caller's fault: field, value and bound are named
    ├── WrongStateError        FAILED_PRECONDITION   right request, wrong moment
    ├── BusyError              RESOURCE_EXHAUSTED    a bound of this server is reached
    └── UnavailableError       UNAVAILABLE           try again, here or elsewhere

Anything else that escapes a handler is ours: INTERNAL.
"""

import grpc


class ServiceError(Exception):
    """Base of the errors that a handler may raise to end a call with a status of its choice."""


class InvalidRequestError(ServiceError):
    """A field of the request is out of its bounds."""

    def __init__(self, field: str, value: object, bound: str) -> None:
        """Names the field, the value that was sent (cut at 80 characters) and the bound that it breaks."""
        super().__init__(f"{field} = {str(value)[:80]}: must be {bound}")


class WrongStateError(ServiceError):
    """The request does not fit the state that the server is in."""


class BusyError(ServiceError):
    """A bound on concurrent work is reached."""


class UnavailableError(ServiceError):
    """The server cannot answer now."""


STATUS_OF_ERROR: dict[type[ServiceError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    WrongStateError: grpc.StatusCode.FAILED_PRECONDITION,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
}


def status_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status that a handler's exception ends its call with."""
    for kind, status in STATUS_OF_ERROR.items():
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL
