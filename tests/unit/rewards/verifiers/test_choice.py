import pytest

from lucidrl.errors import DataError
from tests.unit.rewards.verifiers.scoring import outcome, score

OPTIONS = ["a dog", "the Moon", "42", "none of the above"]


@pytest.mark.parametrize(
    "text",
    ["B", "(B)", "B.", "B) the Moon", "**B**", "**B.** the Moon", "The answer is B", "the answer is (B).",
     "Answer: B", "**Answer:** B", "Answer: **B**", "I choose option B because it is round.", r"\boxed{B}",
     r"\boxed{\text{B}}", r"\boxed{(B)}", "<answer>B</answer>", "<answer> (B) the Moon </answer>", "A? No.\n\nB",
     "The answer is A. Wait, the answer is B.", "the Moon", "It shines, so:\nThe moon.", r"\boxed{\text{the Moon}}",
     "Final answer: B", "The correct answer is: B", "The correct choice is **B**."],
)  # fmt: skip
def test_the_usual_forms_are_read(text):
    assert score("choice", text, {"answer": "B", "choices": OPTIONS}, choices_column="choices") == 1
    assert score("choice", text, {"answer": "A", "choices": OPTIONS}, choices_column="choices") == 0


@pytest.mark.parametrize(
    "text",
    ["", "I do not know", "The answer is a dog or so", "A dog would say B first, then more", "The answer is A or B",
     "Answer: A, B", "The answer is A/B", r"\boxed{A, B}", r"\boxed{Z}", r"\boxed{B", "F", "the answer is F",
     "the answer is Because", "<answer>A or B</answer>"],
)  # fmt: skip
def test_no_or_several_choices_are_a_parse_failure(text):
    for letter in "AB":
        row = {"answer": letter, "choices": OPTIONS}
        assert outcome("choice", text, row, choices_column="choices") == "parse failure"


def test_the_reference_may_be_a_letter_an_index_or_a_text():
    row = {"choices": OPTIONS}
    for answer, form in (("b", "letter"), ("(B)", "letter"), (1, "index"), ("1", "index"), ("The  Moon", "text")):
        options = {"answer_format": form, "choices_column": "choices"}
        assert score("choice", "B", {**row, "answer": answer}, **options) == 1
        assert score("choice", "C", {**row, "answer": answer}, **options) == 0


def test_options_may_be_given_by_letter():
    for choices in ({"A": "x", "B": "y"}, {"label": ["A", "B"], "text": ["x", "y"]}):
        row = {"answer": "B", "choices": choices}
        assert score("choice", "y", row, choices_column="choices") == 1
        assert outcome("choice", "\\boxed{42}", row, choices_column="choices") == "parse failure"


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ({"answer": "E", "choices": OPTIONS}, {}, "one of the options A, B, C, D"),
        ({"answer": 4, "choices": OPTIONS}, {"answer_format": "index"}, "the index of one of the options"),
        ({"answer": "Mars", "choices": OPTIONS}, {"answer_format": "text"}, "the reference answer 'Mars'"),
        ({"answer": "A", "choices": list("uvwxyz")}, {}, r"do not fit the letters ABCDE; set reward\.kwargs\.letters"),
        ({"answer": "A", "choices": 3}, {}, "must be a list of strings"),
        ({"answer": "A"}, {}, "column 'choices' does not exist"),
    ],
)
def test_rows_that_do_not_fit_are_errors(row, options, expected):
    with pytest.raises(DataError, match=expected):
        score("choice", "A", row, choices_column="choices", **options)
