"""The receiving end of a push: a thread that joins the group and fills staging memory while generation goes on."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

from runtime.weights.digests import digest_values, tensor_digest
from runtime.weights.group import WeightGroup, connect_store
from runtime.weights.manifest import WeightManifest


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Which group a receiver joins, and as what."""

    run_id: str
    epoch: int
    store_host: str
    store_port: int
    rank: int
    world_size: int
    transport: str
    timeout_seconds: float

    @property
    def name(self) -> str:
        """Prefix of the group's keys in the store."""
        return f"weights/{self.run_id}/{self.epoch}"


class ReceiverStateError(Exception):
    """What is asked for does not fit what the receiver has done so far; nothing has changed."""


class WeightReceiver:
    """One receiving rank. Methods are called from the worker's main thread; joining and receiving happen in threads."""

    def __init__(self, place: GroupPlace, manifest: WeightManifest, *, device: torch.device) -> None:
        self.place, self.manifest = place, manifest
        self._device = device
        self._memory = torch.empty(manifest.staging_bytes, dtype=torch.uint8, device=device)
        largest = max(bucket.end - bucket.begin for bucket in manifest.buckets)
        through_host = place.transport == "gloo" and device.type == "cuda"
        self._host_memory = torch.empty(largest, dtype=torch.uint8, pin_memory=True) if through_host else None
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None
        self._wanted: int | None = None
        self._staged: int | None = None
        self._expires = 0.0
        self._is_receiving = False
        self._has_left = False
        self._failure: str | None = None
        self._joining = threading.Thread(target=self._join, name="weights-join", daemon=True)
        self._joining.start()

    def _join(self) -> None:
        place = self.place
        try:
            store = connect_store(place.store_host, place.store_port, timeout_seconds=place.timeout_seconds)
            group = WeightGroup.join(
                store,
                name=place.name,
                rank=place.rank,
                world_size=place.world_size,
                transport=place.transport,
                own_host=_own_host(place.store_host, place.store_port),
                timeout_seconds=place.timeout_seconds,
            )
            group.report("joined", {"manifest": self.manifest.digest})
        except (RuntimeError, ValueError, OSError) as error:
            self._failure = f"the group was not joined: {error}"
            return
        with self._lock:
            if not self._has_left:
                self._group = group
                return
        group.abort()

    def begin(self, policy_version: int, *, timeout_seconds: float) -> None:
        """Starts to receive a version in a thread; what was staged before is dropped. Returns at once.

        Args:
            policy_version: The version that comes.
            timeout_seconds: The staged weights expire if they have not been asked for by then.

        Raises:
            ReceiverStateError: The join or the push before failed or goes on; only a new group is of use then.
        """
        with self._lock:
            if self._failure is not None:
                raise ReceiverStateError(self._failure)
            if self._is_receiving:
                raise ReceiverStateError("the push before has not ended in this group")
            self._wanted, self._staged, self._is_receiving = policy_version, None, True
            self._expires = time.monotonic() + timeout_seconds
        threading.Thread(target=self._receive, args=(policy_version,), name="weights-stage", daemon=True).start()

    def _receive(self, policy_version: int) -> None:
        self._joining.join(2 * self.place.timeout_seconds)
        group = self._group
        if group is None:
            return
        key = f"staged/{policy_version}"
        try:
            group.withdraw(key)
            digests = self._fill(group)
        except RuntimeError as error:
            self._failure = f"receiving policy version {policy_version} failed: {error}"
            # A sender that has gone took the store with it.
            with suppress(RuntimeError):
                group.report(key, {"error": str(error)})
            return
        with self._lock:
            self._is_receiving = False
            is_wanted = self._wanted == policy_version
            if is_wanted:
                self._staged = policy_version
        with suppress(RuntimeError):
            group.report(key, {"digests": digests} if is_wanted else {"error": "the push was given up"})

    def _fill(self, group: WeightGroup) -> list[int]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(torch.cuda.Stream(self._device)):
                return self._fill_buckets(group)
        return self._fill_buckets(group)

    def _fill_buckets(self, group: WeightGroup) -> list[int]:
        digests: list[torch.Tensor] = []
        for bucket in self.manifest.buckets:
            target = self._memory[bucket.begin : bucket.end]
            # gloo moves host memory; on a GPU the bucket goes through a pinned copy.
            data = target if self._host_memory is None else self._host_memory[: target.numel()]
            group.broadcast(data).wait()
            if data is not target:
                target.copy_(data)
            digests.extend(tensor_digest(placed.view(self._memory)) for placed in bucket.tensors)
        return digest_values(digests)

    def staged_weights(self, policy_version: int) -> list[tuple[str, torch.Tensor]]:
        """The staged tensors by name, views into the staging memory.

        Raises:
            ReceiverStateError: This version is not staged, or was staged and has expired.
        """
        with self._lock:
            if self._staged != policy_version:
                raise ReceiverStateError(f"policy version {policy_version} is not staged (staged: {self._staged})")
            if time.monotonic() > self._expires:
                raise ReceiverStateError(f"policy version {policy_version} was staged too long ago and has expired")
        return list(self.manifest.views(self._memory))

    def drop(self) -> None:
        """Forgets what is staged, or is being received."""
        with self._lock:
            self._wanted = self._staged = None

    def leave(self) -> None:
        """Leaves the group; threads that still wait in it end by its timeout."""
        self.drop()
        with self._lock:
            self._has_left = True
            group, self._group = self._group, None
        if group is not None:
            group.abort()


def _own_host(store_host: str, store_port: int) -> str:
    """This machine's address on the way to the store: the one that the other ranks can reach it at."""
    with socket.create_connection((store_host, store_port), timeout=10) as connection:
        return str(connection.getsockname()[0])
