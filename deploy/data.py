"""The problems of a run: made on the spot, or read from the user's file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import UserError
from deploy.run_file import DataSection
from runtime.problems.arithmetic import arithmetic_problems
from runtime.problems.problem import Problem

ARITHMETIC = "arithmetic"


@dataclass(frozen=True, slots=True)
class RunProblems:
    """What a run trains on, and what it is tested on; no problem is in both."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def load_problems(settings: DataSection, *, seed: int) -> RunProblems:
    """Makes or reads the problems; the same settings and seed give the same.

    Raises:
        UserError: The file cannot be read, a line of it is no problem, or there are too few.
    """
    if settings.source == ARITHMETIC:
        try:
            made = arithmetic_problems(seed=seed, num_train=settings.num_train, num_held_out=settings.num_held_out)
        except ValueError as error:
            raise UserError(f"data: {error}") from error
        return RunProblems(train=made.train, held_out=made.held_out)
    problems = list(_read(Path(settings.source).expanduser()))
    num_train = min(settings.num_train, len(problems) - settings.num_held_out)
    if num_train < 1:
        raise UserError(
            f"data.num_held_out = {settings.num_held_out}: must be fewer than the {len(problems)} problems "
            f"of {settings.source}"
        )
    held_out = problems[len(problems) - settings.num_held_out :]
    return RunProblems(train=tuple(problems[:num_train]), held_out=tuple(held_out))


def _read(path: Path) -> Iterator[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no UTF-8 text"
        raise UserError(f"data.source = {path}: {reason}; give a JSONL file, or `{ARITHMETIC}`") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: is no JSON: {error}") from error
        for column in ("prompt", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                raise UserError(f'{path}:{number}: has no text in "{column}"')
        yield Problem(
            problem_id=f"{path.stem}-{number}",
            prompt=row["prompt"],
            answer=row["answer"],
            kind=str(row.get("kind", "")),
        )
