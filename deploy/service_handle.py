"""One service of a run as the launcher sees it: its Ray actor, its process, and how both end."""

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.child_process import ChildSpec
from deploy.errors import RunFailedError, UserError
from deploy.placement import Bundle, Service
from deploy.supervisor import ServicePhase, ServiceState, ServiceSupervisor
from protos.learner.v1 import learner_pb2
from protos.reward.v1 import reward_pb2
from protos.rollout.v1 import rollout_pb2
from runtime.process import ReadyFile

_USER_ERROR = 2
KILL_SECONDS = 2.0
"""How long an actor may take to kill a process that did not end within its grace."""


class ServiceHandle:
    """Owned by the launcher's event loop."""

    def __init__(self, bundle: Bundle, *, group: PlacementGroup, bundle_index: int, max_restarts: int) -> None:
        self.bundle = bundle
        self.ready: ReadyFile | None = None
        """Its addresses, while it serves."""
        self._group, self._bundle_index, self._max_restarts = group, bundle_index, max_restarts
        self._generation = 0
        self._num_actor_deaths = 0
        self._spec: ChildSpec | None = None
        self._actor: Any = self._make_actor()
        self._run: Any = None

    @property
    def name(self) -> str:
        """E.g. `rollout-0`."""
        return self.bundle.name

    async def rendezvous(self) -> tuple[str, int]:
        """Address of the service's node and a port that is free there; the service need not run."""
        return await self._actor.node_address.remote(), await self._actor.free_port.remote()

    def launch(self, spec: ChildSpec) -> None:
        """Starts the process; `until_ready` and `next_state` say what becomes of it."""
        self._spec = spec
        self._run = self._actor.run.remote(spec, max_restarts=self._max_restarts)

    async def until_ready(self) -> ReadyFile:
        """Waits until the process serves for the first time.

        Raises:
            UserError: It ended because of a setting, a file or a port; its own words.
            RunFailedError: It ended otherwise; its last words, and where its log is.
        """
        state = await self.next_state()
        if state.phase is ServicePhase.READY and state.ready is not None:
            return state.ready
        raise self.failure(state)

    async def next_state(self) -> ServiceState:
        """Waits for the next change."""
        try:
            state: ServiceState = await self._actor.next_state.remote(self._generation)
        except RayActorError as error:
            state = self._replace_actor(error)
        self._generation = state.generation
        self.ready = state.ready
        return state

    def failure(self, state: ServiceState) -> Exception:
        """What an end that was not wanted means for the user, in one line."""
        log = "" if self._spec is None else f"; its log: {self._spec.log_file}"
        words = last_words(state).removeprefix("tandem: ")
        if state.returncode == _USER_ERROR:
            return UserError(f"{self.name}: {words}")
        return RunFailedError(f"{self.name} {state.reason}{f': {words}' if words else ''}{log}")

    async def stop(self, *, grace_seconds: float) -> None:
        """Ends the process and the actor, whatever state they are in."""
        # An actor that found no room, or lost its node, does not answer.
        with suppress(RayActorError, TimeoutError):
            async with asyncio.timeout(grace_seconds + KILL_SECONDS):
                await self._actor.stop.remote(grace_seconds=grace_seconds)
        ray.kill(self._actor)

    def _make_actor(self) -> Any:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=self._bundle_index
        )
        return (
            ray.remote(ServiceSupervisor)
            .options(num_cpus=self.bundle.num_cpus, num_gpus=self.bundle.num_gpus, scheduling_strategy=strategy)
            .remote()
        )

    def _replace_actor(self, error: RayActorError) -> ServiceState:
        """The actor died, and its process with it: a new one starts the process again, as often as is allowed."""
        self._num_actor_deaths += 1
        reason = f"lost its Ray actor ({str(error).splitlines()[0]})"
        if self._spec is None or self._num_actor_deaths > self._max_restarts:
            return ServiceState(generation=0, phase=ServicePhase.ENDED, reason=reason)
        self._actor = self._make_actor()
        self.launch(self._spec)
        return ServiceState(
            generation=0, phase=ServicePhase.STARTING, reason=reason, num_restarts=self._num_actor_deaths
        )


def last_words(state: ServiceState) -> str:
    """The last line of a log, where it is a reason: a process that was killed by a signal had no time to give one."""
    was_killed = state.returncode is not None and state.returncode < 0
    return "" if was_killed or not state.log_tail else state.log_tail[-1].strip()


GRPC_SERVICES = {
    Service.ROLLOUT: rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name,
    Service.REWARD: reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,
    Service.LEARNER: learner_pb2.DESCRIPTOR.services_by_name["LearnerService"].full_name,
}
"""What health is asked about."""
