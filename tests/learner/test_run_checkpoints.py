"""A run is taken up where its newest checkpoint left it: weights, step, prompts."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.assignment import LearnerAssignment
from learner.config import LearnerSettings
from learner.prompts import PromptSource
from learner.ranks import Leader
from learner.run_checkpoints import RunCheckpoints
from runtime.problems.problem import Problem

PROBLEMS = tuple(Problem(f"problem-{number}", str(number), "7", "sum") for number in range(10))


@pytest.fixture
def assignment(model_folder: Path, tmp_path: Path) -> LearnerAssignment:
    return LearnerAssignment(
        run_id="run",
        run_folder=tmp_path,
        model_folder=model_folder,
        seed=1,
        settings=LearnerSettings(checkpoints_kept=2),
        problems=PROBLEMS,
        num_rollout_servers=1,
        num_reward_servers=1,
        resume=True,
    )


def prompts_of(assignment: LearnerAssignment) -> PromptSource:
    return PromptSource(assignment.problems, encode=lambda text: [int(text)], seed=assignment.seed)


def checkpoints_of(assignment: LearnerAssignment, leader: Leader) -> RunCheckpoints:
    return RunCheckpoints(assignment, leader=leader, prompts=prompts_of(assignment))


def names(assignment: LearnerAssignment) -> list[str]:
    return sorted(path.name for path in (assignment.run_folder / "checkpoints").iterdir())


def weights(leader: Leader) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in leader.parameters_for_push()}


@contextmanager
def no_room() -> Iterator[None]:
    """A file may not grow past 64 KiB, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_a_checkpoint_a_run_begins_at_the_beginning(assignment: LearnerAssignment, leader: Leader) -> None:
    assert checkpoints_of(assignment, leader).begin() == 0


def test_a_resume_has_the_step_the_weights_and_the_prompts_in_flight(
    assignment: LearnerAssignment, leader: Leader
) -> None:
    prompts = prompts_of(assignment)
    issued = [prompts.next() for _ in range(5)]
    for prompt in (issued[0], issued[3]):
        prompts.mark_done(prompt.position)
    saved = weights(leader)
    assert RunCheckpoints(assignment, leader=leader, prompts=prompts).save(7, samples_issued=40)
    with torch.no_grad():
        for _name, parameter in leader.parameters_for_push():
            parameter.add_(1)
    again = prompts_of(assignment)

    step = RunCheckpoints(assignment, leader=leader, prompts=again).begin()

    assert step == 7
    assert [again.next() for _ in range(4)] == [issued[1], issued[2], issued[4], prompts.next()]
    for name, tensor in weights(leader).items():
        assert torch.equal(tensor, saved[name]), name


def test_the_newest_is_taken_and_old_ones_are_pruned(assignment: LearnerAssignment, leader: Leader) -> None:
    checkpoints = checkpoints_of(assignment, leader)
    for step in (1, 2, 3):
        assert checkpoints.save(step, samples_issued=0)

    assert names(assignment) == ["step_2", "step_3"]
    assert checkpoints_of(assignment, leader).begin() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"settings": LearnerSettings(num_ranks=2)},
            r"learner.num_ranks = 2: the checkpoint was written by 1",
        ),
        ({"run_id": "other"}, "run_id = other: the checkpoint belongs to"),
        ({"resume": False}, "holds checkpoints of a run; resume it, or choose another folder"),
        ({"seed": 2}, "seed = 1 in the checkpoint: must be 2, as in this run"),
        ({"problems": PROBLEMS[:9]}, "num_problems = 10 in the checkpoint: must be 9, as in this run"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_both_values(
    assignment: LearnerAssignment, leader: Leader, change: dict[str, Any], message: str
) -> None:
    assert checkpoints_of(assignment, leader).save(1, samples_issued=0)
    other = replace(assignment, **change)

    with pytest.raises(ValueError, match=message):
        checkpoints_of(other, leader).begin()


def test_what_is_damaged_and_newer_goes_when_a_run_is_resumed(assignment: LearnerAssignment, leader: Leader) -> None:
    for step in (1, 2):
        assert checkpoints_of(assignment, leader).save(step, samples_issued=0)
    (assignment.run_folder / "checkpoints" / "step_2" / "progress.json").unlink()

    assert checkpoints_of(assignment, leader).begin() == 1

    assert names(assignment) == ["step_1"]


def test_a_full_disk_keeps_the_one_before(assignment: LearnerAssignment, leader: Leader) -> None:
    checkpoints = checkpoints_of(assignment, leader)
    assert checkpoints.save(1, samples_issued=0)

    with no_room():
        assert not checkpoints.save(2, samples_issued=0)

    assert names(assignment) == ["step_1"]
    assert checkpoints_of(assignment, leader).begin() == 1
    assert checkpoints.save(3, samples_issued=0)


def test_the_export_is_a_model_that_loads(assignment: LearnerAssignment, leader: Leader) -> None:
    checkpoints_of(assignment, leader).export(3)

    model = AutoModelForCausalLM.from_pretrained(assignment.run_folder / "export" / "step_3")

    exported = dict(model.named_parameters())
    for name, tensor in weights(leader).items():
        assert torch.equal(exported[name], tensor), name
