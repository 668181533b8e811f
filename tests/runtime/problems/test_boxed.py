"""Which box of a text holds its answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.problems.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("first \\boxed{1}, then \\boxed{2}", "2"),
        ("\\boxed{1} but \\boxed{2", "1"),
        ("\\boxed{1 and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{ \\boxed{5} }", "5"),
        ("\\boxed{x + \\boxed{5}}", "x + \\boxed{5}"),
        ("} \\boxed{3} }", "3"),
        ("{ \\boxed {3}", "3"),
        ("a \\\\\\boxed{3}", "3"),
        ("no box", None),
    ],
)
def test_the_last_complete_box_counts(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@given(before=st.text(), content=st.text(alphabet=st.characters(exclude_characters="\\{}")), after=st.text("ab {}"))
def test_a_box_is_found_whatever_stands_around_it(before: str, content: str, after: str) -> None:
    assert last_boxed(f"{before} \\boxed{{{content}}}{after}") == content.strip()


def test_a_hundred_thousand_open_boxes_are_read_in_linear_time() -> None:
    assert last_boxed("\\boxed{" * 100_000) is None
    assert last_boxed("\\boxed{" * 100_000 + "1" + "}" * 100_000) == "1"
