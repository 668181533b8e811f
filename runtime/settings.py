"""The base of every settings model, and the settings that all services share."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Frozen, typed settings that refuse unknown keys; a field's docstring is its help text."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Port = Annotated[int, Field(ge=0, le=65535)]


class ListenSettings(Settings):
    """Where a service listens. Port 0 lets the system choose a free one."""

    host: str = "127.0.0.1"
    """Address to bind; anything off loopback requires a token (see TANDEM_TOKEN)."""
    port: Port = 0
    """Port of the gRPC listener."""
    metrics_port: Port = 0
    """Port of `/metrics` over HTTP."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long calls in flight may go on after SIGTERM."""
