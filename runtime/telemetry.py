"""Logs and metrics as every process of ours writes them."""

import logging
import os
import stat
import sys
from pathlib import Path

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from runtime.credentials import is_loopback
from runtime.patient_file import patient_lines


def set_up_logging(*, service: str, file: Path | None = None) -> None:
    """Sends structlog events to stderr, or to a file that is appended to: one line each, `key=value` behind the text.

    A disk that is full ends nothing: lines that go to a file wait until there is room, as in runtime/patient_file.py.

    Args:
        service: Name that every line carries.
        file: Where to write; None for stderr.
    """
    stream = sys.stderr if file is None else patient_lines(file)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    structlog.contextvars.bind_contextvars(service=service)


def make_output_patient() -> None:
    """Lets what this process prints into files wait for room on their disk, instead of failing whoever prints."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        except (OSError, AttributeError):
            # Under a test, or started without it.
            continue
        if is_file:
            stream.flush()
            setattr(sys, name, patient_lines(stream.fileno()))


def serve_metrics(*, host: str, port: int, registry: CollectorRegistry = REGISTRY) -> str:
    """Serves `/metrics` over HTTP in a thread of its own and returns the address, host:port.

    Raises:
        ValueError: The port is in use or may not be bound.
    """
    try:
        server, _thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port} for /metrics: {error.strerror}") from error
    if not is_loopback(host):
        structlog.get_logger().warning("metrics are open to other machines", host=host)
    return f"{host}:{server.server_port}"
