"""metrics.jsonl: a line a step, none of a step that a resume makes again."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from deploy.run_records import ShownStep, read_steps
from learner.ledger import LedgerCounts
from learner.policy import UpdateReport
from learner.records import Prompt, ScoredGroup, ScoredRollout
from learner.run_log import GroupFigures, RunLog, StepClock, StepRecord

REPORT = UpdateReport(
    is_applied=True,
    policy_version=5,
    loss=0.25,
    grad_norm=0.5,
    clip_share=0.1,
    truncated_share=0.2,
    mismatch_kl=1e-4,
    max_logprob_difference=None,
    num_tokens=6,
    learning_rate=1e-3,
)
COUNTS = LedgerCounts(
    issued=40, trained=20, dropped={"stale": 3, "reward_error": 2}, failed={"refused": 4}, open=11, ended_twice=0
)


def rollout(version: int, *, num_tokens: int, outcome: str, reward: float) -> ScoredRollout:
    return ScoredRollout(
        sample_id=f"{version}-{num_tokens}",
        token_ids=(1,) * num_tokens,
        behaviour_logprobs=(-0.5,) * num_tokens,
        version_spans=((0, version), (1, version + 1)),
        finish_reason="stop",
        reward=reward,
        outcome=outcome,
        advantage=0.0,
    )


def groups() -> list[ScoredGroup]:
    prompt = Prompt("e0-p0", 0, "problem", (1, 2), "7")
    rollouts = (
        rollout(4, num_tokens=2, outcome="correct", reward=1.0),
        rollout(2, num_tokens=4, outcome="no_answer", reward=0.0),
    )
    return [ScoredGroup("1-e0-p0", prompt, rollouts)]


def record(step: int = 5) -> StepRecord:
    clock = StepClock()
    clock.figures = GroupFigures.of(groups(), policy_version=4)
    with clock.phase("wait"):
        pass
    return clock.record(replace(REPORT, policy_version=step), COUNTS)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path: Path, *steps: int) -> None:
    log = RunLog(path, start_step=0)
    for step in steps:
        log.record(record(step))


def test_a_record_sums_groups_and_report_up() -> None:
    made = record()

    assert (made.step, made.policy_version, made.loss, made.learning_rate) == (5, 5, 0.25, 1e-3)
    assert (made.reward_mean, made.accuracy, made.num_rollouts) == (0.5, 0.5, 2)
    assert (made.tokens, made.response_tokens_mean) == (6, 3.0)
    assert (made.staleness_mean, made.staleness_max) == (1.0, 2)
    assert (made.samples_issued, made.samples_dropped) == (40, 9)
    assert made.max_logprob_difference is None


def test_time_is_booked_under_its_phase_until_the_clock_restarts() -> None:
    clock = StepClock()
    clock.figures = GroupFigures.of(groups(), policy_version=4)
    with clock.phase("train"):
        pass
    with clock.phase("train"):
        pass

    made = clock.record(REPORT, COUNTS)

    assert 0 < made.train_seconds <= made.step_seconds
    assert (made.wait_seconds, made.push_seconds, made.checkpoint_seconds) == (0, 0, 0)
    clock.restart()
    assert clock.record(REPORT, COUNTS).train_seconds == 0


def test_the_log_has_what_is_shown_and_reported(tmp_path: Path) -> None:
    made = record()
    RunLog(tmp_path / "metrics.jsonl", start_step=0).record(made)

    (read,) = read_steps(tmp_path / "metrics.jsonl")

    assert read == ShownStep(**{field.name: getattr(made, field.name) for field in fields(ShownStep)})


def test_a_resume_cuts_off_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)

    RunLog(path, start_step=2).record(record(3))

    assert steps_in(path) == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", [b'{"step": 3, "poli', b"{", b"\x00\x00\x00", b"\xff\xfe", b"3", b"[]", b'{"a": 1}'])
def test_a_resume_cuts_off_a_torn_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(tail)

    RunLog(path, start_step=2).record(record(3))

    assert steps_in(path) == [1, 2, 3]


def test_a_run_from_the_beginning_begins_its_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)

    RunLog(path, start_step=0)

    assert path.read_text() == ""


def test_the_gauges_show_the_last_step(tmp_path: Path) -> None:
    RunLog(tmp_path / "metrics.jsonl", start_step=0).record(replace(record(9), max_logprob_difference=1e-6))

    assert REGISTRY.get_sample_value("tandem_learner_step") == 9
    assert REGISTRY.get_sample_value("tandem_learner_accuracy_ratio") == 0.5
    assert REGISTRY.get_sample_value("tandem_learner_max_logprob_difference") == 1e-6
