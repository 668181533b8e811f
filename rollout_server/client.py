"""A fleet of rollout servers as one: the handshake, the choice of a server, retries elsewhere.

RolloutError
├── RolloutUnavailableError   no server could answer in time
├── FleetMismatchError        servers that do not fit together: which value differs, and how
└── RolloutRefusedError       a server refuses the request itself; trying again is no use
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from protos.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from rollout_server.samples import FinishReason, Sampling, VersionSpan
from runtime.dialling import dial

__all__ = [
    "FinishReason",
    "FleetMismatchError",
    "GroupRequest",
    "Rollout",
    "RolloutError",
    "RolloutFleet",
    "RolloutRefusedError",
    "RolloutUnavailableError",
    "Sampling",
    "ServerInfo",
    "VersionSpan",
]

# The published types of a stub are those of a synchronous channel.
_Stub: TypeAlias = Any

_FINISH_REASONS = {
    rollout_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    rollout_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    rollout_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}
_TRY_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}
_SHORTEST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.1, 2.0


class RolloutError(Exception):
    """Base of what the client raises."""


class RolloutUnavailableError(RolloutError):
    """No server could answer in time."""


class FleetMismatchError(RolloutError):
    """A server differs from the rest of the fleet, or from what the caller needs."""


class RolloutRefusedError(RolloutError):
    """A server refuses the request itself."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server said at the handshake; see GetServerInfoResponse."""

    address: str
    admin_address: str
    model: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    stop_token_ids: tuple[int, ...]
    lineage: str
    policy_version: int
    max_running_samples: int
    num_weight_ranks: int
    transports: tuple[str, ...]
    instance_id: str


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Samples of one prompt."""

    group_id: str
    prompt_token_ids: tuple[int, ...]
    sample_ids: tuple[str, ...]
    sampling: Sampling
    seeds: tuple[int, ...] | None = None
    """One per sample; None leaves them unseeded."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion as a server sampled it."""

    sample_id: str
    attempt: int
    """How often it was asked for before it came."""
    token_ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    stop_token_id: int | None
    server: str
    """Address of the server that sampled it."""


@dataclass(slots=True)
class _Server:
    """One server as the fleet sees it."""

    channel: grpc.aio.Channel
    stub: _Stub
    info: ServerInfo
    policy_version: int
    outstanding_tokens: int = 0
    rest_until: float = 0.0
    rest_seconds: float = field(default=_SHORTEST_REST_SECONDS)


class RolloutFleet:
    """Servers that serve the same model. One event loop owns an object of this class."""

    def __init__(self, *, token: str | None) -> None:
        self._token = token
        self._servers: dict[str, _Server] = {}

    @property
    def servers(self) -> tuple[ServerInfo, ...]:
        """The servers, in the order in which they were added."""
        return tuple(server.info for server in self._servers.values())

    async def add_server(self, address: str, *, timeout_seconds: float) -> ServerInfo:
        """Asks a server what it is and takes it into the fleet; one that is known already is asked again.

        Raises:
            RolloutUnavailableError: It does not answer in time.
            FleetMismatchError: It differs from the others in tokenizer, vocabulary, stop tokens or logprob semantics.
        """
        channel = dial(address, token=self._token)
        stub: _Stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        try:
            info = await _handshake(address, stub, timeout_seconds=timeout_seconds)
            for other in self._servers.values():
                if other.info.address != address:
                    _require_equal(info, other.info)
        except RolloutError:
            await channel.close()
            raise
        await self.remove_server(address)
        self._servers[address] = _Server(channel, stub, info, info.policy_version)
        return info

    async def remove_server(self, address: str) -> None:
        """Takes a server out; its calls in flight fail and are tried elsewhere. Unknown addresses are no error."""
        server = self._servers.pop(address, None)
        if server is not None:
            await server.channel.close()

    def note_version(self, address: str, policy_version: int) -> None:
        """Notes that a server serves a version from now on, so that it is chosen for it."""
        if address in self._servers:
            self._servers[address].policy_version = policy_version

    def policy_version(self, address: str) -> int:
        """The version that a server served when it was last heard of."""
        return self._servers[address].policy_version

    async def generate_group(
        self,
        request: GroupRequest,
        *,
        timeout_seconds: float,
        min_policy_version: int | None = None,
        exact_policy_version: int | None = None,
    ) -> list[Rollout]:
        """Samples a group on the server with the fewest outstanding tokens; what a server loses is asked of another.

        Args:
            request: The prompt and the samples.
            timeout_seconds: Longest time for the whole group, retries included.
            min_policy_version: Only servers with at least this version.
            exact_policy_version: Only servers with this version, and only tokens of it.

        Returns:
            One rollout per sample id, in their order.

        Raises:
            RolloutUnavailableError: Not every sample came in time.
            RolloutRefusedError: A server refuses the request itself; its words are in the message.
        """
        done: dict[str, Rollout] = {}
        attempts = dict.fromkeys(request.sample_ids, 0)
        deadline = time.monotonic() + timeout_seconds
        reason = "no server with a version new enough is known"
        while (left := deadline - time.monotonic()) > 0:
            wanted_version = exact_policy_version if exact_policy_version is not None else min_policy_version
            server = self._choose(wanted_version)
            if server is None:
                await asyncio.sleep(min(left, random.uniform(0.05, 0.15)))
                continue
            message = _message(request, attempts, min_policy_version, exact_policy_version)
            try:
                await self._ask(server, request, message, done, timeout_seconds=left)
            except grpc.aio.AioRpcError as error:
                reason = f"{server.info.address}: {error.code().name}: {error.details()}"
                await self._after_error(server, error)
            for sample_id in done:
                attempts.pop(sample_id, None)
            if not attempts:
                return [done[sample_id] for sample_id in request.sample_ids]
            attempts = {sample_id: attempt + 1 for sample_id, attempt in attempts.items()}
        raise RolloutUnavailableError(
            f"group {request.group_id}: {len(attempts)} of {len(request.sample_ids)} samples did not come within "
            f"{timeout_seconds:.0f} s; last: {reason}"
        )

    def _choose(self, wanted_version: int | None) -> _Server | None:
        now = time.monotonic()
        ready = [
            server
            for server in self._servers.values()
            if server.rest_until <= now and (wanted_version is None or server.policy_version >= wanted_version)
        ]
        return min(ready, key=lambda server: server.outstanding_tokens, default=None)

    async def _ask(
        self,
        server: _Server,
        request: GroupRequest,
        message: rollout_pb2.GenerateRequest,
        done: dict[str, Rollout],
        *,
        timeout_seconds: float,
    ) -> None:
        share = request.sampling.max_tokens
        outstanding = share * len(message.samples)
        server.outstanding_tokens += outstanding
        attempts = {sample.sample_id: sample.attempt for sample in message.samples}
        try:
            async for response in server.stub.Generate(message, timeout=timeout_seconds):
                sample = response.sample
                # A late answer to an earlier attempt is not ours.
                if response.HasField("sample") and attempts.get(sample.sample_id) == sample.attempt:
                    done[sample.sample_id] = _rollout(sample, server.info.address)
                    outstanding -= share
                    server.outstanding_tokens -= share
            server.rest_seconds = _SHORTEST_REST_SECONDS
        except asyncio.CancelledError:
            # gRPC says so too when a channel is closed under its calls, which is no cancel of ours.
            if _is_cancelled() or self._servers.get(server.info.address) is server:
                raise
        finally:
            server.outstanding_tokens -= outstanding

    async def _after_error(self, server: _Server, error: grpc.aio.AioRpcError) -> None:
        code = error.code()
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return
        if code not in _TRY_ELSEWHERE:
            raise RolloutRefusedError(f"{server.info.address}: {code.name}: {error.details()}") from error
        server.rest_until = time.monotonic() + server.rest_seconds * random.uniform(0.5, 1.0)
        server.rest_seconds = min(2 * server.rest_seconds, _LONGEST_REST_SECONDS)
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            # Another version than we thought: ask, so that the next choice is right.
            try:
                info = await _handshake(server.info.address, server.stub, timeout_seconds=5)
            except RolloutError:
                return
            server.policy_version = info.policy_version

    async def close(self) -> None:
        """Closes every channel."""
        for address in list(self._servers):
            await self.remove_server(address)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _handshake(address: str, stub: _Stub, *, timeout_seconds: float) -> ServerInfo:
    try:
        answer = await stub.GetServerInfo(
            rollout_pb2.GetServerInfoRequest(), timeout=timeout_seconds, wait_for_ready=True
        )
    except grpc.aio.AioRpcError as error:
        raise RolloutUnavailableError(f"{address}: {error.code().name}: {error.details()}") from error
    if answer.logprob_semantics != rollout_pb2.LOGPROB_SEMANTICS_PROCESSED:
        name = rollout_pb2.LogprobSemantics.Name(answer.logprob_semantics)
        raise FleetMismatchError(f"{address}: logprob_semantics = {name}: must be LOGPROB_SEMANTICS_PROCESSED")
    return ServerInfo(
        address=address,
        admin_address=answer.admin_address,
        model=answer.model,
        tokenizer_fingerprint=answer.tokenizer_fingerprint,
        vocabulary_size=answer.vocabulary_size,
        context_length=answer.context_length,
        stop_token_ids=tuple(answer.stop_token_ids),
        lineage=answer.lineage,
        policy_version=answer.policy_version,
        max_running_samples=answer.max_running_samples,
        num_weight_ranks=answer.num_weight_ranks,
        transports=tuple(answer.transports),
        instance_id=answer.instance_id,
    )


def _require_equal(info: ServerInfo, other: ServerInfo) -> None:
    for name in ("tokenizer_fingerprint", "vocabulary_size", "stop_token_ids"):
        ours, theirs = getattr(info, name), getattr(other, name)
        if ours != theirs:
            raise FleetMismatchError(f"{name}: {info.address} has {ours}, {other.address} has {theirs}")


def _message(
    request: GroupRequest,
    attempts: dict[str, int],
    min_policy_version: int | None,
    exact_policy_version: int | None,
) -> rollout_pb2.GenerateRequest:
    sampling = request.sampling
    seeds = dict(zip(request.sample_ids, request.seeds, strict=True)) if request.seeds is not None else {}
    return rollout_pb2.GenerateRequest(
        prompt_token_ids=request.prompt_token_ids,
        samples=[
            rollout_pb2.SampleRequest(sample_id=sample_id, attempt=attempt, seed=seeds.get(sample_id))
            for sample_id, attempt in attempts.items()
        ],
        sampling=rollout_pb2.SamplingParameters(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
            ignore_stop_tokens=sampling.ignore_stop_tokens,
        ),
        min_policy_version=min_policy_version,
        exact_policy_version=exact_policy_version,
        group_id=request.group_id,
    )


def _rollout(sample: rollout_pb2.Sample, server: str) -> Rollout:
    return Rollout(
        sample_id=sample.sample_id,
        attempt=sample.attempt,
        token_ids=tuple(sample.token_ids),
        behaviour_logprobs=tuple(sample.behaviour_logprobs),
        version_spans=tuple(VersionSpan(span.first_token, span.policy_version) for span in sample.version_spans),
        finish_reason=_FINISH_REASONS[sample.finish_reason],
        stop_token_id=sample.stop_token_id if sample.HasField("stop_token_id") else None,
        server=server,
    )
