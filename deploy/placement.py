"""Which service gets which share of a cluster; pure, so that every case is a test."""

from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from deploy.errors import UserError
from deploy.run_file import RunConfig


class Service(StrEnum):
    """The three kinds of services; the value is the word in commands, log names and tables."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What a cluster has.

    Attributes:
        num_cpus: Cores that Ray hands out, over all nodes.
        num_gpus: GPUs that Ray hands out, over all nodes.
    """

    num_cpus: float
    num_gpus: float


@dataclass(frozen=True, slots=True)
class Bundle:
    """What Ray reserves for one service process, on one node.

    Attributes:
        service: Its kind.
        index: Its number among its kind, from 0; the rank of a learner.
        num_cpus: Cores, as a share where there are fewer than wanted.
        num_gpus: GPUs, as a share where several services use one.
    """

    service: Service
    index: int
    num_cpus: float
    num_gpus: float

    @property
    def name(self) -> str:
        """How the process is called in logs, e.g. `rollout-0`."""
        return f"{self.service}-{self.index}"

    @property
    def resources(self) -> dict[str, float]:
        """The bundle as Ray's placement groups want it."""
        return {name: share for name, share in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if share > 0}


# Ray counts shares in ten-thousandths and refuses a group that is a hair too large.
_GRAIN = 10_000


def plan_placement(config: RunConfig, facts: ClusterFacts) -> tuple[Bundle, ...]:
    """Share out a cluster: whole cores and GPUs where there are enough, shares of them where there are not.

    Args:
        config: Says how many services there are, and how large.
        facts: The cluster.

    Returns:
        Rollout servers, then reward services, then learner ranks; together no more than the cluster has.

    Raises:
        UserError: No core, or too few GPUs for servers that span several.
    """
    if facts.num_cpus <= 0:
        raise UserError("the Ray cluster has no core to give: set ray.num_cpus, or join another")
    wanted = {
        Service.ROLLOUT: float(config.rollout.num_threads * config.rollout.tensor_parallel_size),
        Service.REWARD: 0.5 * config.reward.num_workers,
        Service.LEARNER: float(config.learner.threads_per_rank),
    }
    counts = {
        Service.ROLLOUT: config.rollout.num_servers,
        Service.REWARD: config.reward.num_servers,
        Service.LEARNER: config.learner.num_ranks,
    }
    total = sum(wanted[service] * count for service, count in counts.items())
    squeeze = min(1.0, facts.num_cpus / total)
    gpus = _gpu_shares(config, facts)
    return tuple(
        Bundle(
            service=service,
            index=index,
            num_cpus=max(1, int(wanted[service] * squeeze * _GRAIN)) / _GRAIN,
            num_gpus=gpus[service],
        )
        for service, count in counts.items()
        for index in range(count)
    )


def _gpu_shares(config: RunConfig, facts: ClusterFacts) -> dict[Service, float]:
    """GPUs of one process of each kind."""
    per_server = config.rollout.tensor_parallel_size
    num_processes = config.rollout.num_servers * per_server + config.learner.num_ranks
    if facts.num_gpus < 1:
        return dict.fromkeys(Service, 0.0)
    if facts.num_gpus >= num_processes:
        return {Service.ROLLOUT: float(per_server), Service.REWARD: 0.0, Service.LEARNER: 1.0}
    if per_server > 1:
        raise UserError(
            f"{num_processes} GPUs are needed and the cluster has {facts.num_gpus:g}: lower rollout.num_servers, "
            "rollout.tensor_parallel_size or learner.num_ranks"
        )
    per_gpu = ceil(num_processes / int(facts.num_gpus))
    share = int(_GRAIN / per_gpu) / _GRAIN
    return {Service.ROLLOUT: share, Service.REWARD: 0.0, Service.LEARNER: share}
