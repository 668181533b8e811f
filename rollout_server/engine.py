"""What a rollout server asks of its engine, and the records that pass between them."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rollout_server.samples import FinishReason, Sampling, VersionSpan
from runtime.weights.manifest import WeightManifest


@dataclass(frozen=True, slots=True)
class EngineSample:
    """A finished completion."""

    token_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    """One per token, under the weights and the distribution that sampled it."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    num_cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """An unfinished completion has grown."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while the engine lives."""

    vocabulary_size: int
    context_length: int
    max_running_samples: int
    num_weight_ranks: int
    transports: tuple[str, ...]
    build: str
    settings: dict[str, str]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Which weight group an engine's workers join."""

    run_id: str
    epoch: int
    store_host: str
    store_port: int
    first_rank: int
    world_size: int
    transport: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit cost."""

    stopped_seconds: float
    apply_seconds: float
    num_requests_kept: int


class EngineDeadError(Exception):
    """The engine has failed for good; the server must end."""


class WeightsRefusedError(Exception):
    """A worker cannot stage or commit in its present state; nothing has changed."""


class Engine(Protocol):
    """An inference engine whose weights can be exchanged while it runs."""

    @property
    def facts(self) -> EngineFacts:
        """What the engine is."""

    @property
    def policy_version(self) -> int:
        """The version that tokens sampled from now on are booked under."""

    @property
    def num_running(self) -> int:
        """Samples that run or wait."""

    @property
    def is_dead(self) -> bool:
        """Whether it has failed for good."""

    def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, seed: int | None, progress_every_tokens: int
    ) -> AsyncGenerator[EngineSample | EngineProgress, None]:
        """Samples one completion; ends with an EngineSample. Closing or cancelling it aborts the sample.

        Raises:
            EngineDeadError: The engine has failed.
        """

    async def join_group(self, address: GroupAddress, manifest: WeightManifest) -> None:
        """Lets the workers join in the background; a group joined before is left."""

    async def leave_group(self) -> None:
        """Leaves the group and frees the staging memory."""

    async def begin_staging(self, policy_version: int, *, timeout_seconds: float) -> None:
        """Lets the workers receive a version in the background.

        Raises:
            WeightsRefusedError: The workers are in no group, or in one whose last push has not ended well.
        """

    async def drop_staged(self) -> None:
        """Forgets what is staged."""

    async def commit(self, policy_version: int, *, recompute: bool) -> Commit:
        """Serves the staged weights between two steps.

        Raises:
            WeightsRefusedError: The version is not staged on every worker.
            EngineDeadError: The weights are in an unknown state, or the engine has failed.
        """

    async def pause(self) -> None:
        """Stops sampling; requests are held."""

    async def resume(self) -> None:
        """Goes on."""

    async def close(self) -> None:
        """Ends the engine and its processes."""
