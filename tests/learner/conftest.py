"""What the learner's tests share: shapes checked at run time, and servers on the learner's own event loop."""

import asyncio
import concurrent.futures
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from jaxtyping import install_import_hook

from learner.background import Background
from learner.config import LearnerSettings
from tests.models import save_tiny_qwen2

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


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_qwen2(folder)
    return folder


@pytest.fixture(scope="session")
def policy(model_folder: Path) -> Iterator[Any]:
    """Rank 0 of one rank; DeepSpeed can be set up once in a process."""
    # After the import hook, so that shapes are checked; and seconds that other tests need not wait.
    from learner.policy import Policy  # noqa: PLC0415

    with pytest.MonkeyPatch.context() as environment:
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        for name, value in rank.items():
            environment.setenv(name, str(value))
        yield Policy.load(model_folder, LearnerSettings())
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def leader(policy: Any) -> Any:
    """What leads the policy's one rank."""
    from learner.ranks import Leader  # noqa: PLC0415

    return Leader(policy)
