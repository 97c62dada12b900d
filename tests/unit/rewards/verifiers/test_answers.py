"""Answers of completions that a majority vote counts as equal."""

from __future__ import annotations

import pytest

from lucidrl.rewards.config import RewardConfig
from lucidrl.rewards.verifiers.answers import answer_reader


def read(name: str, text: str, **kwargs: object) -> str | None:
    reader = answer_reader([RewardConfig(name=name, kwargs=kwargs)])
    assert reader is not None
    return reader(text, {"answer": "5"})


@pytest.mark.parametrize(
    "same",
    [
        ["5", r"5\text{ km}", "x=5", "x = 5", "5.0", "5 km", "$5$", r"x = 5\,\text{km}", "5."],
        ["1000", "1,000"],
        [r"\frac{1}{2}", "0.5", "1/2"],
        [r"\text{Evelyn}", "evelyn"],
        ["x + 1", "x+1"],
    ],
)
def test_equal_boxes_of_math_vote_alike(same):
    assert len({read("math", rf"So \boxed{{{content}}}") for content in same}) == 1


def test_different_boxes_of_math_vote_apart():
    contents = ["5", "-5", r"5\pi", "5x", "x=1, y=5", "(3,5)", r"\text{five}", "5^2"]
    assert len({read("math", rf"\boxed{{{content}}}") for content in contents}) == len(contents)


def test_math_reads_the_last_number_unless_a_box_is_required():
    assert read("math", "It is 4, no, 5.") == "5"
    assert read("math", "It is 5.", read="boxed") is None
    assert read("math", r"\boxed{5}", read="boxed") == "5"
    assert read("math", r"\boxed{}") is None


def test_other_verifiers_read_what_they_compare():
    assert read("exact", " Yes ", ignore_case=True) == "yes"
    assert read("numeric", "about 1,000 km") == "1000"
    assert read("numeric", "no idea") is None
    assert answer_reader([RewardConfig(name="length")]) is None
