"""Fits the services of a run into the memory of this machine, before any of them starts."""

from math import ceil
from pathlib import Path

import psutil

from deploy.gpus import Gpu, visible_gpus
from deploy.memory_plan import MemoryPlan, Room, plan_memory
from deploy.model_shape import read_model_shape
from deploy.run_file import RunConfig

_CGROUP = Path("/sys/fs/cgroup")


def fit_into_memory(config: RunConfig, model_folder: Path) -> tuple[RunConfig, MemoryPlan | None]:
    """Plans the memory of a run on this machine, and sets what the plan decides.

    Args:
        config: The run. On a cluster that others have set up nothing is planned: what its nodes have is not known here.
        model_folder: The model that servers and learner load.

    Returns:
        The run with `rollout.kv_cache_bytes` (and on a shared GPU `rollout.memory_share`) set, and the plan; None where
        there is none: each process has a GPU of its own, or the model is of another kind.

    Raises:
        UserError: It does not fit.
    """
    shape = None if config.ray.address else read_model_shape(model_folder)
    room = None if shape is None else find_room(config, visible_gpus())
    if shape is None or room is None:
        return config, None
    plan = plan_memory(config, shape, room)
    changes: dict[str, int | float] = {"kv_cache_bytes": plan.kv_cache_bytes}
    if room.is_gpu:
        # vLLM refuses to start where less than this share is free.
        changes["memory_share"] = round((plan.server_bytes + plan.kv_cache_bytes) / room.total_bytes, 4)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=changes)}), plan


def find_room(config: RunConfig, gpus: tuple[Gpu, ...]) -> Room | None:
    """The memory that several services of the run share; None if each process has a GPU of its own."""
    num_servers, num_ranks = config.rollout.num_servers, config.learner.num_ranks
    if not gpus:
        total, free = _machine_memory()
        return Room("this machine", total, free, is_gpu=False, num_servers=num_servers, num_ranks=num_ranks)
    if len(gpus) >= num_servers * config.rollout.tensor_parallel_size + num_ranks:
        return None
    smallest = min(gpus, key=lambda gpu: gpu.free_bytes)
    return Room(
        f"GPU {smallest.index} ({smallest.name})",
        smallest.total_bytes,
        smallest.free_bytes,
        is_gpu=True,
        num_servers=ceil(num_servers / len(gpus)),
        num_ranks=ceil(num_ranks / len(gpus)),
    )


def _machine_memory() -> tuple[int, int]:
    """Total and free bytes: the machine's, or its container's where that has less."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        total, free = min(total, limit), min(free, limit - used)
    return total, free


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
