"""LearnerService: how servers announce themselves, and how an operator looks at a run and ends it."""

import threading
from dataclasses import dataclass, field

from learner.servers import ServerBook, ServerKind
from protos.learner.v1 import learner_pb2, learner_pb2_grpc
from rollout_server.client import FleetMismatchError, RolloutUnavailableError
from runtime.errors import InvalidRequestError, UnavailableError, WrongStateError
from runtime.interceptors import Context

_KINDS = {
    learner_pb2.SERVER_KIND_ROLLOUT: ServerKind.ROLLOUT,
    learner_pb2.SERVER_KIND_REWARD: ServerKind.REWARD,
}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}


@dataclass(slots=True)
class RunStatus:
    """How far a run is, and what it was asked to do. The main thread writes; events are set by anyone."""

    run_id: str
    num_steps: int
    policy_version: int = 0
    phase: learner_pb2.LearnerPhase = learner_pb2.LEARNER_PHASE_STARTING
    checkpoint_step: int | None = None
    samples_issued: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to end the run after the step in progress."""
    checkpoint: threading.Event = field(default_factory=threading.Event)
    """Set to make a checkpoint after the step in progress."""

    @property
    def next_step(self) -> int:
        """The step in progress."""
        return min(self.policy_version + 1, self.num_steps)


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """The control plane of one run."""

    def __init__(self, servers: ServerBook, status: RunStatus) -> None:
        self._servers, self._status = servers, status

    async def RegisterServer(
        self, request: learner_pb2.RegisterServerRequest, context: Context
    ) -> learner_pb2.RegisterServerResponse:
        """Takes a server in."""
        if request.kind not in _KINDS:
            raise InvalidRequestError("kind", request.kind, "SERVER_KIND_ROLLOUT or SERVER_KIND_REWARD")
        host, _, port = request.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise InvalidRequestError("address", request.address, "host:port")
        try:
            await self._servers.register(_KINDS[request.kind], request.address)
        except FleetMismatchError as error:
            raise WrongStateError(str(error)) from error
        except RolloutUnavailableError as error:
            raise UnavailableError(str(error)) from error
        return learner_pb2.RegisterServerResponse(run_id=self._status.run_id)

    async def ListServers(
        self, request: learner_pb2.ListServersRequest, context: Context
    ) -> learner_pb2.ListServersResponse:
        """Lists the servers."""
        servers = [
            learner_pb2.KnownServer(
                kind=_KIND_NUMBERS[server.kind],
                address=server.address,
                is_ready=server.is_ready,
                policy_version=server.policy_version,
                reason=server.reason,
            )
            for server in self._servers.known()
        ]
        return learner_pb2.ListServersResponse(servers=servers)

    async def GetStatus(self, request: learner_pb2.GetStatusRequest, context: Context) -> learner_pb2.GetStatusResponse:
        """Says how far the run is."""
        status = self._status
        return learner_pb2.GetStatusResponse(
            run_id=status.run_id,
            phase=status.phase,
            policy_version=status.policy_version,
            num_steps=status.num_steps,
            checkpoint_step=status.checkpoint_step,
            samples_issued=status.samples_issued,
        )

    async def RequestCheckpoint(
        self, request: learner_pb2.RequestCheckpointRequest, context: Context
    ) -> learner_pb2.RequestCheckpointResponse:
        """Asks for a checkpoint after the step in progress."""
        self._status.checkpoint.set()
        return learner_pb2.RequestCheckpointResponse(step=self._status.next_step)

    async def Stop(self, request: learner_pb2.StopRequest, context: Context) -> learner_pb2.StopResponse:
        """Ends the run after the step in progress."""
        self._status.stop.set()
        return learner_pb2.StopResponse(step=self._status.next_step)
