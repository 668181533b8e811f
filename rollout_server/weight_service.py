"""JoinGroup to Resume: the control of a server's weights, one call at a time."""

import asyncio
import re

import grpc
import structlog

from protos.rollout.v1 import weights_pb2, weights_pb2_grpc
from rollout_server import metrics
from rollout_server.engine import Engine, GroupAddress, WeightsRefusedError
from rollout_server.served import ServedWeights
from runtime.errors import InvalidRequestError, WrongStateError
from runtime.weights.manifest import WeightManifest

log = structlog.get_logger()

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_PAUSE_SECONDS = 600.0


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """The control plane of one server. It is in at most one weight group, and stages at most one version."""

    def __init__(self, engine: Engine, served: ServedWeights) -> None:
        self._engine, self._served = engine, served
        self._one_at_a_time = asyncio.Lock()
        self._group: tuple[str, int] | None = None
        self._staged: int | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        self._resuming: asyncio.Task[None] | None = None

    async def JoinGroup(
        self, request: weights_pb2.JoinGroupRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.JoinGroupResponse:
        """Joins in the background; a repeated request changes nothing, a newer one replaces the group."""
        _check_join(request, num_ranks=self._engine.facts.num_weight_ranks, transports=self._engine.facts.transports)
        try:
            manifest = WeightManifest.from_proto(request.manifest)
        except ValueError as error:
            raise InvalidRequestError("manifest", "…", f"whole: {error}") from error
        async with self._one_at_a_time:
            group = (request.run_id, request.epoch)
            if self._group is not None and self._group[0] == request.run_id and request.epoch < self._group[1]:
                raise WrongStateError(f"epoch = {request.epoch}: the server is in epoch {self._group[1]} of this run")
            if self._group != group:
                address = GroupAddress(
                    run_id=request.run_id,
                    epoch=request.epoch,
                    store_host=request.store_host,
                    store_port=request.store_port,
                    first_rank=request.first_rank,
                    world_size=request.world_size,
                    transport=request.transport,
                    timeout_seconds=request.timeout_seconds,
                )
                await self._engine.join_group(address, manifest)
                self._group, self._staged = group, None
                log.info("joined weight group", run_id=request.run_id, epoch=request.epoch, transport=request.transport)
        return weights_pb2.JoinGroupResponse(policy_version=self._served.policy_version, lineage=self._served.lineage)

    async def LeaveGroup(
        self, request: weights_pb2.LeaveGroupRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.LeaveGroupResponse:
        """Leaves the group if it is the one named."""
        async with self._one_at_a_time:
            if self._group == (request.run_id, request.epoch):
                await self._engine.leave_group()
                self._group = self._staged = None
        return weights_pb2.LeaveGroupResponse()

    async def StageWeights(
        self, request: weights_pb2.StageWeightsRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.StageWeightsResponse:
        """Lets the workers receive; they report through the store."""
        if request.timeout_seconds <= 0:
            raise InvalidRequestError("timeout_seconds", request.timeout_seconds, "above 0")
        async with self._one_at_a_time:
            self._require_group(request.run_id, request.epoch)
            self._require_newer(request.run_id, request.policy_version)
            await self._engine.begin_staging(request.policy_version, timeout_seconds=request.timeout_seconds)
            self._staged = request.policy_version
        return weights_pb2.StageWeightsResponse()

    async def CommitWeights(
        self, request: weights_pb2.CommitWeightsRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.CommitWeightsResponse:
        """Serves the staged version; requests in flight go on. A commit that was carried out is confirmed again."""
        async with self._one_at_a_time:
            self._require_group(request.run_id, request.epoch)
            if (self._served.lineage, self._served.policy_version) == (request.run_id, request.policy_version):
                return weights_pb2.CommitWeightsResponse()
            if self._staged != request.policy_version:
                raise WrongStateError(f"policy_version = {request.policy_version}: staged is {self._staged}")
            recompute = request.kv_on_commit == weights_pb2.KV_ON_COMMIT_RECOMPUTE
            try:
                # A caller that goes away must not end a commit half-way.
                commit = await asyncio.shield(self._engine.commit(request.policy_version, recompute=recompute))
            except WeightsRefusedError as error:
                metrics.WEIGHT_PUSHES.labels("refused").inc()
                raise WrongStateError(str(error)) from error
            self._served.lineage, self._served.policy_version = request.run_id, request.policy_version
            self._staged = None
        metrics.WEIGHT_PUSHES.labels("committed").inc()
        metrics.STOPPED_SECONDS.observe(commit.stopped_seconds)
        metrics.APPLY_SECONDS.observe(commit.apply_seconds)
        metrics.POLICY_VERSION.set(request.policy_version)
        return weights_pb2.CommitWeightsResponse(
            stopped_seconds=commit.stopped_seconds,
            apply_seconds=commit.apply_seconds,
            num_requests_kept=commit.num_requests_kept,
        )

    async def AbortWeights(
        self, request: weights_pb2.AbortWeightsRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.AbortWeightsResponse:
        """Drops what is staged."""
        async with self._one_at_a_time:
            if self._group == (request.run_id, request.epoch) and self._staged is not None:
                await self._engine.drop_staged()
                self._staged = None
                metrics.WEIGHT_PUSHES.labels("aborted").inc()
        return weights_pb2.AbortWeightsResponse()

    async def Pause(
        self, request: weights_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.PauseResponse:
        """Stops sampling for at most the stated time; a second pause moves its end."""
        if not 0 < request.timeout_seconds <= MAX_PAUSE_SECONDS:
            raise InvalidRequestError("timeout_seconds", request.timeout_seconds, f"in (0, {MAX_PAUSE_SECONDS:g}]")
        async with self._one_at_a_time:
            if self._pause_timer is None:
                await self._engine.pause()
            else:
                self._pause_timer.cancel()
            self._pause_timer = asyncio.get_running_loop().call_later(request.timeout_seconds, self._end_pause)
        return weights_pb2.PauseResponse()

    def _end_pause(self) -> None:
        log.warning("pause ended by its deadline")
        self._resuming = asyncio.get_running_loop().create_task(self._resume())

    async def Resume(
        self, request: weights_pb2.ResumeRequest, context: grpc.aio.ServicerContext
    ) -> weights_pb2.ResumeResponse:
        """Goes on."""
        await self._resume()
        return weights_pb2.ResumeResponse()

    async def _resume(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
            await self._engine.resume()

    def _require_group(self, run_id: str, epoch: int) -> None:
        if self._group != (run_id, epoch):
            raise WrongStateError(f"run_id = {run_id}, epoch = {epoch}: the server is in {self._group or 'no group'}")

    def _require_newer(self, run_id: str, policy_version: int) -> None:
        if self._served.lineage == run_id and policy_version <= self._served.policy_version:
            raise WrongStateError(
                f"policy_version = {policy_version}: the server serves {self._served.policy_version} of this run already"
            )


def _check_join(request: weights_pb2.JoinGroupRequest, *, num_ranks: int, transports: tuple[str, ...]) -> None:
    if not _RUN_ID.fullmatch(request.run_id):
        raise InvalidRequestError("run_id", request.run_id, "1 to 128 of letters, digits, '.', '_', '-'")
    if not 0 < request.store_port <= 65_535:
        raise InvalidRequestError("store_port", request.store_port, "in [1, 65535]")
    if request.transport not in transports:
        raise InvalidRequestError("transport", request.transport, f"one of {', '.join(transports)}")
    if request.first_rank < 1 or request.first_rank + num_ranks > request.world_size:
        raise InvalidRequestError(
            "first_rank", request.first_rank, f"at least 1, with {num_ranks} ranks below {request.world_size}"
        )
    if not 0 < request.timeout_seconds <= 3600:
        raise InvalidRequestError("timeout_seconds", request.timeout_seconds, "in (0, 3600]")
