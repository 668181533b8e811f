"""From rows to problems: what is left out and why, what is there twice, all with row numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from runtime.problems.columns import ChosenColumns, ColumnNames, choose_columns, shown_columns
from runtime.problems.forms import AnswerForm, reference_answer, value_text
from runtime.problems.problem import Problem
from runtime.problems.rows import DataError, Row, Table

NO_QUESTION = "no question"
NO_ANSWER = "no answer"
LONG_ANSWER = "an answer that is too long"

_NUM_SHOWN = 5
_MAX_KINDS = 20
"""A column with more values than this that nobody asked for says something else than the kind."""
_MAX_ID_CHARS = 80


@dataclass(frozen=True, slots=True)
class Refused:
    """Rows that are left out for one reason.

    Attributes:
        reason: What they have, to go after "rows have".
        numbers: Their numbers, ascending.
    """

    reason: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadProblems:
    """The problems of a table, and what became of its other rows.

    Attributes:
        name: The table's name.
        unit: "line" or "row", which the numbers count.
        problems: In the order of the rows; no question is there twice.
        num_rows: Rows of the table.
        refused: Rows without a question or a usable answer.
        duplicates: Numbers of the rows whose question an earlier row has; they are left out.
        contradictions: Those of the duplicates whose answer is another than the earlier row's.
    """

    name: str
    unit: str
    problems: tuple[Problem, ...]
    num_rows: int
    refused: tuple[Refused, ...]
    duplicates: tuple[int, ...]
    contradictions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is wanted of one row."""

    number: int
    question: str
    answer: str
    kinds: tuple[str, ...]
    problem_ids: tuple[str, ...]


def read_problems(
    table: Table, *, columns: ColumnNames, answer_form: AnswerForm, max_answer_chars: int
) -> ReadProblems:
    """Makes problems of rows; those that cannot be used are left out and counted.

    Args:
        table: The rows.
        columns: Which column is what.
        answer_form: Where the answer stands in its column.
        max_answer_chars: Longest answer that the reward service takes.

    Raises:
        DataError: A column is not there, more than half of the rows have no question or no usable answer, which is
            likelier a wrong column, or ids that were asked for are there twice.
    """
    chosen = choose_columns(table, columns)
    num_rows = 0
    kept: dict[str, _Parts] = {}
    refused: dict[str, list[int]] = {}
    duplicates: list[int] = []
    contradictions: list[int] = []
    for number, row in table.read(chosen.all_names):
        num_rows += 1
        parts = _parts(number, row, chosen=chosen, form=answer_form)
        reason = _refusal(parts, max_answer_chars=max_answer_chars)
        if reason:
            refused.setdefault(reason, []).append(number)
            continue
        first = kept.setdefault(parts.question.strip(), parts)
        if first is not parts:
            duplicates.append(number)
            if first.answer != parts.answer:
                contradictions.append(number)
    result = ReadProblems(
        name=table.name,
        unit=table.unit,
        problems=_problems(table, tuple(kept.values()), wanted=columns),
        num_rows=num_rows,
        refused=tuple(Refused(reason, tuple(numbers)) for reason, numbers in sorted(refused.items())),
        duplicates=tuple(duplicates),
        contradictions=tuple(contradictions),
    )
    _check_columns(result, table=table, chosen=chosen)
    return result


def shown_numbers(numbers: Sequence[int], *, unit: str) -> str:
    """The first numbers for a message: "rows 3, 7", "line 5", or with "..." where there are many."""
    first = ", ".join(map(str, numbers[:_NUM_SHOWN]))
    return f"{unit}{'s' if len(numbers) > 1 else ''} {first}{', ...' if len(numbers) > _NUM_SHOWN else ''}"


def _parts(number: int, row: Row, *, chosen: ChosenColumns, form: AnswerForm) -> _Parts:
    return _Parts(
        number=number,
        question=value_text(row.get(chosen.question)),
        answer=reference_answer(row.get(chosen.answer), form=form, is_solution=chosen.is_solution),
        kinds=tuple(value_text(row.get(column)) for column in chosen.kinds),
        problem_ids=tuple(value_text(row.get(column)) for column in chosen.problem_ids),
    )


def _refusal(parts: _Parts, *, max_answer_chars: int) -> str:
    """Why a row is left out; empty if it is not."""
    if not parts.question.strip():
        return NO_QUESTION
    if not parts.answer:
        return NO_ANSWER
    return LONG_ANSWER if len(parts.answer) > max_answer_chars else ""


def _check_columns(read: ReadProblems, *, table: Table, chosen: ChosenColumns) -> None:
    for refused in read.refused:
        if 2 * len(refused.numbers) <= read.num_rows:
            continue
        column, setting = chosen.answer, "answer_column or answer_form"
        if refused.reason == NO_QUESTION:
            column, setting = chosen.question, "question_column"
        raise DataError(
            f"{table.name}: {len(refused.numbers)} of {read.num_rows} {table.unit}s have {refused.reason} in column "
            f"{column} ({shown_numbers(refused.numbers, unit=table.unit)}), probably it is the wrong one; "
            f"{shown_columns(table)}; set {setting}"
        )
    if not read.problems:
        raise DataError(f"{table.name}: none of its {read.num_rows} {table.unit}s has both a question and an answer")


def _problems(table: Table, rows: tuple[_Parts, ...], *, wanted: ColumnNames) -> tuple[Problem, ...]:
    ids = next(_usable_ids(rows), None)
    if ids is None and wanted.problem_id:
        raise DataError(
            f"{table.name}: the ids of id_column must be distinct and have 1 to {_MAX_ID_CHARS} characters; "
            "leave it out for row numbers"
        )
    kinds = next(_usable_kinds(rows, is_wanted=bool(wanted.kind)), ("",) * len(rows))
    return tuple(
        Problem(
            problem_id=f"{table.stem[:_MAX_ID_CHARS]}-{parts.number}" if ids is None else ids[index],
            prompt=parts.question,
            answer=parts.answer,
            kind=kinds[index],
        )
        for index, parts in enumerate(rows)
    )


def _usable_ids(rows: tuple[_Parts, ...]) -> Iterator[tuple[str, ...]]:
    for ids in zip(*(parts.problem_ids for parts in rows), strict=True):
        if len(set(ids)) == len(ids) and all(0 < len(problem_id) <= _MAX_ID_CHARS for problem_id in ids):
            yield ids


def _usable_kinds(rows: tuple[_Parts, ...], *, is_wanted: bool) -> Iterator[tuple[str, ...]]:
    for kinds in zip(*(parts.kinds for parts in rows), strict=True):
        if is_wanted or len(set(kinds)) <= _MAX_KINDS:
            yield kinds
