"""A TCP proxy that can break its connections as a killed process would."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class TcpProxy:
    """Passes bytes on in both directions until it is killed."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_pump(reader, far_writer))
            tasks.create_task(_pump(far_reader, writer))

    async def kill(self) -> None:
        """Resets every connection and takes no more."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def tcp_proxy(target: str) -> AsyncIterator[TcpProxy]:
    proxy = TcpProxy(target)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.kill()
