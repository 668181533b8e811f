"""Whether a completion's answer equals the reference answer: the reward functions, as they run inside a worker."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from reward_service.outcome import MAX_EXTRACTED_CHARS, MAX_REASON_CHARS, AnswerLimits, Grade, Item, Outcome
from runtime.problems.boxed import last_boxed

# LaTeX only: math-verify reads its plain-text forms with sympy's parse_expr, which evaluates what it is given.
_PARSED_FORMS = (LatexExtractionConfig(),)

_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")

_NUMBER = re.compile(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(\.[0-9]*)?")
_FRACTION = re.compile(r"([+-]?)(?:\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
_NUMBERS_APART = re.compile(r"[+-]?[0-9.]+(?:\s+[0-9.]+)+")
# Python refuses to read integers of more than 4,300 digits; a number this long goes to the parser.
_MAX_FAST_CHARS = 1_000


def grade_at_sight(item: Item, limits: AnswerLimits) -> Grade | None:
    """The grade of an item that needs no parser, in microseconds; None where `grade` must be asked."""
    return _math_at_sight(item, limits) if item.reward_function == "math" else None


def grade(item: Item, limits: AnswerLimits) -> Grade:
    """Grades one item; nothing bounds the time and memory that this takes but the worker around it.

    Returns:
        The grade; ERROR, never a zero reward, if the grader itself fails.
    """
    try:
        return _FUNCTIONS[item.reward_function](item, limits)
    # Whatever math-verify and sympy raise on an answer means the same to the caller: no verdict.
    except Exception as error:  # noqa: BLE001
        return Grade(Outcome.ERROR, None, reason=f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS])


def grade_math(item: Item, limits: AnswerLimits) -> Grade:
    """1 if the last complete box holds the reference answer, 0 if not, or if there is none or it cannot be read."""
    at_sight = _math_at_sight(item, limits)
    return at_sight or _grade_by_parsing(last_boxed(item.completion) or "", _reference(item))


_FUNCTIONS: dict[str, Callable[[Item, AnswerLimits], Grade]] = {"math": grade_math}


def _math_at_sight(item: Item, limits: AnswerLimits) -> Grade | None:
    num_chars = len(item.completion)
    if num_chars > limits.max_completion_chars:
        return _unparsable(f"the completion has {num_chars} characters, more than {limits.max_completion_chars}")
    answer = last_boxed(item.completion)
    if not answer:
        reason = "no complete \\boxed{}" if answer is None else "the \\boxed{} is empty"
        return Grade(Outcome.NO_ANSWER, 0.0, reason=reason, parts={"math": 0.0})
    if len(answer) > limits.max_answer_chars:
        return _unparsable(f"the answer has {len(answer)} characters, more than {limits.max_answer_chars}", answer)
    if _depth(answer) > limits.max_answer_depth:
        return _unparsable(f"the answer's brackets are nested deeper than {limits.max_answer_depth}", answer)
    # math-verify adds such numbers: "12 3" would equal 15.
    if _NUMBERS_APART.fullmatch(answer):
        return _unparsable("the answer is several numbers", answer)
    is_equal = _equal_at_sight(answer, _reference(item))
    return None if is_equal is None else _verdict(is_equal, answer)


def _reference(item: Item) -> str:
    return last_boxed(item.reference_answer) or item.reference_answer


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(0, depth - 1)
    return deepest


def _equal_at_sight(answer: str, reference: str) -> bool | None:
    """Equality where no parser is needed: the same text, or two plain numbers; None where one is needed."""
    answer, reference = _plain(answer), _plain(reference)
    if answer == reference:
        return True
    numbers = _rational(answer), _rational(reference)
    if numbers[0] is None or numbers[1] is None:
        return None
    if numbers[0] == numbers[1]:
        return True
    # A decimal may stand for a number that it is not equal to, as 0.333 does for 1/3; the parser's rules decide.
    return None if "." in answer or "." in reference else False


def _plain(text: str) -> str:
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1].strip()
    return text


def _rational(text: str) -> Fraction | None:
    """The value of an integer, decimal or fraction written with plain digits; None for anything else."""
    if len(text) > _MAX_FAST_CHARS:
        return None
    if (number := _NUMBER.fullmatch(text)) and (number[2] or (number[3] or ".") != "."):
        return Fraction(number[1] + (number[2] or "0").replace(",", "") + (number[3] or "").rstrip("."))
    if fraction := _FRACTION.fullmatch(text):
        top, bottom = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        return None if bottom == 0 else Fraction(-top if fraction[1] == "-" else top, bottom)
    return None


def _grade_by_parsing(answer: str, reference: str) -> Grade:
    parsed_answer = _parsed(answer)
    if not parsed_answer:
        return _unparsable("the answer cannot be read as mathematics", answer)
    parsed_reference = _parsed_reference(reference)
    if not parsed_reference:
        return Grade(
            Outcome.ERROR,
            None,
            extracted_answer=answer[:MAX_EXTRACTED_CHARS],
            reason="the reference answer cannot be read as mathematics",
        )
    # Not symmetric: the reference comes first.
    is_equal = verify(list(parsed_reference), parsed_answer, timeout_seconds=None, raise_on_error=True)
    return _verdict(is_equal, answer)


def _parsed(text: str) -> list[Any]:
    # math-verify's own timeouts are alarms, which big integers do not heed; the pool kills the worker instead.
    boxed = f"\\boxed{{{text}}}"
    return list(
        parse(
            boxed,
            _PARSED_FORMS,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,
        )
    )


@lru_cache(maxsize=4_096)
def _parsed_reference(reference: str) -> tuple[Any, ...]:
    return tuple(_parsed(reference))


def _verdict(is_equal: bool, answer: str) -> Grade:
    outcome, reward = (Outcome.CORRECT, 1.0) if is_equal else (Outcome.WRONG, 0.0)
    return Grade(outcome, reward, extracted_answer=answer[:MAX_EXTRACTED_CHARS], parts={"math": reward})


def _unparsable(reason: str, answer: str = "") -> Grade:
    return Grade(
        Outcome.UNPARSABLE,
        0.0,
        extracted_answer=answer[:MAX_EXTRACTED_CHARS],
        reason=reason[:MAX_REASON_CHARS],
        parts={"math": 0.0},
    )
