"""Brings a policy version to every rollout server in two phases, and lives on with those that can be reached.

Stage: every server receives into staging memory while it generates; digests are compared. Commit: every server serves
the staged version between two steps. A server that fails or misses a deadline leaves the fleet, and the push is made
again on the rest as the group's next epoch. If nobody can be blamed, each gets the version in a group of its own, and
whoever fails alone leaves.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch
import torch.distributed as dist
from grpc.aio import AioRpcError, Channel

from learner import metrics
from learner.background import Background
from learner.config import LearnerSettings
from learner.servers import ServerBook
from protos.rollout.v1 import weights_pb2, weights_pb2_grpc
from rollout_server.client import ServerInfo
from runtime.dialling import dial
from runtime.weights.group import WeightGroup, open_store
from runtime.weights.manifest import WeightManifest
from runtime.weights.sender import WeightsDifferError, WeightSender

log = structlog.get_logger()

PROBE_SECONDS = 5.0
"""How long a server may take to answer when it is asked whether it is still there after a failed push."""

NOTE_SECONDS = 60.0
"""How long servers may take to be greeted once they serve the learner's weights."""

T = TypeVar("T")

Tensors = Callable[[], Generator[tuple[str, torch.Tensor], None, None]]
"""Yields name and full tensor of everything in the manifest, in its order; called once a try."""


class WeightPushError(Exception):
    """No rollout server could be given the weights, or the learner could not gather them."""


class _MembersFailedError(Exception):
    """Servers that did not do what they were asked, each with its reason."""

    def __init__(self, reasons: "dict[str, str]") -> None:
        super().__init__("; ".join(f"{address}: {reason}" for address, reason in reasons.items()))
        self.reasons = reasons


# The group's collectives raise RuntimeError, its store TimeoutError, its sockets OSError.
_FAILURES = (_MembersFailedError, WeightsDifferError, RuntimeError, OSError)


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push cost."""

    num_servers: int
    push_seconds: float
    """From the end of the update to the last commit."""
    stopped_seconds: float
    """Longest time in which a server sampled no token."""


@dataclass(slots=True)
class _Member:
    info: ServerInfo
    first_rank: int
    channel: Channel
    stub: "weights_pb2_grpc.WeightServiceAsyncStub"


class WeightPush:
    """The learner's end of the weight group; its methods are called on the main thread of rank 0."""

    def __init__(
        self,
        *,
        background: Background,
        servers: ServerBook,
        manifest: WeightManifest,
        settings: LearnerSettings,
        run_id: str,
        device: torch.device,
        stop: threading.Event,
    ) -> None:
        self._background, self._servers, self._manifest = background, servers, manifest
        self._settings, self._run_id, self._device = settings, run_id, device
        self._stop = stop
        self._epoch = time.time_ns() // 1_000_000
        self._members: list[_Member] = []
        self._group: WeightGroup | None = None
        self._sender: WeightSender | None = None
        self._store_host = settings.listen.host
        self._store: dist.TCPStore | None = None
        self._store_port = 0

    def push(self, tensors: Tensors, *, policy_version: int) -> PushReport:
        """Pushes a version to every server that is registered; waits for one while there is none.

        Raises:
            WeightPushError: No server came within `fleet_timeout_seconds`, or the run was asked to stop meanwhile; or
                the learner could not gather its weights.
        """
        begin = time.monotonic()
        while True:
            targets = self._wait_for_targets(policy_version)
            stops: list[float] = []
            is_anyone_lost = False
            try:
                stops.append(self._push_to(targets, tensors, policy_version=policy_version))
            except _FAILURES as error:
                is_anyone_lost = self._recover(targets, error)
            # Outside the handler: the error holds collectives, and with them connections that receivers wait on.
            if not stops and not is_anyone_lost:
                stops = self._push_apart(targets, tensors, policy_version=policy_version)
            if stops:
                return PushReport(self._servers.num_ready, time.monotonic() - begin, max(stops))

    def _push_to(self, targets: Sequence[ServerInfo], tensors: Tensors, *, policy_version: int) -> float:
        """Pushes to exactly these servers; the group is kept if it is theirs. Returns the longest stop in seconds."""
        try:
            if [member.info.instance_id for member in self._members] != [info.instance_id for info in targets]:
                self._join(targets)
            stopped_seconds = self._stage_and_commit(tensors, policy_version)
        except _FAILURES as error:
            metrics.PUSHES.labels("failed").inc()
            log.warning("weight push failed", policy_version=policy_version, reason=_reason(error))
            raise
        metrics.PUSHES.labels("committed").inc()
        return stopped_seconds

    def _push_apart(self, targets: Sequence[ServerInfo], tensors: Tensors, *, policy_version: int) -> list[float]:
        """Pushes to one server after another; those that fail alone are lost. Returns the stops of the others."""
        stops = []
        for info in targets:
            try:
                stops.append(self._push_to([info], tensors, policy_version=policy_version))
            except _FAILURES as error:
                if not self._recover([info], error):
                    self._lose({info: f"push failed though it answers: {_reason(error)}"})
        return stops

    def _wait_for_targets(self, policy_version: int) -> tuple[ServerInfo, ...]:
        async def known() -> tuple[ServerInfo, ...]:
            return self._servers.push_targets()

        deadline = time.monotonic() + self._settings.fleet_timeout_seconds
        while not (targets := self._background.call(known(), timeout_seconds=10)):
            if self._stop.wait(0.2) or time.monotonic() > deadline:
                raise WeightPushError(f"policy version {policy_version}: there is no rollout server to push to")
        return targets

    def _join(self, targets: Sequence[ServerInfo]) -> None:
        self.leave()
        self._epoch += 1
        if self._store is None:
            self._store_host = _own_host(self._settings.listen.host, targets[0].admin_address)
            self._store, self._store_port = open_store(self._store_host)
        self._members = self._background.call(self._dial(targets), timeout_seconds=10)
        world_size = 1 + sum(info.num_weight_ranks for info in targets)
        transport = self._transport(targets)
        timeout = self._settings.push_timeout_seconds
        manifest = self._manifest.to_proto()

        def join(member: _Member) -> Awaitable[weights_pb2.JoinGroupResponse]:
            request = weights_pb2.JoinGroupRequest(
                run_id=self._run_id,
                epoch=self._epoch,
                store_host=self._store_host,
                store_port=self._store_port,
                world_size=world_size,
                first_rank=member.first_rank,
                transport=transport,
                manifest=manifest,
                timeout_seconds=timeout,
            )
            return member.stub.JoinGroup(request, timeout=timeout)

        self._all(join)
        self._group = WeightGroup.join(
            self._store,
            name=f"weights/{self._run_id}/{self._epoch}",
            rank=0,
            world_size=world_size,
            transport=transport,
            own_host=self._store_host,
            timeout_seconds=timeout,
        )
        self._group.reports("joined", timeout_seconds=timeout)
        device = self._device if transport == "nccl" else torch.device("cpu")
        self._sender = WeightSender(self._group, self._manifest, device=device)
        log.info("weight group made", epoch=self._epoch, num_servers=len(targets), transport=transport)

    def _transport(self, targets: Sequence[ServerInfo]) -> str:
        if self._settings.transport != "auto":
            return self._settings.transport
        # NCCL refuses two ranks on one GPU, and a single machine may well share one; gloo works everywhere.
        can_nccl = self._device.type == "cuda" and all("nccl" in info.transports for info in targets)
        return "nccl" if can_nccl and torch.cuda.device_count() > 1 else "gloo"

    def _stage_and_commit(self, tensors: Tensors, policy_version: int) -> float:
        assert self._sender is not None, "_join comes first"
        timeout = self._settings.push_timeout_seconds
        stage = weights_pb2.StageWeightsRequest(
            run_id=self._run_id, epoch=self._epoch, policy_version=policy_version, timeout_seconds=2 * timeout
        )
        self._all(lambda member: member.stub.StageWeights(stage, timeout=timeout))
        # Closed in any case: with ZeRO-3 the other ranks are in every gather, whatever becomes of the push.
        with closing(tensors()) as source:
            sent = self._sender.send(_not_to_blame_on_servers(source), policy_version=policy_version)
        self._sender.confirm(sent, timeout_seconds=timeout)
        keep = self._settings.kv_on_commit == "keep"
        commit = weights_pb2.CommitWeightsRequest(
            run_id=self._run_id,
            epoch=self._epoch,
            policy_version=policy_version,
            kv_on_commit=weights_pb2.KV_ON_COMMIT_KEEP if keep else weights_pb2.KV_ON_COMMIT_RECOMPUTE,
        )
        answers = self._all(lambda member: member.stub.CommitWeights(commit, timeout=timeout))
        infos = [member.info for member in self._members]
        self._background.call(self._servers.note_pushed(infos, policy_version), timeout_seconds=NOTE_SECONDS)
        return float(max(answer.stopped_seconds for answer in answers))

    def _recover(self, targets: Sequence[ServerInfo], error: BaseException) -> bool:
        """Ends the group, tells every server to drop what is staged, and takes out those to blame.

        Returns:
            Whether any was: those that the failure names, and those that do not answer.
        """
        abort = weights_pb2.AbortWeightsRequest(run_id=self._run_id, epoch=self._epoch)
        named = error.reasons if isinstance(error, _MembersFailedError) else {}

        async def blame(info: ServerInfo) -> str:
            async with dial(info.admin_address, token=self._servers.token) as channel:
                try:
                    await weights_pb2_grpc.WeightServiceStub(channel).AbortWeights(abort, timeout=PROBE_SECONDS)
                except AioRpcError:
                    return f"did not answer after a failed push: {_reason(error)}"
            return named.get(info.address, "")

        async def blame_all() -> list[str]:
            return await asyncio.gather(*map(blame, targets))

        reasons = self._background.call(blame_all(), timeout_seconds=PROBE_SECONDS + 10)
        self.leave()
        lost = {info: reason for info, reason in zip(targets, reasons, strict=True) if reason}
        self._lose(lost)
        return bool(lost)

    def _lose(self, reasons: dict[ServerInfo, str]) -> None:
        for info, reason in reasons.items():
            self._background.call(self._servers.lose(info, reason), timeout_seconds=10)

    def leave(self) -> None:
        """Ends the group on this side; servers leave theirs when they join the next one."""
        if self._group is not None:
            self._group.abort()
        self._group = self._sender = None
        members, self._members = self._members, []
        if members:
            self._background.call(_close(members), timeout_seconds=10)

    async def _dial(self, targets: Sequence[ServerInfo]) -> list[_Member]:
        members: list[_Member] = []
        first_rank = 1
        for info in targets:
            channel = dial(info.admin_address, token=self._servers.token)
            members.append(_Member(info, first_rank, channel, weights_pb2_grpc.WeightServiceStub(channel)))
            first_rank += info.num_weight_ranks
        return members

    def _all(self, call: Callable[[_Member], Awaitable[T]]) -> list[T]:
        """Calls every member at once, and waits until each has answered or failed.

        Raises:
            _MembersFailedError: Some have failed.
        """
        reasons: dict[str, str] = {}

        async def one(member: _Member) -> list[T]:
            try:
                return [await call(member)]
            except AioRpcError as error:
                reasons[member.info.address] = _reason(error)
                return []

        async def every() -> list[T]:
            return [answer for answers in await asyncio.gather(*map(one, self._members)) for answer in answers]

        answers = self._background.call(every(), timeout_seconds=self._settings.push_timeout_seconds + 5)
        if reasons:
            raise _MembersFailedError(reasons)
        return answers


def _not_to_blame_on_servers(
    source: Generator[tuple[str, torch.Tensor], None, None],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    try:
        yield from source
    except RuntimeError as error:
        raise WeightPushError(f"the learner could not gather its weights: {error}") from error


async def _close(members: list[_Member]) -> None:
    for member in members:
        await member.channel.close()


def _own_host(listen_host: str, peer: str) -> str:
    """The address at which rollout servers reach this machine."""
    if listen_host not in {"0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
        return listen_host
    host, port = peer.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        return str(connection.getsockname()[0])


def _reason(error: BaseException) -> str:
    if isinstance(error, AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
