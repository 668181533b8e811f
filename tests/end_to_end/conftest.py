"""Two rollout servers and a fleet for every file of tests that names them."""

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_server.client import RolloutFleet
from tests.end_to_end.rollout_servers import DRAIN_SECONDS, Running, Servers
from tests.models import save_tiny_qwen2
from tests.rollout_server.server_process import ServerProcess


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    processes: list[ServerProcess] = []
    models = []
    try:
        for seed in (0, 1):
            folder = tmp_path_factory.mktemp(f"seed-{seed}")
            models.append(save_tiny_qwen2(folder / "model", seed=seed))
            settings = {
                "model": str(folder / "model"),
                "dtype": "float32",
                "context_length": 256,
                "max_running_samples": 64,
                "kv_cache_bytes": 64 << 20,
                "block_size": 32,
                # Little more than one long prompt.
                "max_batched_tokens": 256,
                "listen": {"drain_seconds": DRAIN_SECONDS},
            }
            processes.append(ServerProcess(folder, settings))
        running = [
            Running(process, process.wait_until_ready(), model)
            for process, model in zip(processes, models, strict=True)
        ]
        yield Servers(*running)
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()


@pytest.fixture
def served(servers: Servers) -> Running:
    return servers.served


@pytest.fixture
async def fleet() -> AsyncIterator[RolloutFleet]:
    fleet = RolloutFleet(token=None)
    yield fleet
    await fleet.close()
