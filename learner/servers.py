"""The servers that a learner knows: who has registered, who is in the fleet, who waits for weights."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import structlog

from learner import metrics
from reward_service.client import RewardClient
from rollout_server.client import FleetMismatchError, RolloutError, RolloutFleet, ServerInfo

log = structlog.get_logger()

HANDSHAKE_SECONDS = 30.0


class ServerKind(StrEnum):
    """What a server is."""

    ROLLOUT = "rollout"
    REWARD = "reward"


@dataclass(frozen=True, slots=True)
class KnownServer:
    """One server as LearnerService lists it."""

    kind: ServerKind
    address: str
    is_ready: bool
    policy_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a rollout server must agree with."""

    tokenizer_fingerprint: str
    vocabulary_size: int
    stop_token_ids: tuple[int, ...]


class ServerBook:
    """Owned by the learner's event loop. A rollout server gets traffic only once it serves the learner's weights.

    A server is known by its address, and told from an earlier one at the same address by its instance id. The counts
    may be read from any thread.
    """

    def __init__(self, *, token: str | None, model: ModelFacts) -> None:
        self.fleet = RolloutFleet(token=token)
        """Servers that take requests."""
        self.rewards = RewardClient(token=token)
        """Reward servers."""
        self.token = token
        """What every call to a server carries."""
        self._model = model
        # By address: those that take requests, and those that were asked what they are but lack the learner's weights.
        self._ready: dict[str, ServerInfo] = {}
        self._waiting: dict[str, ServerInfo] = {}
        self._lost: dict[str, str] = {}

    async def register(self, kind: ServerKind, address: str) -> None:
        """Takes a server in; again after its restart. One that is known and has not restarted stays what it is.

        Raises:
            RolloutUnavailableError: A rollout server does not answer.
            FleetMismatchError: It does not fit the model that is trained.
        """
        if kind is ServerKind.REWARD:
            await self.rewards.add_server(address)
            log.info("reward server registered", address=address)
            return
        newcomers = RolloutFleet(token=self.token)
        try:
            info = await newcomers.add_server(address, timeout_seconds=HANDSHAKE_SECONDS)
        finally:
            await newcomers.close()
        self._require_fit(info)
        if _is_same(self._ready.get(address), info):
            return
        await self._forget(address)
        self._lost.pop(address, None)
        self._waiting[address] = info
        log.info("rollout server registered", address=address, policy_version=info.policy_version)

    def _require_fit(self, info: ServerInfo) -> None:
        for name in ("tokenizer_fingerprint", "vocabulary_size", "stop_token_ids"):
            ours, theirs = getattr(self._model, name), getattr(info, name)
            if ours != theirs:
                raise FleetMismatchError(f"{name}: the learner has {ours}, {info.address} has {theirs}")

    @property
    def num_rollout(self) -> int:
        """Rollout servers that are in the fleet or wait for weights."""
        return len(self._waiting) + len(self._ready)

    @property
    def num_ready(self) -> int:
        """Rollout servers in the fleet."""
        return len(self._ready)

    @property
    def num_reward(self) -> int:
        """Reward servers."""
        return len(self.rewards.addresses)

    @property
    def has_waiting(self) -> bool:
        """Whether a rollout server waits for its first weights."""
        return bool(self._waiting)

    def push_targets(self) -> tuple[ServerInfo, ...]:
        """Every rollout server that the next push goes to."""
        return (*self._ready.values(), *self._waiting.values())

    async def note_pushed(self, servers: Sequence[ServerInfo], policy_version: int) -> None:
        """Servers serve a version now; those that waited for it join the fleet. One that has restarted waits on."""
        for info in servers:
            address = info.address
            if _is_same(self._waiting.get(address), info):
                await self._admit(info)
            if _is_same(self._ready.get(address), info):
                self.fleet.note_version(address, policy_version)
        metrics.ROLLOUT_SERVERS.set(len(self._ready))

    async def _admit(self, info: ServerInfo) -> None:
        try:
            now = await self.fleet.add_server(info.address, timeout_seconds=HANDSHAKE_SECONDS)
        except RolloutError as error:
            await self.lose(info, str(error))
            return
        if _is_same(self._waiting.get(info.address), info) and _is_same(now, info):
            self._ready[info.address] = self._waiting.pop(info.address)
            return
        await self.fleet.remove_server(info.address)
        await self.lose(info, "restarted after the weight push")

    async def lose(self, info: ServerInfo, reason: str) -> None:
        """Takes a rollout server out, unless it has registered again since; it comes back by registering."""
        known = self._ready.get(info.address) or self._waiting.get(info.address)
        if not _is_same(known, info):
            return
        log.warning("rollout server lost", address=info.address, reason=reason)
        await self._forget(info.address)
        self._lost[info.address] = reason

    async def _forget(self, address: str) -> None:
        self._ready.pop(address, None)
        self._waiting.pop(address, None)
        await self.fleet.remove_server(address)
        metrics.ROLLOUT_SERVERS.set(len(self._ready))

    def known(self) -> tuple[KnownServer, ...]:
        """Every server, for LearnerService."""
        ready = [
            KnownServer(ServerKind.ROLLOUT, info.address, True, self.fleet.policy_version(info.address), "")
            for info in self._ready.values()
        ]
        waiting = [
            KnownServer(ServerKind.ROLLOUT, address, False, info.policy_version, "waits for the next weight push")
            for address, info in self._waiting.items()
        ]
        lost = [KnownServer(ServerKind.ROLLOUT, address, False, 0, reason) for address, reason in self._lost.items()]
        rewards = [KnownServer(ServerKind.REWARD, address, True, 0, "") for address in self.rewards.addresses]
        return (*ready, *waiting, *lost, *rewards)

    async def close(self) -> None:
        """Closes every connection."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fleet.close())
            tasks.create_task(self.rewards.close())


def _is_same(known: ServerInfo | None, info: ServerInfo) -> bool:
    return known is not None and known.instance_id == info.instance_id
