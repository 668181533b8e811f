"""The main job on real parts: Ray, vLLM, math-verify and DeepSpeed, a random tiny model, a few steps."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from learner.ledger_verdict import verify
from tests.end_to_end.training import Training, resume_training, start_training, still_running
from tests.models import save_tiny_qwen2

pytestmark = pytest.mark.timeout(600)

RUN_FILE = """
[run]
name = "test"
[model]
source = "{model}"
[data]
num_train = 64
num_held_out = 16
[learner]
num_steps = {num_steps}
prompts_per_step = 4
rollouts_per_prompt = 4
checkpoint_every_steps = 2
[rollout]
dtype = "float32"
context_length = 128
max_running_samples = 64
kv_cache_bytes = 33554432
[evaluation]
num_problems = 16
every_steps = 0
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    save_tiny_qwen2(tmp_path / "model")
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(model=tmp_path / "model", num_steps=6), encoding="utf-8")
    return file


@pytest.fixture
def trainings() -> Iterator[list[Training]]:
    started: list[Training] = []
    yield started
    for training in started:
        training.kill()


def test_a_run_trains_reports_and_leaves_nothing_behind(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start_training(str(run_file), runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_for_step(1)
    children = training.children()

    printed = training.finish()

    assert training.process.returncode == 0, printed
    assert still_running(children) == []
    report = json.loads((training.folder / "report.json").read_text())
    assert report["steps"] == 6
    assert report["samples_issued"] >= 6 * 4 * 4
    assert (report["samples_lost"], report["samples_trained_twice"]) == (0, 0)
    assert report["max_logprob_difference"] < 1e-4
    assert {"accuracy_before", "accuracy_after", "seconds_total", "steps_per_minute"} <= report.keys()
    assert [record["policy_version"] for record in training.steps()] == [1, 2, 3, 4, 5, 6]
    assert max(record["staleness_max"] for record in training.steps()) <= 1
    AutoModelForCausalLM.from_pretrained(training.folder / "export" / "step_6")


def test_a_killed_learner_resumes_with_nothing_lost_or_trained_twice(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start_training(str(run_file), "--learner.num_steps", "400", runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_for_step(5)

    training.service("learner").kill()
    printed = training.finish()

    assert training.process.returncode not in {0, 2}, printed
    assert "--resume" in printed
    done = training.steps()[-1]["step"]
    resumed = resume_training(training, "--learner.num_steps", str(done + 4))
    trainings.append(resumed)
    printed = resumed.finish()
    assert resumed.process.returncode == 0, printed
    assert [record["step"] for record in resumed.steps()] == list(range(1, done + 5))
    verdict = verify(training.folder / "ledger.sqlite")
    assert verdict.is_sound, verdict
    assert (verdict.lost, verdict.trained_twice) == (0, 0)


def test_ctrl_c_stops_with_a_checkpoint_and_says_how_to_go_on(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start_training(str(run_file), "--learner.num_steps", "400", runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_for_step(3)
    children = training.children()

    printed = training.interrupt()

    assert training.process.returncode == 128 + signal.SIGINT, printed
    assert "--resume" in printed
    assert still_running(children) == []
    last = training.steps()[-1]["step"]
    assert (training.folder / "checkpoints" / f"step_{last}" / "manifest.json").is_file()
    assert verify(training.folder / "ledger.sqlite").is_sound


def test_ctrl_c_while_the_services_start_leaves_nothing_behind(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start_training(str(run_file), runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_until(lambda: bool(training.services("learner")), what="the learner's process")
    children = training.children()

    printed = training.interrupt()

    assert training.process.returncode == 128 + signal.SIGINT, printed
    assert "--resume" in printed
    assert still_running(children) == []


def test_ctrl_c_during_an_evaluation_leaves_nothing_behind(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    # Long answers, a few at a time, so that it is still going on when the signal comes.
    slow = ("--evaluation.max_tokens", "300", "--evaluation.max_concurrent", "1", "--rollout.context_length", "512")
    training = start_training(str(run_file), *slow, runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_for_line("evaluating before training")
    children = training.children()

    printed = training.interrupt()

    assert training.process.returncode == 128 + signal.SIGINT, printed
    assert "--resume" in printed
    assert still_running(children) == []
    assert not (training.folder / "evaluations.jsonl").exists()


def test_a_run_goes_on_when_its_only_rollout_server_is_killed(
    run_file: Path, tmp_path: Path, trainings: list[Training]
) -> None:
    training = start_training(str(run_file), "--learner.num_steps", "60", runs=tmp_path / "runs")
    trainings.append(training)
    training.wait_for_step(5)

    training.service("rollout").kill()
    printed = training.finish()

    assert training.process.returncode == 0, printed
    assert "rollout-0 was killed by SIGKILL; it is started again" in printed
    assert "rollout-0 serves again" in printed
    assert [record["step"] for record in training.steps()] == list(range(1, 61))
    verdict = verify(training.folder / "ledger.sqlite")
    assert verdict.is_sound, verdict
    assert (verdict.lost, verdict.trained_twice) == (0, 0)
