"""Records of a run: read while they grow, and after a resume."""

from pathlib import Path

from deploy.run_records import StepFollower, append_evaluation, read_evaluations, read_steps
from tests.deploy.run_samples import evaluation_record, metrics_line, step_record, write_metrics


def test_a_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = StepFollower(path)
    line = metrics_line(step_record(1))

    before = follower.new_records()
    path.write_text(line[:20], encoding="utf-8")
    half = follower.new_records()
    path.write_text(line, encoding="utf-8")

    assert (before, half) == ([], [])
    assert follower.new_records() == [step_record(1)]
    assert follower.new_records() == []


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path, part = tmp_path / "metrics.jsonl", tmp_path / "metrics.part"
    write_metrics(path, [step_record(1), step_record(2)])
    follower = StepFollower(path)
    follower.new_records()

    write_metrics(part, [step_record(1)])
    part.replace(path)

    assert follower.new_records() == [step_record(1)]


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    again = step_record(2, reward_mean=0.9)
    write_metrics(path, [step_record(1), step_record(2), again])

    assert read_steps(path) == [step_record(1), again]


def test_evaluations_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    record = evaluation_record("during", step=50, accuracy=0.5)

    append_evaluation(path, record)

    assert read_evaluations(path) == [record]
    assert read_evaluations(tmp_path / "none.jsonl") == []
