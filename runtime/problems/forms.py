r"""What a row says its answer is: a number, a plain text, GSM8K's `#### 72`, or MATH's `\boxed{72}` in a solution."""

import math
import re
from decimal import Decimal
from typing import Any, Literal

from runtime.problems.boxed import last_boxed

AnswerForm = Literal["auto", "plain", "gsm8k", "boxed"]
"""Where the answer stands: all of the text, after the last `####`, in the last box, or wherever the text shows it."""

_MARKED = re.compile(r"^####[ \t]*(.*)$", re.MULTILINE)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def value_text(value: Any) -> str:
    """The text of a value as JSON and Parquet have it; empty where it is none that a prompt or an answer can be.

    Args:
        value: A text stands for itself; a number is written out in full, 27.0 as "27"; a list of one counts as what
            is in it.
    """
    if isinstance(value, list):
        return value_text(value[0]) if len(value) == 1 else ""
    if isinstance(value, str):
        return value if _is_unicode(value) else ""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return ""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return ""
    written = format(Decimal(str(value)), "f")
    return written.rstrip("0").rstrip(".") if "." in written else written


def reference_answer(value: Any, *, form: AnswerForm, is_solution: bool) -> str:
    r"""The answer that a completion is compared with; empty where the value does not show one.

    Args:
        value: Of the answer's column.
        form: Where the answer stands in it. "auto" takes what follows the last `####`, or is in the last `\boxed{}`,
            or else the whole text.
        is_solution: The column tells how the problem is solved, so that its whole text is no answer.
    """
    text = value_text(value).strip()
    if form in ("auto", "gsm8k"):
        marked = _MARKED.findall(text)
        if marked or form == "gsm8k":
            return _THOUSANDS.sub("", marked[-1].strip()) if marked else ""
    if form in ("auto", "boxed"):
        boxed = last_boxed(text)
        if boxed is not None or form == "boxed":
            return boxed or ""
    return "" if is_solution and form == "auto" else _without_dollars(text)


def _without_dollars(text: str) -> str:
    """Takes off the dollar signs of an answer that is one formula; those of an amount of money stay."""
    is_formula = len(text) > 2 and text.startswith("$") and text.endswith("$") and "$" not in text[1:-1]
    return text[1:-1].strip() if is_formula and not text.endswith("\\$") else text


def _is_unicode(text: str) -> bool:
    # JSON can spell half of a surrogate pair, which neither a tokenizer nor a message takes.
    return not any("\ud800" <= character <= "\udfff" for character in text)
