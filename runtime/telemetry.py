"""Logs and metrics as every process of ours writes them."""

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

from runtime.credentials import is_loopback


def set_up_logging(*, service: str, file: Path | None = None) -> None:
    """Sends structlog events to stderr, or to a file that is appended to: one line each, `key=value` behind the text.

    Args:
        service: Name that every line carries.
        file: Where to write; None for stderr.
    """
    stream: TextIO = sys.stderr if file is None else file.open("a", encoding="utf-8", buffering=1)
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
