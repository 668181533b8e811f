"""Starts and ends a rollout server in a process of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.process import ReadyFile


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server and what it said when it was ready."""

    process: "subprocess.Popen[bytes]"
    ready: ReadyFile
    log_file: Path

    @property
    def log(self) -> str:
        """Everything that it has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    async def stop(self, *, timeout_seconds: float) -> int:
        """SIGTERM, and SIGKILL when the time is over; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(_wait, self.process, timeout_seconds)


def _wait(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> int:
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def start_server(
    folder: Path, settings: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
) -> ServerProcess:
    """Starts a server and waits until it is ready.

    Args:
        folder: For its log and its ready file.
        settings: Fields of RolloutSettings.
        environment: Variables on top of this process's.

    Raises:
        RuntimeError: It ended before it was ready; with its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log_file = folder / "ready.json", folder / "server.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout_server.run_server", json.dumps(settings), str(ready_file)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    while (ready := ReadyFile.read(ready_file)) is None:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log_file.read_text()}")
        time.sleep(0.05)
    return ServerProcess(process, ready, log_file)
