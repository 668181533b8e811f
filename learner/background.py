"""The learner's asyncio half: one event loop in a thread, that the main thread hands coroutines to."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """An event loop in a thread of its own. DeepSpeed and CUDA stay on the main thread, gRPC stays here."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="learner-asyncio", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine; the future ends with it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], *, timeout_seconds: float) -> T:
        """Runs a coroutine to its end.

        Raises:
            TimeoutError: It did not end in time; it is cancelled.
        """
        future = self.submit(work)
        try:
            return future.result(timeout_seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what still runs and ends the thread."""
        self.call(_cancel_rest(), timeout_seconds=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=5)
