"""What is an answer, and what equals the reference answer."""

import pytest

from reward_service.grade import grade
from reward_service.outcome import AnswerLimits, Grade, Item, Outcome

LIMITS = AnswerLimits(max_completion_chars=10_000, max_answer_chars=200, max_answer_depth=16)


def graded(completion: str, reference_answer: str) -> Grade:
    return grade(Item("math", completion, reference_answer), LIMITS)


@pytest.mark.parametrize(
    ("answer", "reference_answer"),
    [
        ("72", "72"),
        ("72.", "72"),
        (" 72 ", "$72$"),
        ("+5", "5"),
        ("007", "7"),
        ("\N{MINUS SIGN}3", "-3"),
        ("7,425,000", "7425000"),
        ("0.5", "1/2"),
        ("\\frac{1}{2}", "0.5"),
        ("-\\dfrac{3}{6}", "-1/2"),
        (".5", "0.50"),
        ("\\frac12", "1/2"),
        ("5 \\text{ cm}", "5"),
        ("\\$12", "12"),
        ("x = 5", "5"),
        ("2\\sqrt{3}", "\\sqrt{12}"),
        ("\\frac{2x}{4}", "\\frac{x}{2}"),
        ("\\{2, 1\\}", "\\{1, 2\\}"),
        ("\\text{Tuesday}", "\\text{Tuesday}"),
        ("3", "\\boxed{3}"),
    ],
)
def test_an_equal_answer_is_correct(answer: str, reference_answer: str) -> None:
    result = graded(f"So the answer is \\boxed{{{answer}}}.", reference_answer)

    assert (result.outcome, result.reward, result.parts) == (Outcome.CORRECT, 1.0, {"math": 1.0})


@pytest.mark.parametrize(
    ("answer", "reference_answer"),
    [
        ("71", "72"),
        ("-72", "72"),
        ("0.51", "1/2"),
        ("\\frac{1}{3}", "\\frac{1}{2}"),
        ("2147483647", "2147483648"),
        ("5 \\text{ or } 6", "5"),
        ("x + 1", "x"),
        ("\\sqrt{3}", "\\sqrt{2}"),
    ],
)
def test_another_answer_is_wrong(answer: str, reference_answer: str) -> None:
    result = graded(f"So the answer is \\boxed{{{answer}}}.", reference_answer)

    assert (result.outcome, result.reward, result.extracted_answer) == (Outcome.WRONG, 0.0, answer)


@pytest.mark.parametrize("completion", ["", "it is 72", "\\boxed{72", "\\boxed 72", "\\boxed{}", "boxed{72}"])
def test_no_complete_box_is_no_answer(completion: str) -> None:
    result = graded(completion, "72")

    assert (result.outcome, result.reward) == (Outcome.NO_ANSWER, 0.0)
    assert "\\boxed{}" in result.reason


@pytest.mark.parametrize("answer", ["&&&", "\\frac{1}", "\\sqrt", "12 3", "?", "\\left( 15"])
def test_what_cannot_be_read_is_unparsable(answer: str) -> None:
    result = graded(f"\\boxed{{{answer}}}", "15")

    assert (result.outcome, result.reward) == (Outcome.UNPARSABLE, 0.0)
    assert result.reason


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("\\boxed{" + "1" * 201 + "}", "201 characters, more than 200"),
        ("\\boxed{" + "(" * 17 + "1" + ")" * 17 + "}", "nested deeper than 16"),
        ("\\boxed{1}" + " " * 10_000, "10009 characters, more than 10000"),
    ],
)
def test_what_is_beyond_the_limits_is_unparsable(completion: str, reason: str) -> None:
    result = graded(completion, "1")

    assert result.outcome is Outcome.UNPARSABLE
    assert reason in result.reason


def test_a_reference_answer_that_cannot_be_read_is_no_zero_reward() -> None:
    result = graded("\\boxed{x + 1}", "&&&")

    assert (result.outcome, result.reward) == (Outcome.ERROR, None)
    assert "reference answer" in result.reason
