"""Settings of a reward server."""

import os
from typing import Annotated

from pydantic import Field

from reward_service.outcome import AnswerLimits
from runtime.settings import ListenSettings, Settings


class RewardSettings(Settings):
    """How a reward server grades: its workers, and the bounds on time, size and memory that an answer may cost."""

    listen: ListenSettings = ListenSettings()
    """Where the server listens."""
    num_workers: Annotated[int, Field(ge=1, le=256)] = os.cpu_count() or 1
    """Worker processes that grade; one for each core by default."""
    timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 2.0
    """Longest that one item may take; its worker is killed then, and the item gets no reward."""
    start_timeout_seconds: Annotated[float, Field(gt=0, le=600)] = 60.0
    """Longest that a worker may take to start."""
    worker_memory_bytes: Annotated[int, Field(ge=128 * 2**20)] = 1024 * 2**20
    """Address space that a worker may take; it starts with about 80 MiB."""
    max_queued_items: Annotated[int, Field(ge=1)] = 16_384
    """Items accepted and not yet graded; a request beyond is refused as busy."""
    max_completion_chars: Annotated[int, Field(ge=1, le=16_000_000)] = 1_000_000
    """Longest completion that is searched for an answer; a longer one is unparsable."""
    max_answer_chars: Annotated[int, Field(ge=1, le=100_000)] = 2_000
    """Longest answer that is parsed, and longest reference answer; a longer answer is unparsable."""
    max_answer_depth: Annotated[int, Field(ge=1, le=1_000)] = 16
    """Deepest nesting of brackets in an answer that is parsed; a deeper one is unparsable. Sixteen take up to 2 s."""

    @property
    def answer_limits(self) -> AnswerLimits:
        """The sizes beyond which an answer is not parsed."""
        return AnswerLimits(
            max_completion_chars=self.max_completion_chars,
            max_answer_chars=self.max_answer_chars,
            max_answer_depth=self.max_answer_depth,
        )
