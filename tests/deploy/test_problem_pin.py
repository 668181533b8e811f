"""A run goes on with the problems that it began with, or not at all."""

from pathlib import Path

import pytest

from deploy.data import RenderedPart, RenderedProblems
from deploy.errors import UserError
from deploy.problem_pin import pin_problems
from deploy.run_folder import RunFolder
from runtime.problems.problem import Problem


def problems(*answers: str) -> RenderedProblems:
    made = tuple(Problem(str(index), f"{index}?", answer, "sum") for index, answer in enumerate(answers))
    empty = RenderedPart(problems=(), lengths=(), too_long=(), limit=10)
    return RenderedProblems(train=RenderedPart(problems=made, lengths=(), too_long=(), limit=10), held_out=empty)


def test_the_same_problems_go_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    pin_problems(folder, problems("1", "2"))
    pin_problems(folder, problems("1", "2"))

    assert folder.problems_file.is_file()


def test_other_problems_are_refused_even_if_they_are_as_many(tmp_path: Path) -> None:
    pin_problems(RunFolder(tmp_path), problems("1", "2"))

    with pytest.raises(UserError, match="the train problems are not those that the run began with"):
        pin_problems(RunFolder(tmp_path), problems("1", "3"))
