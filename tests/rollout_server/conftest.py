from collections.abc import AsyncIterator

import pytest

from tests.rollout_server.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running
