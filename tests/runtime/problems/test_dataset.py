"""From rows to problems: columns, what is left out, ids and kinds."""

from typing import Any

import pytest

from runtime.problems.columns import ColumnNames
from runtime.problems.dataset import ReadProblems, Refused, read_problems
from runtime.problems.rows import DataError, Table, read_file
from tests.shared_data import shared_file


def _table(rows: list[dict[str, Any]]) -> Table:
    columns = dict.fromkeys(column for row in rows for column in row)
    return Table("own", "own", "row", tuple(columns), lambda _wanted: enumerate(rows, start=1))


def _read(rows: list[dict[str, Any]], **names: str) -> ReadProblems:
    return read_problems(_table(rows), columns=ColumnNames(**names), answer_form="auto", max_answer_chars=50)


def _row(index: int, **more: Any) -> dict[str, Any]:
    return {"question": f"q{index}", "answer": str(index)} | more


def test_rows_that_cannot_be_used_are_left_out_with_their_numbers() -> None:
    rows = [_row(1), _row(2, answer=""), _row(3, answer=None), _row(4, question=" "), _row(5, answer="9" * 51)]

    read = _read([*rows, *(_row(index) for index in range(6, 12))])

    assert read.refused == (
        Refused("an answer that is too long", (5,)),
        Refused("no answer", (2, 3)),
        Refused("no question", (4,)),
    )
    assert [problem.answer for problem in read.problems] == ["1", "6", "7", "8", "9", "10", "11"]
    assert read.num_rows == 11


def test_the_first_of_equal_questions_is_kept_and_contradictions_are_counted() -> None:
    read = _read([_row(1), _row(1), _row(2), {"question": " q1\n", "answer": "7"}])

    assert [problem.answer for problem in read.problems] == ["1", "2"]
    assert (read.duplicates, read.contradictions) == ((2, 4), (4,))


@pytest.mark.parametrize(
    ("rows", "names", "line"),
    [
        ([{"question": "q", "label": "1"}], {}, r"own: has none of the columns answer.*columns are question, label"),
        ([_row(1)], {"answer": "label"}, r"own: has no column label; its columns are question, answer; set answer_col"),
        (
            [_row(1), _row(2, answer=""), _row(3, answer="")],
            {},
            r"2 of 3 rows have no answer in column answer \(rows 2",
        ),
        ([_row(1), _row(2, x="1"), _row(3)], {"problem_id": "x"}, r"the ids of id_column must be distinct"),
        ([_row(1, answer=""), _row(2, question="")], {}, r"none of its 2 rows has both"),
    ],
)
def test_a_table_that_is_not_what_was_meant_is_refused(
    rows: list[dict[str, Any]], names: dict[str, str], line: str
) -> None:
    with pytest.raises(DataError, match=line):
        _read(rows, **names)


def test_columns_can_be_named() -> None:
    rows = [{"q": f"q{index}", "a": index, "k": f"k{index}", "key": f"id{index}"} for index in range(30)]

    problem = _read(rows, question="q", answer="a", kind="k", problem_id="key").problems[3]

    assert (problem.problem_id, problem.prompt, problem.answer, problem.kind) == ("id3", "q3", "3", "k3")


def test_ids_that_are_not_distinct_and_kinds_that_are_too_many_are_not_guessed() -> None:
    problems = _read([_row(index, id="same", level=index, type="T") for index in range(30)]).problems

    assert (problems[2].problem_id, problems[2].kind) == ("own-3", "T")


@pytest.mark.parametrize(
    ("name", "num_problems", "answer"),
    [
        ("amc23.jsonl", 40, "27"),
        ("minerva_math.jsonl", 272, "1.6"),
        ("olympiadbench.jsonl", 675, "2"),
        ("math500.jsonl", 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),
        ("math_train_7474_with_level.json", 7470, "0"),
    ],
)
def test_public_sets_are_read_as_they_are(name: str, num_problems: int, answer: str) -> None:
    table = read_file(shared_file(name))

    read = read_problems(table, columns=ColumnNames(), answer_form="auto", max_answer_chars=2_000)

    # Some of these sets hold a question twice.
    assert len(read.problems) + len(read.duplicates) == num_problems
    assert read.problems[0].answer == answer
