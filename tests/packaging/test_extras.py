"""The wheel has what it needs, and the small extras bring what they promise and no more.

The large ones (learner, rollout-cpu, cpu) are gigabytes: `make test-packaging` runs them.
"""

import zipfile
from pathlib import Path

import pytest

from reward_service.client import RewardClient, RewardItem
from reward_service.outcome import Outcome
from tests.packaging.environments import ROOT, Environment, IndexOutOfReachError, build_wheel, make_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAVY = ("torch", "vllm", "ray", "deepspeed", "transformers")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def environment_of(extra: str, *, wheel: Path, folder: Path) -> Environment:
    try:
        return make_environment(folder, wheel=wheel, extra=extra)
    except IndexOutOfReachError as error:
        pytest.skip(f"the package index is out of reach: {error}")


@pytest.fixture(scope="module")
def reward(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment_of("reward", wheel=wheel, folder=tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def evaluation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return environment_of("eval", wheel=wheel, folder=tmp_path_factory.mktemp("eval"))


def test_the_wheel_has_run_files_and_templates_and_no_tests(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())

    expected = [
        path.relative_to(ROOT).as_posix()
        for folder in ("deploy/runs", "runtime/problems/templates")
        for path in (ROOT / folder).glob("*.toml")
    ]
    assert expected
    assert files >= {*expected, "protos/reward/v1/reward.proto"}
    assert not [name for name in files if name.startswith(("tests/", "benchmarks/"))]


@pytest.mark.parametrize("module", HEAVY)
def test_a_reward_node_has_no_heavy_package(reward: Environment, module: str) -> None:
    assert not reward.has(module)


async def test_a_reward_node_serves_and_grades(reward: Environment) -> None:
    with reward.serving("reward", ROOT / "deploy/runs/tiny.toml", "--reward.listen.port", "0") as ready:
        client = RewardClient(token=None)
        try:
            await client.add_server(ready.address)
            items = [RewardItem(item_id="1", completion=r"\boxed{\frac{1}{2}}", reference_answer="0.5")]
            scores = await client.score(items, timeout_seconds=30)
        finally:
            await client.close()

    assert [score.outcome for score in scores] == [Outcome.CORRECT]


@pytest.mark.parametrize(
    ("service", "extra"), [("rollout", "rollout-cpu or rollout-gpu"), ("learner", "the extra learner")]
)
def test_a_service_without_its_extra_ends_with_the_line_that_names_it(
    reward: Environment, service: str, extra: str
) -> None:
    ended = reward.tandem("serve", service, "--run-folder", "run")

    assert ended.returncode == 2, ended.stderr
    assert f"serve {service}: " in ended.stderr
    assert extra in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_training_without_its_extra_names_it(reward: Environment) -> None:
    ended = reward.tandem("train", ROOT / "deploy/runs/tiny.toml")

    assert ended.returncode == 2
    assert "train: rich is not installed: install the extra deploy" in ended.stderr


def test_evaluation_imports_without_a_heavy_package(evaluation: Environment) -> None:
    imported = evaluation.run("-c", "import evaluation.accuracy, rollout_server.client, reward_service.client")

    assert imported.returncode == 0, imported.stderr
    assert not [module for module in (*HEAVY, "math_verify") if evaluation.has(module)]
