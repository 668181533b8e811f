"""JoinGroup to Resume: the control of a server's weights, one call at a time."""

import asyncio
import re
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from protos.rollout.v1 import weights_pb2, weights_pb2_grpc
from rollout_server import metrics
from rollout_server.engine import Engine, EngineDeadError, GroupAddress, WeightsRefusedError
from rollout_server.served import ServedWeights
from runtime.errors import InvalidRequestError, UnavailableError, WrongStateError
from runtime.interceptors import Context
from runtime.weights.manifest import WeightManifest

log = structlog.get_logger()

_Result = TypeVar("_Result")

_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_PAUSE_SECONDS = 600.0
MAX_JOIN_SECONDS = 3600.0
MAX_STAGING_SECONDS = 86_400.0


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """The control plane of one server. It is in at most one weight group, and stages at most one version."""

    def __init__(self, engine: Engine, served: ServedWeights) -> None:
        self._engine, self._served = engine, served
        self._one_at_a_time = asyncio.Lock()
        self._group: tuple[str, int] | None = None
        self._staged: int | None = None
        self._committed: tuple[str, int, int] | None = None
        self._pause_timer: asyncio.TimerHandle | None = None
        # Work that goes on without a caller is kept here: the event loop alone would let it go.
        self._going_on: set[asyncio.Future[Any]] = set()

    async def JoinGroup(self, request: weights_pb2.JoinGroupRequest, context: Context) -> weights_pb2.JoinGroupResponse:
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
        self, request: weights_pb2.LeaveGroupRequest, context: Context
    ) -> weights_pb2.LeaveGroupResponse:
        """Leaves the group if it is the one named."""
        async with self._one_at_a_time:
            if self._group == (request.run_id, request.epoch):
                await self._engine.leave_group()
                self._group = self._staged = None
        return weights_pb2.LeaveGroupResponse()

    async def StageWeights(
        self, request: weights_pb2.StageWeightsRequest, context: Context
    ) -> weights_pb2.StageWeightsResponse:
        """Lets the workers receive; they report through the store."""
        _check_timeout(request.timeout_seconds, longest=MAX_STAGING_SECONDS)
        async with self._one_at_a_time:
            self._require_group(request.run_id, request.epoch)
            self._require_newer(request)
            self._staged = None
            try:
                await self._engine.begin_staging(request.policy_version, timeout_seconds=request.timeout_seconds)
            except WeightsRefusedError as error:
                raise WrongStateError(str(error)) from error
            self._staged = request.policy_version
        return weights_pb2.StageWeightsResponse()

    async def CommitWeights(
        self, request: weights_pb2.CommitWeightsRequest, context: Context
    ) -> weights_pb2.CommitWeightsResponse:
        """Serves the staged version; requests in flight go on. A commit that was carried out is confirmed again."""
        return await self._to_its_end(self._commit(request))

    async def _commit(self, request: weights_pb2.CommitWeightsRequest) -> weights_pb2.CommitWeightsResponse:
        async with self._one_at_a_time:
            self._require_group(request.run_id, request.epoch)
            if self._staged is None and self._committed == (request.run_id, request.epoch, request.policy_version):
                return weights_pb2.CommitWeightsResponse()
            if self._staged != request.policy_version:
                raise WrongStateError(f"policy_version = {request.policy_version}: staged is {self._staged}")
            recompute = request.kv_on_commit == weights_pb2.KV_ON_COMMIT_RECOMPUTE
            try:
                commit = await self._engine.commit(request.policy_version, recompute=recompute)
            except WeightsRefusedError as error:
                metrics.WEIGHT_PUSHES.labels("refused").inc()
                raise WrongStateError(str(error)) from error
            except EngineDeadError as error:
                metrics.WEIGHT_PUSHES.labels("failed").inc()
                raise UnavailableError(str(error)) from error
            self._served.lineage, self._served.policy_version = request.run_id, request.policy_version
            self._committed, self._staged = (request.run_id, request.epoch, request.policy_version), None
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
        self, request: weights_pb2.AbortWeightsRequest, context: Context
    ) -> weights_pb2.AbortWeightsResponse:
        """Drops what is staged."""
        async with self._one_at_a_time:
            if self._group == (request.run_id, request.epoch) and self._staged is not None:
                await self._engine.drop_staged()
                self._staged = None
                metrics.WEIGHT_PUSHES.labels("aborted").inc()
        return weights_pb2.AbortWeightsResponse()

    async def Pause(self, request: weights_pb2.PauseRequest, context: Context) -> weights_pb2.PauseResponse:
        """Stops sampling for at most the stated time; a second pause moves its end."""
        _check_timeout(request.timeout_seconds, longest=MAX_PAUSE_SECONDS)
        await self._to_its_end(self._pause(request.timeout_seconds))
        return weights_pb2.PauseResponse()

    async def _pause(self, timeout_seconds: float) -> None:
        async with self._one_at_a_time:
            if self._pause_timer is None:
                await self._engine.pause()
            else:
                self._pause_timer.cancel()
            self._pause_timer = asyncio.get_running_loop().call_later(timeout_seconds, self._end_pause)

    def _end_pause(self) -> None:
        log.warning("pause ended by its deadline")
        self._to_its_end(self._resume(self._pause_timer))

    async def Resume(self, request: weights_pb2.ResumeRequest, context: Context) -> weights_pb2.ResumeResponse:
        """Goes on."""
        await self._to_its_end(self._resume(self._pause_timer))
        return weights_pb2.ResumeResponse()

    async def _resume(self, timer: asyncio.TimerHandle | None) -> None:
        async with self._one_at_a_time:
            # Another pause may have moved the end meanwhile.
            if timer is not None and timer is self._pause_timer:
                timer.cancel()
                self._pause_timer = None
                await self._engine.resume()

    def _to_its_end(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
        """Work that a caller who goes away, or none who waits, does not end half-way."""
        going_on = asyncio.ensure_future(work)
        self._going_on.add(going_on)
        going_on.add_done_callback(self._going_on.discard)
        return asyncio.shield(going_on)

    def _require_group(self, run_id: str, epoch: int) -> None:
        if self._group != (run_id, epoch):
            raise WrongStateError(f"run_id = {run_id}, epoch = {epoch}: the server is in {self._group or 'no group'}")

    def _require_newer(self, request: weights_pb2.StageWeightsRequest) -> None:
        served, version = self._served, request.policy_version
        # A push that failed on another server is made again in the next epoch, with the version that we have by now.
        is_repeat = version == served.policy_version and self._committed != (request.run_id, request.epoch, version)
        if served.lineage == request.run_id and version <= served.policy_version and not is_repeat:
            raise WrongStateError(
                f"policy_version = {version}: the server serves {served.policy_version} of this run already"
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
    _check_timeout(request.timeout_seconds, longest=MAX_JOIN_SECONDS)


def _check_timeout(seconds: float, *, longest: float) -> None:
    if not 0 < seconds <= longest:
        raise InvalidRequestError("timeout_seconds", seconds, f"in (0, {longest:g}]")
