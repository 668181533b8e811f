"""A reward server as the tests meet it, in this process or in one of its own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from reward_service.client import RewardClient
from reward_service.config import RewardSettings
from reward_service.server import RewardServer, running
from runtime.process import ReadyFile

HANGING_COMPLETION = "\\boxed{9^{9^{9^{9}}}}"


@pytest.fixture
def hanging_completion() -> str:
    return HANGING_COMPLETION


@dataclass(frozen=True, slots=True)
class ServerProcess:
    process: subprocess.Popen[bytes]
    ready: ReadyFile

    @property
    def worker_pids(self) -> list[int]:
        return children_of(self.process.pid)


def children_of(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in brackets, may hold spaces; the parent is the second field behind it.
            if int(status.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    def look(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    return look


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds; the test's own timeout bounds it."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def read_metrics() -> Callable[[str], Awaitable[str]]:
    """What /metrics at host:port shows."""

    def read(address: str) -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
            return str(answer.read().decode())

    async def read_in_thread(address: str) -> str:
        return await asyncio.to_thread(read, address)

    return read_in_thread


@pytest.fixture
def start_server_process(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts `serve` in a process of its own, given the source of its settings."""
    started: list[subprocess.Popen[bytes]] = []

    def start(settings: str) -> ServerProcess:
        path = tmp_path / f"ready-{len(started)}.json"
        source = (
            "import asyncio, pathlib\n"
            "from reward_service.config import RewardSettings\n"
            "from reward_service.server import serve\n"
            f"asyncio.run(serve({settings}, ready_file=pathlib.Path({str(path)!r})))"
        )
        process = subprocess.Popen([sys.executable, "-c", source], cwd=Path(__file__).parents[2])
        started.append(process)
        while (ready := ReadyFile.read(path)) is None:
            assert process.poll() is None, "the server ended before it served"
            time.sleep(0.02)
        return ServerProcess(process, ready)

    yield start
    for process in started:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[RewardServer]:
    settings = RewardSettings(num_workers=2, timeout_seconds=1.0, max_queued_items=200, max_answer_chars=100)
    async with running(settings, token=None) as running_server:
        await running_server.is_serving.wait()
        yield running_server


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(server: RewardServer) -> AsyncIterator[RewardClient]:
    reward_client = RewardClient(token=None)
    await reward_client.add_server(server.address)
    yield reward_client
    await reward_client.close()
