"""Which column of a table is the question, the answer, the kind and the id."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.problems.rows import DataError, Table

# Best first. `prompt` comes last of the questions: where there is a `question` as well, it is a template around it.
QUESTION_COLUMNS = ("question", "problem", "prompt")
SOLUTION_COLUMNS = ("solution",)
ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", *SOLUTION_COLUMNS)
KIND_COLUMNS = ("kind", "level", "difficulty", "subject", "type", "source")
ID_COLUMNS = ("id", "problem_id", "unique_id")


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """Columns by what they are for; empty for the first usual name that there is."""

    question: str = ""
    answer: str = ""
    kind: str = ""
    problem_id: str = ""

    def where_known(self, table: Table) -> "ColumnNames":
        """The same for a table that may lack some of them, which are then found by their usual names."""
        names = (self.question, self.answer, self.kind, self.problem_id)
        return ColumnNames(*(name if name in table.columns else "" for name in names))


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """The columns of one table.

    Attributes:
        question: Holds the question.
        answer: Holds the answer, or the solution with the answer in it.
        kinds: May hold what accuracy is broken down by, best first.
        problem_ids: May hold the id, best first.
        is_solution: The answer's column was chosen for its name, which says that it tells the whole solution.
    """

    question: str
    answer: str
    kinds: tuple[str, ...]
    problem_ids: tuple[str, ...]
    is_solution: bool

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every column to read, each once."""
        return tuple(dict.fromkeys((self.question, self.answer, *self.kinds, *self.problem_ids)))


def choose_columns(table: Table, wanted: ColumnNames) -> ChosenColumns:
    """Finds the columns of a table.

    Raises:
        DataError: A column that was named is not there, or there is none with a usual name.
    """
    (question, *_) = _choose(table, wanted.question, usual=QUESTION_COLUMNS, setting="question_column")
    (answer, *_) = _choose(table, wanted.answer, usual=ANSWER_COLUMNS, setting="answer_column")
    return ChosenColumns(
        question=question,
        answer=answer,
        kinds=_choose(table, wanted.kind, usual=KIND_COLUMNS, setting="kind_column", is_required=False),
        problem_ids=_choose(table, wanted.problem_id, usual=ID_COLUMNS, setting="id_column", is_required=False),
        is_solution=not wanted.answer and answer in SOLUTION_COLUMNS,
    )


def shown_columns(table: Table) -> str:
    """The columns of a table for a message: what a person may choose from."""
    return f"its columns are {', '.join(table.columns)}"


def _choose(
    table: Table, wanted: str, *, usual: Sequence[str], setting: str, is_required: bool = True
) -> tuple[str, ...]:
    if wanted:
        if wanted not in table.columns:
            raise DataError(
                f"{table.name}: has no column {wanted}; {shown_columns(table)}; set {setting} to one of them"
            )
        return (wanted,)
    found = tuple(name for name in usual if name in table.columns)
    if is_required and not found:
        raise DataError(
            f"{table.name}: has none of the columns {', '.join(usual)}; {shown_columns(table)}; "
            f"set {setting} to the right one"
        )
    return found
