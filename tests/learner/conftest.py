"""What the learner's tests share: shapes checked at run time, and servers on the learner's own event loop."""

import asyncio
import concurrent.futures
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import pytest
import torch
from jaxtyping import install_import_hook

from learner.background import Background

install_import_hook(["learner.batch", "learner.logprobs", "learner.loss"], "beartype.beartype")

# More threads than free cores make a small model slower, not faster.
torch.set_num_threads(1)

T = TypeVar("T")


class Holder:
    """Keeps asynchronous contexts open on a background loop, while the test is the main thread."""

    def __init__(self, background: Background, contexts: ExitStack) -> None:
        self.background, self._contexts = background, contexts

    def hold(self, manager: AbstractAsyncContextManager[T]) -> T:
        """Enters it; it is left at the end of the test."""
        return self._contexts.enter_context(self.held(manager))

    @contextmanager
    def held(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enters it, and leaves it at the end of the block, in one task, as task groups demand."""
        opened: concurrent.futures.Future[T] = concurrent.futures.Future()
        leave = asyncio.Event()

        async def keep_open() -> None:
            try:
                async with manager as value:
                    opened.set_result(value)
                    await leave.wait()
            except BaseException as error:
                if not opened.done():
                    opened.set_exception(error)
                raise

        async def end() -> None:
            leave.set()

        kept = self.background.submit(keep_open())
        try:
            yield opened.result(10)
        finally:
            self.run(end())
            kept.result(10)

    def run(self, work: Any) -> Any:
        """Runs a coroutine to its end."""
        return self.background.call(work, timeout_seconds=20)


@pytest.fixture
def holder() -> Iterator[Holder]:
    background = Background()
    with ExitStack() as contexts:
        yield Holder(background, contexts)
    background.close()
