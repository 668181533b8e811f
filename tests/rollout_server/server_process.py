"""Starts and ends a rollout server in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.process import ReadyFile


class ServerProcess:
    """A rollout server that starts, runs, or has ended."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Begins to start it.

        Args:
            folder: For its log and its ready file.
            settings: Fields of RolloutSettings.
            environment: Variables on top of this process's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._ready_file, self.log_file = folder / "ready.json", folder / "server.log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rollout_server.run_server", json.dumps(settings), str(self._ready_file)],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        """Everything that it has printed."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def wait_until_ready(self) -> ReadyFile:
        """Waits until it serves.

        Raises:
            RuntimeError: It ended before; with its log.
        """
        while (ready := ReadyFile.read(self._ready_file)) is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log}")
            time.sleep(0.05)
        return ready

    def children(self) -> list[int]:
        """Process ids of its children: the engine, and what Python starts beside it."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in listed.stdout.split()]

    def stop(self, *, timeout_seconds: float) -> int:
        """SIGTERM, and SIGKILL when the time is over; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: It had to be killed.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_seconds)
        finally:
            self.process.kill()
            self.process.wait()
