"""The problems of a run."""

import json
from pathlib import Path

import pytest

from deploy.data import load_problems
from deploy.errors import UserError
from deploy.run_file import DataSection


def _write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _row(index: int) -> dict[str, str]:
    return {"prompt": f"What is {index}?", "answer": str(index)}


def test_arithmetic_gives_as_many_problems_as_are_wanted() -> None:
    problems = load_problems(DataSection(num_train=10, num_held_out=5), seed=3)

    assert (len(problems.train), len(problems.held_out)) == (10, 5)


def test_the_last_rows_of_a_file_are_held_out(tmp_path: Path) -> None:
    source = _write(tmp_path / "own.jsonl", [_row(index) for index in range(6)])

    problems = load_problems(DataSection(source=source, num_train=100, num_held_out=2), seed=1)

    assert [problem.answer for problem in problems.train] == ["0", "1", "2", "3"]
    assert [problem.answer for problem in problems.held_out] == ["4", "5"]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([_row(0), {"prompt": "x"}], r'own\.jsonl:2: has no text in "answer"'),
        ([["x"]], r'own\.jsonl:1: has no text in "prompt"'),
        ([_row(0)], r"data\.num_held_out = 2: must be fewer than the 1 problems"),
    ],
)
def test_a_bad_file_is_said_in_one_line(tmp_path: Path, rows: list[object], line: str) -> None:
    source = _write(tmp_path / "own.jsonl", rows)

    with pytest.raises(UserError, match=line):
        load_problems(DataSection(source=source, num_held_out=2), seed=1)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match=r"data\.source = nowhere\.jsonl: No such file"):
        load_problems(DataSection(source="nowhere.jsonl"), seed=1)
