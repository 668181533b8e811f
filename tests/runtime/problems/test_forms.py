"""What a row says its answer is."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.problems.forms import AnswerForm, reference_answer, value_text


def _answer(value: Any, form: AnswerForm = "auto", *, is_solution: bool = False) -> str:
    return reference_answer(value, form=form, is_solution=is_solution)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("72", "72"),
        (27.0, "27"),
        (0.5, "0.5"),
        (-3, "-3"),
        (100, "100"),
        (10**400, "1" + "0" * 400),
        (1e-7, "0.0000001"),
        (4.5e33, "45" + "0" * 32),
        (Decimal("2.50"), "2.5"),
        (["2"], "2"),
        ([], ""),
        (["2", "3"], ""),
        (None, ""),
        (True, ""),
        (float("nan"), ""),
        ({"a": 1}, ""),
        ("half \ud800 of a pair", ""),
    ],
)
def test_a_value_becomes_the_text_that_a_person_would_write(value: Any, text: str) -> None:
    assert value_text(value) == text


@given(st.integers())
def test_gsm8k_answers_lose_their_thousands_commas(number: int) -> None:
    text = f"He has {number:,} = <<{number}={number}>>{number:,} pens.\n#### {number:,}"

    assert _answer(text) == _answer(text, "gsm8k") == str(number)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_written_out_exactly(number: float) -> None:
    assert float(value_text(number)) == number


@pytest.mark.parametrize(
    ("value", "form", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "auto", "\\frac{1}{2}"),
        ("(1,080)", "auto", "(1,080)"),
        ("#### 1\n#### 2", "gsm8k", "2"),
        ("72", "gsm8k", ""),
        ("72", "boxed", ""),
        ("#### 72", "plain", "#### 72"),
        ("  x + 1 ", "plain", "x + 1"),
        ("$\\frac{1}{2}$", "plain", "\\frac{1}{2}"),
        ("$1$ or $2$", "plain", "$1$ or $2$"),
        ("\\$ 5", "plain", "\\$ 5"),
        ("$", "plain", "$"),
    ],
)
def test_the_form_says_where_the_answer_stands(value: str, form: AnswerForm, answer: str) -> None:
    assert _answer(value, form) == answer


def test_a_solution_that_marks_no_answer_has_none() -> None:
    assert _answer("It is clear.", is_solution=True) == ""
    assert _answer("It is \\boxed{3}.", is_solution=True) == "3"
