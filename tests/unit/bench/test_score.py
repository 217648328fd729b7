"""Exact match: the answer that stands at the end of a text."""

from __future__ import annotations

import pytest

from outrider.bench.score import final_answer, is_right, num_right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} and then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"open \boxed{7 but 12", "12"),
        ("He has 3 apples and 1,250 pears", "1,250"),
        ("nothing here", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_numbers_are_compared_by_value_not_spelling() -> None:
    assert is_right("1250", r"\boxed{1,250.00}") and is_right("18", r"\boxed{\$18}")
    assert not is_right("18", r"\boxed{180}") and not is_right("18", "none")
    assert num_right([("1", "it is 1"), (None, "1"), ("2", "it is 3")]) == 1
