"""One service as a child process: its log, its ready file, and an end that leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from runtime.process import ReadyFile

_POLL_SECONDS = 0.05
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: The process in words, e.g. `rollout-0`.
        arguments: What follows the Python interpreter; `--ready-file` and `--exit-with-parent` are appended.
        environment: Variables on top of those of the parent.
        log_file: What the process prints is appended to it; its ready file lies beside it.
        start_timeout_seconds: How long it may take until its ready file is there; None if it never writes one.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: Path
    start_timeout_seconds: float | None


class ChildProcess:
    """A running child process."""

    def __init__(self, spec: ChildSpec) -> None:
        """Starts the process, in a process group of its own, so that its children can be ended with it."""
        self._spec = spec
        self._ready_file = spec.log_file.with_suffix(".ready")
        spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._ready_file.unlink(missing_ok=True)
        # Ray's workers run uvloop, whose own subprocesses cannot be given a process group.
        with spec.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *spec.arguments,
                    f"--ready-file={self._ready_file}",
                    f"--exit-with-parent={os.getpid()}",
                ],
                env=_environment(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    async def wait_until_ready(self) -> ReadyFile | None:
        """Waits for the ready file; None if the process ended without one, or takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._spec.start_timeout_seconds):
                while (ready := ReadyFile.read(self._ready_file)) is None and self.is_running:  # noqa: ASYNC110 - a file
                    await asyncio.sleep(_POLL_SECONDS)
                return ready
        return None

    async def wait(self) -> int:
        """Waits for the end and returns the exit code, negative for a signal."""
        if self.is_running:
            ended, loop, descriptor = asyncio.Event(), asyncio.get_running_loop(), os.pidfd_open(self._process.pid)
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        returncode = self._process.wait()
        self._clean_up()
        return returncode

    async def stop(self, *, grace_seconds: float) -> int:
        """SIGTERM to the process, SIGKILL to its whole group once the grace is over; returns the exit code."""
        if grace_seconds > 0:
            self._process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        self._clean_up()
        return await self.wait()

    def _clean_up(self) -> None:
        # Whatever the process started and left behind is in its group, also after it has ended itself.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._ready_file.unlink(missing_ok=True)


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    # The parent may have been started from another folder, as Ray's workers are.
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(paths)}


def log_tail(path: Path, *, num_lines: int = 15) -> tuple[str, ...]:
    """The last lines of a log that are not empty; nothing if there is no log."""
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            return tuple(deque((line.rstrip() for line in log if line.strip()), maxlen=num_lines))
    except FileNotFoundError:
        return ()
