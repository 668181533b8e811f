"""The Ray actor that keeps one service running as a child process."""

import asyncio
import signal
import socket
from dataclasses import dataclass, replace
from enum import StrEnum

from deploy.child_process import ChildProcess, ChildSpec, log_tail
from runtime.process import ReadyFile

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0


class ServicePhase(StrEnum):
    """Where a supervised service stands."""

    STARTING = "starting"
    READY = "ready"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ServiceState:
    """A service as its supervisor sees it.

    Attributes:
        generation: Rises with every change.
        phase: Where it stands; ENDED is for good.
        ready: Its addresses; None unless READY.
        num_restarts: How often it was started again.
        returncode: How the process ended, negative for a signal; None if it has not, or was never started.
        reason: The same in words; empty if it has not ended.
        log_tail: The last lines of its log when it ended.
    """

    generation: int
    phase: ServicePhase
    ready: ReadyFile | None = None
    num_restarts: int = 0
    returncode: int | None = None
    reason: str = ""
    log_tail: tuple[str, ...] = ()


class ServiceSupervisor:
    """Runs one service; all methods are coroutines, so that a Ray actor of it answers while the service runs."""

    def __init__(self) -> None:
        self._state = ServiceState(generation=0, phase=ServicePhase.STARTING)
        self._changed = asyncio.Condition()
        self._stopping = asyncio.Event()
        self._child: ChildProcess | None = None

    async def run(self, spec: ChildSpec, *, max_restarts: int) -> ServiceState:
        """Starts the service, and again whenever it ends, with growing pauses; returns when it has ended for good.

        Args:
            spec: The service.
            max_restarts: How often it is started again; a start that fails counts.
        """
        num_restarts = 0
        while True:
            end = await self._run_once(spec, num_restarts=num_restarts)
            if num_restarts >= max_restarts or self._stopping.is_set():
                return await self._change(replace(end, phase=ServicePhase.ENDED))
            await self._change(end)
            num_restarts += 1
            await self._pause(restart_pause_seconds(num_restarts))

    async def next_state(self, after_generation: int) -> ServiceState:
        """Waits until the state is newer than a generation, and returns it; -1 for the present state at once."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._state.generation > after_generation)
            return self._state

    async def stop(self, *, grace_seconds: float) -> None:
        """Ends the service for good: SIGTERM, and SIGKILL after the grace."""
        self._stopping.set()
        if self._child is not None and self._child.is_running:
            await self._child.stop(grace_seconds=grace_seconds)

    async def node_address(self) -> str:
        """The address of this node, as others reach it."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    async def free_port(self) -> int:
        """A port of this node that is free now; for the rendezvous of ranks, which cannot choose one themselves."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    async def _run_once(self, spec: ChildSpec, *, num_restarts: int) -> ServiceState:
        """Starts the service, waits for its end, and says how it ended."""
        state = ServiceState(generation=0, phase=ServicePhase.STARTING, num_restarts=num_restarts)
        if self._stopping.is_set():
            return state
        child = self._child = ChildProcess(spec)
        ready = None if spec.start_timeout_seconds is None else await child.wait_until_ready()
        if ready is not None:
            await self._change(replace(state, phase=ServicePhase.READY, ready=ready))
        elif spec.start_timeout_seconds is not None and child.is_running:
            await child.stop(grace_seconds=0)
            state = replace(state, reason=f"did not serve within {spec.start_timeout_seconds:g} s")
        returncode = await child.wait()
        return replace(
            state,
            returncode=returncode,
            reason=state.reason or how_it_ended(returncode),
            log_tail=await asyncio.to_thread(log_tail, spec.log_file),
        )

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _change(self, state: ServiceState) -> ServiceState:
        async with self._changed:
            self._state = replace(state, generation=self._state.generation + 1)
            self._changed.notify_all()
            return self._state


def how_it_ended(returncode: int) -> str:
    """An exit code in words."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"


def restart_pause_seconds(num_restarts: int) -> float:
    """How long to wait before the start of this number (1 for the first restart)."""
    return min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (num_restarts - 1))
