"""A disk that fills while a run goes on: what was kept stays, accounts stay right, and all goes on with room."""

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.assignment import LearnerAssignment
from learner.checkpoint import newest_complete
from learner.config import LearnerSettings
from learner.ledger import Ledger, LedgerUnwritableError, SampleText
from learner.ledger_verdict import verify
from learner.prompts import PromptSource
from learner.ranks import Leader
from learner.run_checkpoints import RunCheckpoints
from learner.run_log import RunLog
from runtime.disk import NotWrittenError
from runtime.problems.problem import Problem
from tests.learner.test_ledger import issue, train
from tests.learner.test_run_log import record, steps_in
from tests.small_disk import SmallDisk, small_disk

PROBLEMS = (Problem("problem", "1", "7", "sum"),)
DISK_BYTES = 20 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        yield disk


@pytest.fixture
def assignment(model_folder: Path, disk: SmallDisk) -> LearnerAssignment:
    return LearnerAssignment(
        run_id="run",
        run_folder=disk.folder,
        model_folder=model_folder,
        seed=1,
        settings=LearnerSettings(checkpoints_kept=2),
        problems=PROBLEMS,
        num_rollout_servers=1,
        num_reward_servers=1,
        resume=True,
    )


def checkpoints_of(assignment: LearnerAssignment, leader: Leader) -> RunCheckpoints:
    prompts = PromptSource(assignment.problems, encode=lambda text: [int(text)], seed=assignment.seed)
    return RunCheckpoints(assignment, leader=leader, prompts=prompts)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("left", [0, 8 << 10, 100 << 10, 1 << 20])
def test_a_checkpoint_without_room_leaves_the_one_before_and_nothing_of_itself(
    disk: SmallDisk, assignment: LearnerAssignment, leader: Leader, left: int
) -> None:
    checkpoints = checkpoints_of(assignment, leader)
    assert checkpoints.save(1, samples_issued=0)
    disk.fill(leave_bytes=left)

    assert not checkpoints.save(2, samples_issued=0)

    assert checkpoints.num_failures == 1
    assert names(disk.folder / "checkpoints") == ["step_1"]
    disk.free()
    assert checkpoints.save(3, samples_issued=0)
    assert names(disk.folder / "checkpoints") == ["step_1", "step_3"]
    found = newest_complete(disk.folder)
    assert found is not None
    assert found.progress.step == 3


def test_where_space_is_short_the_oldest_goes_first(
    disk: SmallDisk, assignment: LearnerAssignment, leader: Leader
) -> None:
    checkpoints = checkpoints_of(assignment, leader)
    for step in (1, 2):
        assert checkpoints.save(step, samples_issued=0)
    disk.fill(leave_bytes=2 << 20)

    assert checkpoints.save(3, samples_issued=0)

    assert names(disk.folder / "checkpoints") == ["step_2", "step_3"]


def test_nothing_is_deleted_where_that_would_not_be_enough(
    disk: SmallDisk, assignment: LearnerAssignment, leader: Leader
) -> None:
    checkpoints = checkpoints_of(assignment, leader)
    for step in (1, 2):
        assert checkpoints.save(step, samples_issued=0)
    disk.fill()

    assert not checkpoints.save(3, samples_issued=0)

    assert names(disk.folder / "checkpoints") == ["step_1", "step_2"]


def test_the_policy_goes_on_after_a_state_that_could_not_be_written(
    disk: SmallDisk, assignment: LearnerAssignment, leader: Leader
) -> None:
    disk.fill(leave_bytes=64 << 10)
    before = {name: tensor.clone() for name, tensor in leader.parameters_for_push()}

    assert not checkpoints_of(assignment, leader).save(1, samples_issued=0)

    for name, tensor in leader.parameters_for_push():
        assert torch.equal(tensor, before[name]), name


def test_an_export_without_room_leaves_nothing_and_says_so(
    disk: SmallDisk, assignment: LearnerAssignment, leader: Leader
) -> None:
    disk.fill(leave_bytes=200 << 10)

    with pytest.raises(NotWrittenError, match=r"the export of step 3 could not be written: .*No space left"):
        checkpoints_of(assignment, leader).export(3)

    assert names(disk.folder / "export") == []


def test_the_ledger_holds_what_it_cannot_write_and_loses_nothing(disk: SmallDisk) -> None:
    path = disk.folder / "ledger.sqlite"
    ledger = Ledger(path, start_step=0)
    train(ledger, issue(ledger, position=0), step=1)
    ledger.sync()
    disk.fill()

    for position in range(1, 401):
        samples = issue(ledger, position=position, size=8)
        ledger.keep_texts([SampleText(sample, "prompt", "completion", [1, 2]) for sample in samples])
        train(ledger, samples, step=position + 1)
    in_flight = issue(ledger, position=401)
    with pytest.raises(LedgerUnwritableError, match="database or disk is full"):
        ledger.sync()

    counts = ledger.counts()
    assert (counts.issued, counts.trained, counts.open, counts.ended_twice) == (3204, 3202, 2, 0)
    assert verify(path).is_sound
    disk.free()
    ledger.sync()
    ledger.end_dropped(in_flight, reason="stale")
    ledger.close_run()
    verdict = verify(path)
    assert verdict.is_sound, verdict
    assert (verdict.issued, verdict.trained, verdict.dropped, verdict.open) == (3204, 3202, {"stale": 2}, 0)


def test_a_run_that_dies_while_its_ledger_is_behind_is_resumed_with_sound_accounts(disk: SmallDisk) -> None:
    path = disk.folder / "ledger.sqlite"
    first = Ledger(path, start_step=0)
    train(first, issue(first, position=0), step=1)
    first.sync()
    left_open = issue(first, position=1)
    disk.fill()
    train(first, left_open, step=2)
    for position in range(2, 100):
        train(first, issue(first, position=position, size=8), step=position + 1)
    with pytest.raises(LedgerUnwritableError):
        first.close_run()
    assert verify(path).is_sound

    disk.free()
    second = Ledger(path, start_step=1)
    train(second, issue(second, position=1), step=2)
    second.close_run()

    verdict = verify(path)
    assert verdict.is_sound, verdict
    assert verdict.trained == 4
    assert (verdict.open, verdict.lost, verdict.trained_twice) == (0, 0, 0)


def test_a_ledger_that_cannot_be_begun_is_said_in_one_line(disk: SmallDisk) -> None:
    disk.fill()

    with pytest.raises(ValueError, match=r"ledger\.sqlite: cannot be written: "):
        Ledger(disk.folder / "ledger.sqlite", start_step=0)


def test_a_ledger_holds_no_more_than_memory_has_room_for(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.ledger.MAX_UNWRITTEN_ROWS", 50)
    monkeypatch.setattr("learner.ledger._RETRY_SECONDS", 0.0)
    ledger = Ledger(disk.folder / "ledger.sqlite", start_step=0)
    disk.fill()

    def issue_many() -> None:
        for position in range(100):
            issue(ledger, position=position, size=64)

    with pytest.raises(LedgerUnwritableError):
        issue_many()


def test_a_mistake_is_no_full_disk(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", start_step=0)
    issue(ledger, position=0)
    with pytest.raises(sqlite3.IntegrityError):
        issue(ledger, position=0)

    ledger.sync()
    issue(ledger, position=1)
    ledger.close_run()

    assert verify(tmp_path / "ledger.sqlite").issued == 4


def test_metrics_wait_for_room(disk: SmallDisk) -> None:
    log = RunLog(disk.folder / "metrics.jsonl", start_step=0)
    log.record(record(1))
    disk.fill()
    for step in range(2, 60):
        log.record(replace(record(step), checkpoint_failures=1))
    disk.free()
    log.close()

    assert steps_in(disk.folder / "metrics.jsonl") == list(range(1, 60))
