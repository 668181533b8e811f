import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.problems.arithmetic import KINDS, ArithmeticProblems, arithmetic_problems
from runtime.problems.problem import Problem

# Written out again, so that a slip in the generator's own rules is seen.
RIGHT_ANSWERS: dict[str, Callable[[list[int]], int]] = {
    "sum": lambda numbers: numbers[0] + numbers[1],
    "difference": lambda numbers: max(numbers) - min(numbers),
    "larger": max,
    "smaller": min,
    "product": lambda numbers: sum(numbers[1] for _ in range(numbers[0])),
    "two_steps": lambda numbers: numbers[0] + numbers[1] + numbers[2],
}


def operands(problem: Problem) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", problem.prompt)]


@pytest.fixture(scope="module")
def problems() -> ArithmeticProblems:
    return arithmetic_problems(seed=1, num_train=4096, num_held_out=256)


def test_answers_are_right(problems: ArithmeticProblems) -> None:
    for problem in problems.train + problems.held_out:
        assert problem.answer == str(RIGHT_ANSWERS[problem.kind](operands(problem))), problem


def test_every_kind_comes_equally_often(problems: ArithmeticProblems) -> None:
    counts = [sum(problem.kind == kind.name for problem in problems.train) for kind in KINDS]

    assert max(counts) - min(counts) <= 1


def test_ids_and_prompts_are_distinct(problems: ArithmeticProblems) -> None:
    both = problems.train + problems.held_out

    assert len({problem.problem_id for problem in both}) == len(both) == 4096 + 256
    assert len({problem.prompt for problem in both}) == len(both)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(min_value=0, max_value=2**32), num_train=st.integers(min_value=0, max_value=1500))
def test_held_out_operands_are_never_trained_on(seed: int, num_train: int) -> None:
    made = arithmetic_problems(seed=seed, num_train=num_train, num_held_out=200)

    trained_on = {(problem.kind, *operands(problem)) for problem in made.train}
    held_out = {(problem.kind, *operands(problem)) for problem in made.held_out}
    assert not trained_on & held_out


def test_a_longer_training_list_begins_with_the_shorter_one(problems: ArithmeticProblems) -> None:
    shorter = arithmetic_problems(seed=1, num_train=100, num_held_out=7)

    assert shorter.train == problems.train[:100]
    assert shorter.held_out == problems.held_out[:7]


def test_seeds_differ(problems: ArithmeticProblems) -> None:
    other = arithmetic_problems(seed=2, num_train=4096, num_held_out=256)

    assert {problem.prompt for problem in other.held_out} != {problem.prompt for problem in problems.held_out}


def test_another_process_makes_the_same_problems(problems: ArithmeticProblems) -> None:
    script = (
        "from runtime.problems.arithmetic import arithmetic_problems as make;"
        "print(make(seed=1, num_train=300, num_held_out=9))"
    )

    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout

    assert printed.strip() == str(arithmetic_problems(seed=1, num_train=300, num_held_out=9))


def test_the_problems_of_a_seed_are_pinned() -> None:
    first = arithmetic_problems(seed=1, num_train=1, num_held_out=0).train[0]

    assert first == Problem("arithmetic-1-train-0", "Ben has 3 coins, gets 10 more. How many now?", "13", "sum")


@pytest.mark.parametrize(("num_train", "num_held_out"), [(-1, 0), (0, -1), (10**6, 0), (0, 10**6)])
def test_an_impossible_number_of_problems_is_refused(num_train: int, num_held_out: int) -> None:
    with pytest.raises(ValueError, match=r"num_(train|held_out) is -?\d+; it must be between 0 and \d+"):
        arithmetic_problems(seed=1, num_train=num_train, num_held_out=num_held_out)
