"""What every test begins with."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_at_first() -> Iterator[None]:
    """A test that sets logging up leaves nothing behind: the stream that it was given is closed when it ends."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
