"""Where the ranks of a learner find each other, and on which address they listen."""

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist

RANKS_TIMEOUT = timedelta(minutes=30)
"""Longest time for the ranks to find each other, and for one collective."""


def rank_store(rank: int, num_ranks: int) -> dist.Store:
    """The store over which the ranks find each other, at MASTER_ADDR and MASTER_PORT; one rank needs no socket.

    torch's own choice would listen on every address of the machine.
    """
    if num_ranks == 1:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank != 0:
        return dist.TCPStore(host, port, num_ranks, False, RANKS_TIMEOUT)
    listener = socket.create_server((host, port), backlog=128)
    return dist.TCPStore(host, port, num_ranks, True, RANKS_TIMEOUT, master_listen_fd=listener.detach())


def interface_towards(host: str) -> str:
    """The network interface whose address this machine has on the way to a host: where gloo is to listen.

    Raises:
        ValueError: No interface has the address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only chooses the way.
        probe.connect((host, 9))
        own_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == own_address for address in addresses):
            return name
    raise ValueError(f"MASTER_ADDR = {host}: no network interface has the address {own_address}")
