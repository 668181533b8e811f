"""A torch.distributed group beside the default one, over a TCPStore bound to an address of our own choice."""

import json
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class WeightGroup:
    """One rank's end of the group of a (run id, epoch): rank 0 sends, the others receive.

    The sockets of torch have no authentication: the data plane needs a private network.
    """

    def __init__(self, store: dist.Store, group: Any, *, rank: int, world_size: int) -> None:
        self._store, self._group = store, group
        self.rank, self.world_size = rank, world_size

    @classmethod
    def join(
        cls,
        base_store: dist.Store,
        *,
        name: str,
        rank: int,
        world_size: int,
        transport: str,
        own_host: str,
        timeout_seconds: float,
    ) -> "WeightGroup":
        """Joins, and waits until every rank has.

        Args:
            base_store: The TCPStore of the run; the group uses keys below `name` only.
            name: Unique for each (run id, epoch).
            rank: 0 for the sender.
            world_size: Ranks in all.
            transport: `gloo` or `nccl`.
            own_host: This machine's address, at which the other ranks reach it.
            timeout_seconds: Longest time that the join, and later any one collective, may take.

        Raises:
            RuntimeError: Not every rank came in time.
        """
        timeout = timedelta(seconds=timeout_seconds)
        store = dist.PrefixStore(name, base_store)
        store.set_timeout(timeout)
        if transport == "gloo":
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
            group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        else:
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            group = dist.ProcessGroupNCCL(store, rank, world_size, nccl_options)
        return cls(store, group, rank=rank, world_size=world_size)

    def broadcast(self, data: torch.Tensor) -> Any:
        """Starts to send `data` from rank 0 to all; returns a handle whose `wait()` ends it, or raises RuntimeError."""
        if self._group is None:
            raise RuntimeError("the group was aborted")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([data], options)

    def report(self, key: str, content: dict[str, Any]) -> None:
        """Leaves a JSON note of this rank under `key` for the sender."""
        self._store.set(f"{key}/{self.rank}", json.dumps(content))

    def withdraw(self, key: str) -> None:
        """Takes this rank's note under `key` back, if it has left one."""
        self._store.delete_key(f"{key}/{self.rank}")

    def reports(self, key: str, *, timeout_seconds: float) -> dict[int, dict[str, Any]]:
        """Waits for the notes of every receiving rank under `key`.

        Raises:
            TimeoutError: Some did not come in time; the message names the ranks.
        """
        keys = {rank: f"{key}/{rank}" for rank in range(1, self.world_size)}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            missing = [rank for rank, name in keys.items() if not self._store.check([name])]
            raise TimeoutError(f"ranks {missing} said nothing of {key} within {timeout_seconds:.1f} s") from error
        return {rank: json.loads(self._store.get(name)) for rank, name in keys.items()}

    def abort(self) -> None:
        """Ends the group at once; collectives in flight fail."""
        group, self._group = self._group, None
        if hasattr(group, "abort"):
            group.abort()


def open_store(host: str) -> tuple[dist.TCPStore, int]:
    """A TCPStore server bound to this address only, and its port; the port is known before anyone connects.

    Raises:
        ValueError: The address is not this machine's.
    """
    try:
        listener = socket.create_server((host, 0), backlog=128)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} for the weight store: {error.strerror}") from error
    port = listener.getsockname()[1]
    # The store takes the descriptor over, so it must outlive the Python object.
    store = dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def connect_store(host: str, port: int, *, timeout_seconds: float) -> dist.TCPStore:
    """A client of a run's TCPStore.

    Raises:
        RuntimeError: It cannot be reached in time.
    """
    return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False)
