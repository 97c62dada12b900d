"""Numbers are read exactly and compared within the tolerance."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.rewards.interfaces import ParseFailure
from lucidrl.rewards.verifiers.numeric import NumberReader, NumericConfig, NumericVerifier
from tests.unit.rewards.verifiers.scoring import outcome

quick = settings(max_examples=25, deadline=None)


def number_in(text: str, **options) -> Fraction:
    return NumericVerifier(NumericConfig(**options))._read(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 7/8.", "7/8"),
        ("12 + 30 = 42.", "42"),
        ("so x=-5", "-5"),
        ("\u2212 5 or \u22125", "-5"),
        ("10-7", "7"),
        ("(3)-5", "5"),
        ("- 42", "42"),  # an item of a list
        ("1, 2,3", "3"),
        ("$1,234.50", "1234.5"),
        ("-$5", "-5"),
        ("area: 5 cm^2", "5"),
        ("it grew by 12 %.", "12"),
        (".5", "1/2"),
        ("3.14.", "3.14"),
        ("3 1/2", "7/2"),
        ("1.5e-3", "0.0015"),
        ("2E5", "200000"),
        (r"\boxed{5} and 7", "5"),
        (r"\boxed{7} then \boxed{- 5}", "-5"),
        (r"\boxed{3\frac{1}{2}}", "7/2"),
        (r"\boxed{-\dfrac{1}{2}}", "-1/2"),
        (r"\boxed{\frac{1}{-2}}", "-1/2"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{1\,000\,000}", "1000000"),
        (r"\boxed{x = 3}", "3"),
        (r"\boxed{72\text{ km/h}}", "72"),
        (r"\boxed{5\text{ cm}^2}", "5"),
        (r"\boxed{\$12.50}", "12.5"),
        (r"\boxed{50\%}", "50"),
    ],
)
def test_numbers_are_read(text, number):
    assert number_in(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    ["", "none", "x2", "H2O", "1e999999999", "7" * 5000, "5/0", r"\boxed{3x+5}", r"\boxed{5x}", r"\boxed{2^10}",
     r"\boxed{1,2}", r"\boxed{7", r"\boxed{}", "\u0661\u0662", "²", "7\u200b" * 15_000, "1" * 30_000],
)  # fmt: skip
def test_what_is_no_number_is_a_parse_failure(text):
    with pytest.raises(ParseFailure):
        number_in(text)


def test_a_number_cut_by_the_search_window_is_not_read():
    assert number_in("12345 " + "x " * 9_000) == 12345
    with pytest.raises(ParseFailure):
        number_in("1234567890" * 2 + "x" * 19_990)


def test_the_options_say_what_is_read():
    assert outcome("numeric", "7 is 5", {"answer": 5}, read="boxed") == "parse failure"
    assert outcome("numeric", r"\boxed{7} is 5", {"answer": 5}, read="last") == 1
    assert outcome("numeric", r"\boxed{7} is 5", {"answer": 5}) == 0
    assert outcome("numeric", "50%", {"answer": 0.5}, percent="hundredth") == 1
    assert outcome("numeric", "50%", {"answer": "0.5"}) == 0
    assert outcome("numeric", "1.234,5", {"answer": "1234,5"}, thousands_separator=".") == 1
    assert outcome("numeric", "1'234", {"answer": 1234}, thousands_separator="'") == 1
    assert outcome("numeric", "1,234", {"answer": 234}, thousands_separator="") == 1
    assert outcome("numeric", "yes, 42!", {"answer": "$42"}) == 1


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("100.5", {}, 0),
        ("100.5", {"absolute_tolerance": 0.5}, 1),
        ("100.6", {"absolute_tolerance": 0.5}, 0),
        ("101", {"relative_tolerance": 0.01}, 1),
        ("-100", {"relative_tolerance": 0.5}, 0),
        ("99.999999", {}, 0),
    ],
)
def test_tolerances(text, options, expected):
    # 0.01 as a float is slightly above 1/100, so the bound itself is within.
    assert outcome("numeric", text, {"answer": "100"}, **options) == expected


@quick
@given(
    st.integers(-(10**30), 10**30), st.integers(1, 10**6), st.sampled_from(["{}", "x = {}.", r"\boxed{{{}}}", "**{}**"])
)
def test_integers_and_fractions_are_read_back(above, below, form):
    assert number_in(form.format(above)) == above
    assert number_in(form.format(f"{above:,}")) == above
    assert number_in(form.format(f"{above}/{below}")) == Fraction(above, below)
    sign = "-" if above < 0 else ""
    assert number_in(form.format(rf"{sign}\frac{{{abs(above)}}}{{{below}}}")) == Fraction(above, below)


@quick
@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**12), max_value=10**12))
def test_decimals_are_read_back(number):
    assert number_in(f"it is {number:f}!") == Fraction(number)
    assert number_in(f"it is {number:,f}!") == Fraction(number)
    assert number_in(f"it is {number:e}") == Fraction(number)
    assert outcome("numeric", f"{number:f}%", {"answer": str(number)}) == 1


@quick
@given(st.fractions(-1000, 1000), st.fractions(-1000, 1000), st.integers(0, 1000))
def test_the_tolerance_is_the_exact_bound(found, reference, tolerance):
    row = {"answer": f"{reference.numerator}/{reference.denominator}"}
    reward = outcome("numeric", f"{found.numerator}/{found.denominator}", row, absolute_tolerance=tolerance)
    assert reward == (abs(found - reference) <= tolerance)


@quick
@given(st.text(max_size=80) | st.text("0123456789.,-+/%eE \\{}$^()x", max_size=60))
def test_no_text_breaks_the_reader(text):
    for separator in (",", ".", "'", " ", ""):
        reader = NumberReader(separator)
        for read in (reader.last, reader.whole, reader.with_unit):
            try:
                number = read(text)
            except ParseFailure:
                continue
            assert number is None or isinstance(number, Fraction)
