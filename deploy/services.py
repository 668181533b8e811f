"""Brings the services of a run up, keeps them running, and takes them down."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from deploy.child_process import ChildSpec
from deploy.errors import RunFailedError, UserError, first_cause
from deploy.placement import Bundle, Service
from deploy.run_file import RunConfig
from deploy.run_folder import RunFolder
from deploy.service_handle import GRPC_SERVICES, KILL_SECONDS, ServiceHandle
from deploy.supervisor import ServicePhase, ServiceState
from protos.learner.v1 import learner_pb2, learner_pb2_grpc
from runtime.dialling import dial
from runtime.process import ReadyFile
from runtime.serving import wait_until_serving

_PLACE_SECONDS = 60
_HEALTH_SECONDS = 30.0
_REGISTER_SECONDS = 60.0
_REGISTER_ATTEMPTS = 3
# Servers are spread over nodes, ranks of one learner are kept together.
_STRATEGIES = {Service.ROLLOUT: "SPREAD", Service.REWARD: "SPREAD", Service.LEARNER: "PACK"}
_KINDS = {Service.ROLLOUT: learner_pb2.SERVER_KIND_ROLLOUT, Service.REWARD: learner_pb2.SERVER_KIND_REWARD}

ServerChange = Callable[[Bundle, ReadyFile | None, ServiceState], Awaitable[None]]
"""What the owner wants to know of a server that died (READY before, now not) or came back."""


class Services:
    """The services of one run. One event loop owns an object of this class."""

    def __init__(self, config: RunConfig, *, folder: RunFolder, bundles: Sequence[Bundle], token: str | None) -> None:
        self._config, self._folder, self._bundles, self._token = config, folder, tuple(bundles), token
        self._groups: dict[Service, PlacementGroup] = {}
        self._handles: dict[Service, list[ServiceHandle]] = {service: [] for service in Service}
        self._is_registering = False

    def addresses(self, service: Service) -> list[str]:
        """host:port of every server of a kind that serves now."""
        return [handle.ready.address for handle in self._handles[service] if handle.ready is not None]

    async def launch(self, *, is_resumed: bool) -> None:
        """Places and starts all services at the same time; `until_ready` waits for them.

        Args:
            is_resumed: Whether the learner goes on from its newest checkpoint.

        Raises:
            UserError: The cluster has no room.
        """
        for service in Service:
            self._place(service)
        config, learners = self._config, self._handles[Service.LEARNER]
        for handle in self._handles[Service.ROLLOUT]:
            handle.launch(self._spec(handle.bundle, (), _threads(config.rollout.num_threads)))
        for handle in self._handles[Service.REWARD]:
            handle.launch(self._spec(handle.bundle, (), _threads(1)))
        for service in Service:
            await self._wait_for_room(service)
        options = (f"--run-folder={self._folder.path}", *(("--resume",) if is_resumed else ()))
        address, port = await learners[0].rendezvous()
        for handle in learners:
            ranks = {
                "RANK": str(handle.bundle.index),
                "WORLD_SIZE": str(len(learners)),
                # Ray shows a process its own GPUs only, so each rank's device is the first one.
                "LOCAL_RANK": "0",
                "MASTER_ADDR": address if len(learners) > 1 else "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            handle.launch(self._spec(handle.bundle, options, _threads(config.learner.threads_per_rank) | ranks))

    async def until_ready(self, services: Sequence[Service], *, on_ready: Callable[[str], None]) -> None:
        """Waits until all services of some kinds serve for the first time.

        Args:
            services: The kinds.
            on_ready: Called with the name of each that serves.

        Raises:
            UserError: A service cannot start because of a setting, a file or a port.
            RunFailedError: A service ended before it served.
        """

        async def wait_for(handle: ServiceHandle) -> None:
            ready = await handle.until_ready()
            await self._wait_until_serving(handle.bundle.service, ready.address)
            on_ready(handle.name)

        try:
            async with asyncio.TaskGroup() as tasks:
                for service in services:
                    for handle in self._handles[service]:
                        if _listens(handle.bundle):
                            tasks.create_task(wait_for(handle))
        except ExceptionGroup as group:
            raise first_cause(group) from group

    async def register_servers(self) -> None:
        """Announces the servers to the learner, which trains as soon as it knows them all; also later ones."""
        self._is_registering = True
        async with asyncio.TaskGroup() as tasks:
            for service in (Service.REWARD, Service.ROLLOUT):
                for handle in self._handles[service]:
                    if handle.ready is not None:
                        tasks.create_task(self._register(service, handle.ready))

    async def watch(self, on_change: ServerChange) -> None:
        """Keeps the servers running and registered; returns when the learner has ended with all its steps done.

        Args:
            on_change: Called when a server has ended or serves again, with its addresses before the change.

        Raises:
            RunFailedError: The learner ended otherwise, or a server ended for good.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                keepers = [
                    tasks.create_task(self._keep(handle, on_change))
                    for handle in (*self._handles[Service.ROLLOUT], *self._handles[Service.REWARD])
                ]
                await self._until_learner_ended()
                for keeper in keepers:
                    keeper.cancel()
        except ExceptionGroup as group:
            raise first_cause(group) from group

    async def stop(self, *, within_seconds: float, server_grace_seconds: float) -> None:
        """Ends everything: the learner first, which may still need the servers for its last checkpoint.

        Args:
            within_seconds: Until all are ended, killed if need be.
            server_grace_seconds: Of it, what servers are left for their own end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_seconds
        for services, reserved_seconds in (
            ((Service.LEARNER,), server_grace_seconds + KILL_SECONDS),
            ((Service.ROLLOUT, Service.REWARD), 0.0),
        ):
            grace_seconds = max(0.0, deadline - reserved_seconds - KILL_SECONDS - loop.time())
            async with asyncio.TaskGroup() as tasks:
                for service in services:
                    for handle in self._handles[service]:
                        tasks.create_task(handle.stop(grace_seconds=grace_seconds))
        for group in self._groups.values():
            remove_placement_group(group)

    def _place(self, service: Service) -> None:
        """Asks for a placement group, and for an actor in each of its bundles; neither waits for room."""
        bundles = [bundle for bundle in self._bundles if bundle.service is service]
        group = placement_group([bundle.resources for bundle in bundles], strategy=_STRATEGIES[service])
        self._groups[service] = group
        # The learner is never started again by itself: it must go on from a checkpoint.
        max_restarts = 0 if service is Service.LEARNER else self._config.services.max_restarts
        self._handles[service] = [
            ServiceHandle(bundle, group=group, bundle_index=index, max_restarts=max_restarts)
            for index, bundle in enumerate(bundles)
        ]

    async def _wait_for_room(self, service: Service) -> None:
        # In short waits, since a thread cannot be cancelled and a Ctrl-C must not wait for it.
        for _ in range(_PLACE_SECONDS):
            if await asyncio.to_thread(self._groups[service].wait, 1):
                return
        free = ray.available_resources()
        wanted = [bundle.resources for bundle in self._bundles if bundle.service is service]
        raise UserError(
            f"the Ray cluster has no room for {len(wanted)} x {service}: {wanted[0]} each is wanted, "
            f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU are free"
        )

    def _spec(self, bundle: Bundle, options: tuple[str, ...], environment: dict[str, str]) -> ChildSpec:
        """The process of a service: exactly a `tandem serve` command."""
        return ChildSpec(
            name=bundle.name,
            arguments=("-m", "deploy.cli", "serve", bundle.service.value, str(self._folder.services_file), *options),
            environment=environment,
            log_file=self._folder.log_file(bundle.name),
            start_timeout_seconds=self._config.services.start_timeout_seconds if _listens(bundle) else None,
        )

    async def _wait_until_serving(self, service: Service, address: str) -> None:
        async with dial(address, token=self._token) as channel:
            await wait_until_serving(channel, service=GRPC_SERVICES[service], timeout_seconds=_HEALTH_SECONDS)

    async def _register(self, service: Service, ready: ReadyFile) -> None:
        (learner,) = self.addresses(Service.LEARNER)[:1] or [""]
        if not learner:
            return
        request = learner_pb2.RegisterServerRequest(
            kind=_KINDS[service], address=ready.address, instance_id=ready.instance_id
        )
        try:
            async with dial(learner, token=self._token) as channel:
                stub = learner_pb2_grpc.LearnerServiceStub(channel)
                await stub.RegisterServer(request, timeout=_REGISTER_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise RunFailedError(f"the learner does not take {service} {ready.address}: {error.details()}") from error

    async def _keep(self, handle: ServiceHandle, on_change: ServerChange) -> None:
        """Follows one server through its restarts, which its supervisor makes."""
        while True:
            before = handle.ready
            state = await handle.next_state()
            if state.phase is ServicePhase.ENDED:
                raise handle.failure(state)
            if state.ready is not None and self._is_registering:
                await self._register_again(handle.bundle.service, state.ready)
            await on_change(handle.bundle, before, state)

    async def _register_again(self, service: Service, ready: ReadyFile) -> None:
        """A server that dies once more while it is announced is no reason to end the run: its next start is one."""
        for attempt in range(_REGISTER_ATTEMPTS):
            try:
                await self._wait_until_serving(service, ready.address)
                await self._register(service, ready)
            except (TimeoutError, RunFailedError):
                if attempt + 1 == _REGISTER_ATTEMPTS:
                    raise
            else:
                return

    async def _until_learner_ended(self) -> None:
        async def wait_for(handle: ServiceHandle) -> None:
            while (state := await handle.next_state()).phase is not ServicePhase.ENDED:
                pass
            if state.returncode != 0:
                raise handle.failure(state)

        async with asyncio.TaskGroup() as tasks:
            for handle in self._handles[Service.LEARNER]:
                tasks.create_task(wait_for(handle))


def _listens(bundle: Bundle) -> bool:
    """Of a learner with several ranks only the first one listens, and says when it is ready."""
    return bundle.service is not Service.LEARNER or bundle.index == 0


def _threads(number: int) -> dict[str, str]:
    """Keeps the libraries of a service from starting a thread a core each."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(number) for name in names} | {"TOKENIZERS_PARALLELISM": "false"}
