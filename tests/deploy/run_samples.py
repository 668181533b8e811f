"""Made-up records of a run."""

import json
from dataclasses import asdict
from pathlib import Path

from deploy.run_records import EvaluationRecord, Moment, ShownStep
from evaluation.accuracy import EvaluationResult


def step_record(step: int, **changes: float) -> ShownStep:
    """A step that took 0.5 s."""
    values = {
        "step": step,
        "policy_version": step,
        "time_unix": 1000.0 + 0.5 * step,
        "reward_mean": 0.5,
        "accuracy": 0.5,
        "tokens": 500,
        "tokens_per_second": 1000.0,
        "response_tokens_mean": 4.0,
        "staleness_mean": 1.0,
        "staleness_max": 1,
        "max_logprob_difference": 1e-6 * step,
        "wait_seconds": 0.2,
        "train_seconds": 0.2,
        "push_seconds": 0.1,
        "checkpoint_seconds": 0.0,
        "step_seconds": 0.5,
        "samples_issued": 128 * step,
        "samples_dropped": 0,
    }
    return ShownStep(**(values | changes))  # type: ignore[arg-type]


def metrics_line(record: ShownStep) -> str:
    """A line as the learner writes it, with what else stands in it."""
    return json.dumps(asdict(record) | {"loss": 0.1, "is_skipped": False}) + "\n"


def write_metrics(path: Path, records: list[ShownStep]) -> None:
    """A metrics.jsonl."""
    path.write_text("".join(map(metrics_line, records)), encoding="utf-8")


def evaluation_record(moment: Moment, *, step: int, accuracy: float) -> EvaluationRecord:
    """An evaluation of 100 problems."""
    result = EvaluationResult(
        accuracy=accuracy,
        standard_error=0.05,
        num_correct=round(100 * accuracy),
        num_problems=100,
        num_unscored=0,
        policy_versions=(step, step),
        response_tokens_mean=4.0,
        seconds=1.0,
        accuracy_by_kind={"sum": accuracy},
    )
    return EvaluationRecord(moment=moment, step=step, time_unix=1000.0 + step, result=result)
