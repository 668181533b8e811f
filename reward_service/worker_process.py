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
from reward_service.outcome import Grade, Outcome

_SOURCE_ROOT = Path(__file__).resolve().parent.parent


class WorkerLostError(Exception):
    """The worker ended by itself."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a worker is asked."""

    reward_function: str
    """One of `outcome.REWARD_FUNCTIONS`."""
    completion: str
    """The text that the model wrote."""
    reference_answer: str
    """The right answer, as text or LaTeX."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker answers."""

    grade: Grade
    """The grade of one item."""
    seconds: float
    """What the grading took."""


class WorkerProcess:
    """A running worker; it answers items in the order in which it got them."""

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

    def send(self, items: Sequence[Item]) -> None:
        """Hands over items; each is answered as soon as it is graded."""
        lines = (json.dumps((item.reward_function, item.completion, item.reference_answer)) for item in items)
        self._stdin.write("".join(f"{line}\n" for line in lines).encode())

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended by itself."""
        return self._process.returncode is not None

    async def receive(self, *, timeout_seconds: float) -> Answer:
        """The answer to the oldest item not yet answered.

        Raises:
            TimeoutError: There is none within the time; a later call may still get it.
            WorkerLostError: The worker ended.
        """
        async with asyncio.timeout(timeout_seconds):
            line = await self._read_line()
        outcome, reward, extracted_answer, reason, parts, seconds = json.loads(line)
        return Answer(Grade(Outcome(outcome), reward, extracted_answer, reason, parts), seconds)

    async def _read_line(self) -> bytes:
        line = await self._stdout.readline()
        if not line.endswith(b"\n"):
            raise WorkerLostError(f"worker {self.pid} ended")
        return line

    async def kill(self) -> None:
        """Kills the process, whatever it is doing, and waits for its end."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                self._process.kill()
        await self._process.wait()


def _environment() -> dict[str, str]:
    """The server's environment without its secrets, and with this package importable."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    paths = [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}
