"""How a cluster is shared out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.errors import UserError
from deploy.placement import ClusterFacts, Service, plan_placement
from deploy.run_file import RunConfig, load_run_file


def _config(**counts: int) -> RunConfig:
    keys = {
        "servers": "rollout.num_servers",
        "spread": "rollout.tensor_parallel_size",
        "rewards": "reward.num_servers",
        "ranks": "learner.num_ranks",
    }
    return load_run_file(None, {"reward.num_workers": "2"} | {keys[name]: str(n) for name, n in counts.items()})


def test_the_default_run_fits_on_two_cores() -> None:
    bundles = plan_placement(_config(), ClusterFacts(num_cpus=2, num_gpus=0))

    assert [bundle.name for bundle in bundles] == ["rollout-0", "reward-0", "learner-0"]
    assert sum(bundle.num_cpus for bundle in bundles) <= 2
    assert all(bundle.num_gpus == 0 for bundle in bundles)


def test_a_large_machine_gives_whole_cores() -> None:
    bundles = plan_placement(_config(servers=2), ClusterFacts(num_cpus=64, num_gpus=0))

    assert [bundle.num_cpus for bundle in bundles] == [1.0, 1.0, 1.0, 1.0]


def test_every_gpu_process_gets_its_own_gpu_where_there_are_enough() -> None:
    bundles = plan_placement(_config(servers=1, spread=2, ranks=2), ClusterFacts(num_cpus=16, num_gpus=4))

    assert [(bundle.service, bundle.num_gpus) for bundle in bundles] == [
        (Service.ROLLOUT, 2.0),
        (Service.REWARD, 0.0),
        (Service.LEARNER, 1.0),
        (Service.LEARNER, 1.0),
    ]


def test_learner_and_server_share_a_single_gpu() -> None:
    bundles = plan_placement(_config(), ClusterFacts(num_cpus=16, num_gpus=1))

    assert [bundle.num_gpus for bundle in bundles] == [0.5, 0.0, 0.5]


def test_servers_that_span_gpus_never_share_them() -> None:
    with pytest.raises(UserError, match="3 GPUs are needed and the cluster has 2"):
        plan_placement(_config(spread=2), ClusterFacts(num_cpus=16, num_gpus=2))


def test_a_cluster_without_cores_is_refused() -> None:
    with pytest.raises(UserError, match="no core"):
        plan_placement(_config(), ClusterFacts(num_cpus=0, num_gpus=0))


@settings(max_examples=50, deadline=None)
@given(
    servers=st.integers(1, 9),
    rewards=st.integers(1, 4),
    ranks=st.integers(1, 8),
    num_cpus=st.integers(1, 32),
    num_gpus=st.integers(0, 8),
)
def test_a_plan_never_asks_for_more_than_there_is(
    servers: int, rewards: int, ranks: int, num_cpus: int, num_gpus: int
) -> None:
    config = _config(servers=servers, rewards=rewards, ranks=ranks)

    bundles = plan_placement(config, ClusterFacts(num_cpus=num_cpus, num_gpus=num_gpus))

    assert sum(bundle.num_cpus for bundle in bundles) <= num_cpus + 1e-9
    assert sum(bundle.num_gpus for bundle in bundles) <= num_gpus + 1e-9
    assert all(bundle.num_cpus > 0 for bundle in bundles)
