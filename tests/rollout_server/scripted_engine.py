"""An engine that does what a test tells it, and tells the test what was asked of it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from rollout_server.engine import (
    Commit,
    EngineDeadError,
    EngineFacts,
    EngineProgress,
    EngineSample,
    GroupAddress,
    WeightsRefusedError,
)
from rollout_server.samples import FinishReason, Sampling, VersionSpan
from runtime.weights.manifest import WeightManifest

VOCABULARY_SIZE = 100
CONTEXT_LENGTH = 32


@dataclass
class ScriptedEngine:
    """Answers every sample at once with tokens that are its seed, unless a gate for that seed is shut."""

    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    """A sample with this seed waits for the event."""
    failures: dict[int, Exception] = field(default_factory=dict)
    """A sample with this seed ends with the error."""
    policy_version: int = 0
    vocabulary_size: int = VOCABULARY_SIZE
    is_dead: bool = False
    num_running: int = 0
    refusal: str = ""
    """Why the workers refuse to stage or commit; empty if they do not."""
    calls: list[str] = field(default_factory=list)
    """Names of the calls to the weights' methods, in order."""
    started: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released when a sample begins."""
    aborted: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released when a sample is aborted."""
    committed: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released when a version is committed."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    commit_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """A commit waits for it; set at first."""
    pause_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """A pause waits for it; set at first."""
    resume_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """A resume waits for it; set at first."""

    def __post_init__(self) -> None:
        for gate in (self.commit_gate, self.pause_gate, self.resume_gate):
            gate.set()

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts(
            vocabulary_size=self.vocabulary_size,
            context_length=CONTEXT_LENGTH,
            max_running_samples=8,
            num_weight_ranks=1,
            transports=("gloo",),
            build="scripted",
            settings={"scripted": "True"},
        )

    def shut(self, *seeds: int) -> None:
        """Lets samples with these seeds wait."""
        for seed in seeds:
            self.gates[seed] = asyncio.Event()

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, *, seed: int | None, progress_every_tokens: int
    ) -> AsyncGenerator[EngineSample | EngineProgress, None]:
        self.num_running += 1
        self.started.release()
        token = seed or 0
        try:
            if progress_every_tokens:
                yield EngineProgress(progress_every_tokens)
            if token in self.gates:
                await self.gates[token].wait()
            if token in self.failures:
                raise self.failures[token]
            yield EngineSample(
                token_ids=[token] * sampling.max_tokens,
                behaviour_logprobs=[-0.5] * sampling.max_tokens,
                version_spans=(VersionSpan(0, self.policy_version),),
                finish_reason=FinishReason.LENGTH,
                num_cached_prompt_tokens=0,
            )
        except asyncio.CancelledError:
            self.aborted.release()
            raise
        finally:
            self.num_running -= 1

    async def join_group(self, address: GroupAddress, manifest: WeightManifest) -> None:
        self.calls.append(f"join {address.epoch}")

    async def leave_group(self) -> None:
        self.calls.append("leave")

    async def begin_staging(self, policy_version: int, *, timeout_seconds: float) -> None:
        if self.refusal:
            raise WeightsRefusedError(self.refusal)
        self.calls.append(f"stage {policy_version}")

    async def drop_staged(self) -> None:
        self.calls.append("drop")

    async def commit(self, policy_version: int, *, recompute: bool) -> Commit:
        if self.refusal:
            raise WeightsRefusedError(self.refusal)
        self.calls.append(f"commit {policy_version}")
        await self.commit_gate.wait()
        if self.is_dead:
            raise EngineDeadError("applying failed")
        self.policy_version = policy_version
        self.committed.release()
        return Commit(stopped_seconds=0.2, apply_seconds=0.1, num_requests_kept=self.num_running)

    async def pause(self) -> None:
        self.calls.append("pause")
        self.resumed.clear()
        await self.pause_gate.wait()

    async def resume(self) -> None:
        self.calls.append("resume")
        await self.resume_gate.wait()
        self.resumed.set()

    async def close(self) -> None:
        self.calls.append("close")
