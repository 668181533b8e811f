"""What a run leaves behind step by step: the learner's metrics.jsonl, read, and evaluations.jsonl, written and read."""

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from evaluation.accuracy import EvaluationResult

Moment = Literal["before", "during", "after"]


@dataclass(frozen=True, slots=True)
class ShownStep:
    """One line of metrics.jsonl, as far as it is shown or reported; see learner/run_log.py."""

    step: int
    policy_version: int
    time_unix: float
    reward_mean: float
    accuracy: float
    tokens: int
    tokens_per_second: float
    response_tokens_mean: float
    staleness_mean: float
    staleness_max: int
    max_logprob_difference: float | None
    wait_seconds: float
    train_seconds: float
    push_seconds: float
    checkpoint_seconds: float
    step_seconds: float
    samples_issued: int
    samples_dropped: int
    checkpoint_failures: int = 0

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads a line; what else it holds is left out."""
        values: dict[str, Any] = json.loads(line)
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One line of evaluations.jsonl."""

    moment: Moment
    """Before training, during or after it."""
    step: int
    """Optimizer steps done when it began."""
    time_unix: float
    result: EvaluationResult

    def line(self) -> str:
        """The record as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Reads a line."""
        values: dict[str, Any] = json.loads(line)
        result = values.pop("result")
        result["policy_versions"] = tuple(result["policy_versions"])
        return cls(**values, result=EvaluationResult(**result))


class StepFollower:
    """Reads metrics.jsonl while it grows; starts over when a learner has replaced the file, as on a resume."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new_records(self) -> list[ShownStep]:
        """The records that came since the last call; a line that is not complete yet waits for the next."""
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                complete, newline, _rest = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return [ShownStep.parse(line) for line in complete.decode("utf-8").splitlines() if line]


def read_steps(path: Path) -> list[ShownStep]:
    """Every step of a run in order; of one that was done again after a resume, the last record."""
    by_step = {record.step: record for record in StepFollower(path).new_records()}
    return [by_step[step] for step in sorted(by_step)]


def read_evaluations(path: Path) -> list[EvaluationRecord]:
    """Every evaluation of a run, in the order in which they ended."""
    try:
        lines: Iterable[str] = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [EvaluationRecord.parse(line) for line in lines if line]


def append_evaluation(path: Path, record: EvaluationRecord) -> None:
    """Adds an evaluation.

    Raises:
        OSError: It could not be written; the file is what it was.
    """
    line = record.line().encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        # Short where room ends within the line.
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
