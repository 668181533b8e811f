"""A disk that fills during a run: an alarm, the checkpoint before stays, training goes on, and all is well later."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.ledger_verdict import verify
from tests.end_to_end.test_train import RUN_FILE
from tests.end_to_end.training import Training, resume_training, start_training
from tests.models import save_tiny_qwen2
from tests.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.timeout(300)

DISK_BYTES = 80 << 20
FAILURES = "tandem_learner_checkpoint_failures_total"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        yield disk


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    save_tiny_qwen2(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(model=tmp_path / "model", num_steps=60), encoding="utf-8")
    return str(file)


@pytest.fixture
def trainings() -> Iterator[list[Training]]:
    started: list[Training] = []
    yield started
    for training in started:
        training.kill()


def start(run_file: str, disk: SmallDisk, *arguments: str, output: Path) -> Training:
    return start_training(run_file, *arguments, runs=disk.folder / "runs", output=output)


def checkpoints(training: Training) -> list[int]:
    """Steps of the whole ones."""
    found = training.folder.glob("checkpoints/step_*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step_")) for path in found)


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_alone(
    run_file: str, disk: SmallDisk, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start(run_file, disk, output=tmp_path / "printed.txt")
    trainings.append(training)
    training.wait_for_step(4)
    disk.fill()
    kept = checkpoints(training)
    training.wait_for_line("the disk of the run folder is nearly full")
    training.wait_until(lambda: training.metric(FAILURES) >= 2, what="a second checkpoint that fails")
    disk.free()

    printed = training.finish()

    assert training.process.returncode == 0, printed
    assert "ALARM: the checkpoint of step" in printed
    assert "the disk of the run folder has room again" in printed
    assert [record["step"] for record in training.steps()] == list(range(1, 61))
    assert training.steps()[-1]["checkpoint_failures"] >= 2
    assert kept
    assert checkpoints(training) == [58, 60]
    assert not list(training.folder.glob("**/*.part"))
    verdict = verify(training.folder / "ledger.sqlite")
    assert verdict.is_sound, verdict
    assert (verdict.open, verdict.lost, verdict.trained_twice) == (0, 0, 0)


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_end_fails_the_run_in_one_line_and_a_resume_mends_it(
    run_file: str, disk: SmallDisk, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start(run_file, disk, "--learner.num_steps", "20", output=tmp_path / "printed.txt")
    trainings.append(training)
    training.wait_for_step(4)
    disk.fill()
    kept = checkpoints(training)

    printed = training.finish()

    assert training.process.returncode == 1, printed
    assert "Traceback" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("tandem: learner-0 ended with exit code 1")
    assert f"kept: the checkpoint of step {kept[-1]}; go on with: " in last
    assert checkpoints(training) == kept
    disk.free()
    resumed = resume_training(training)
    trainings.append(resumed)
    printed = resumed.finish()
    assert resumed.process.returncode == 0, printed
    assert [record["step"] for record in resumed.steps()] == list(range(1, 21))
    verdict = verify(training.folder / "ledger.sqlite")
    assert verdict.is_sound, verdict
    assert (verdict.open, verdict.lost, verdict.trained_twice) == (0, 0, 0)
