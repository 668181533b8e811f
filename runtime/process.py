"""What every service process does besides its work: announce itself, end with its parent, wait for a signal."""

import asyncio
import json
import os
import select
import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """What a service process tells its starter once it serves, as JSON."""

    pid: int
    """Process id."""
    address: str
    """host:port of the gRPC listener."""
    metrics_address: str
    """host:port of `/metrics`."""
    instance_id: str
    """Random id of the process."""

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> "ReadyFile | None":
        """The file's content; None while it does not exist."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None


_PARENT_WATCH = "parent-watch"


def exit_with_parent() -> None:
    """Kills this process as soon as its present parent has died, so that nothing is left behind; again is no harm.

    A thread waits on the parent's pidfd; PR_SET_PDEATHSIG would fire when the parent's *thread* ends.
    """
    parent = os.getppid()
    if parent <= 1 or any(thread.name == _PARENT_WATCH for thread in threading.enumerate()):
        return
    descriptor = os.pidfd_open(parent)

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name=_PARENT_WATCH, daemon=True).start()


async def wait_for_stop_signal() -> signal.Signals:
    """Waits for SIGTERM or SIGINT; a second one ends the process at once.

    Returns:
        The signal that came.
    """
    loop = asyncio.get_running_loop()
    came: asyncio.Future[signal.Signals] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if came.done():
            os._exit(128 + number)
        came.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await came
