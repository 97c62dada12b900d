import pytest

from tests.unit.rewards.verifiers.scoring import outcome, score

FULL_WIDTH = "".join(chr(ord(letter) + 0xFEE0) for letter in "Paris")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("Paris", {}, 1),
        ("  Paris\n", {}, 1),
        ("  Paris\n", {"strip": False}, 0),
        ("paris", {}, 0),
        ("PARIS", {"ignore_case": True}, 1),
        ("It is Paris", {}, 0),
        ("\u202eParis", {}, 0),
        ("Par\0is", {}, 0),
        ("Paris\ud800", {}, 0),
        (FULL_WIDTH, {}, 0),
        (FULL_WIDTH, {"normalize_unicode": True}, 1),
        (" \n", {}, "parse failure"),
    ],
)
def test_exact_match(text, options, expected):
    assert outcome("exact", text, {"answer": "Paris"}, **options) == expected


def test_runs_of_white_space_may_count_as_one_space():
    row = {"answer": "a b c"}
    assert score("exact", "a  b\n\tc", row) == 0
    assert score("exact", "a  b\n\tc", row, normalize_spaces=True) == 1
    assert score("exact", "\n a  b\n\tc", row, normalize_spaces=True, strip=False) == 0
    assert score("exact", "\na  b\n\tc", {"answer": " a b c"}, normalize_spaces=True, strip=False) == 1


def test_numbers_are_compared_as_texts():
    assert score("exact", "42", {"answer": 42}) == 1
    assert score("exact", "42.0", {"answer": 42}) == 0
    assert score("exact", "0.1", {"answer": 0.1}) == 1
