"""The pool's end of one worker process: starts it, hands it items, reads its answers, kills it."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reward_service.config import RewardSettings
from reward_service.outcome import Grade, Item, Outcome

# The answers to a chunk, each cut at about 1,200 characters of up to 12 bytes, stand in one line.
_MAX_LINE_BYTES = 4 * 2**20
_SOURCE_ROOT = Path(__file__).resolve().parent.parent


class WorkerLostError(Exception):
    """The worker ended by itself."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker answers to one item."""

    index: int
    """Which item of the chunk."""
    grade: Grade
    """Its grade."""
    seconds: float
    """What the grading took."""


class WorkerProcess:
    """A running worker, which is handed one chunk of items after another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self.pid = process.pid

    @classmethod
    async def start(cls, settings: RewardSettings) -> "WorkerProcess":
        """Starts a worker and waits until it can grade.

        Raises:
            WorkerLostError: It ended before.
            TimeoutError: It did not become ready within `start_timeout_seconds`.
            OSError: The system refuses another process.
        """
        argument = {
            "parent": os.getpid(),
            "memory_bytes": settings.worker_memory_bytes,
            "limits": asdict(settings.answer_limits),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "reward_service.worker", json.dumps(argument)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env=_environment(),
            # Ctrl-C in a terminal reaches every process of the group; the pool ends its workers itself.
            start_new_session=True,
        )
        worker = cls(process)
        try:
            async with asyncio.timeout(settings.start_timeout_seconds):
                await worker._read_line()
        except BaseException:
            await worker.kill()
            raise
        return worker

    def send(self, chunk: Sequence[Item]) -> None:
        """Hands over a chunk of items, once the chunk before has been answered whole."""
        fields = [(item.reward_function, item.completion, item.reference_answer) for item in chunk]
        self._stdin.write(json.dumps(fields).encode() + b"\n")

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._process.returncode is not None

    async def receive(self, *, timeout_seconds: float) -> list[Answer]:
        """The next answers to items of the chunk; the items still open are in the worker's hand in their order.

        Raises:
            TimeoutError: There are none within the time; a later call may still get them.
            WorkerLostError: The worker ended.
        """
        async with asyncio.timeout(timeout_seconds):
            line = await self._read_line()
        return [
            Answer(index, Grade(Outcome(outcome), reward, extracted_answer, reason, parts), seconds)
            for index, outcome, reward, extracted_answer, reason, parts, seconds in json.loads(line)
        ]

    async def _read_line(self) -> bytes:
        line = await self._stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerLostError(f"worker {self.pid} ended")
        return line

    async def kill(self) -> None:
        """Kills the process, whatever it is doing, and waits for its end, even if it is cancelled meanwhile."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                self._process.kill()
        cancelled: asyncio.CancelledError | None = None
        # Its pipe ends with it, within milliseconds; asyncio lets go of the process only once both have been seen.
        while self._process.returncode is None or not self._stdout.at_eof():
            try:
                await self._stdout.read()
                await self._process.wait()
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled


def _environment() -> dict[str, str]:
    """The server's environment without its secrets, and with this package importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    paths = [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
