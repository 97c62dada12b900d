"""Mathematical equality, on pairs made by hand."""

from __future__ import annotations

import signal

import pytest

from lucidrl.rewards.interfaces import Completion
from lucidrl.rewards.verifiers import make_verifier
from tests.unit.rewards.verifiers.scoring import outcome, score

EQUAL = [
    ("42", "42"),
    ("42", "42."),
    ("42", "+42"),
    ("42", r"$42$"),
    ("1234", "1,234"),
    ("1234", r"1{,}234"),
    ("1/2", r"\frac{1}{2}"),
    ("1/2", r"\dfrac12"),
    ("1/2", "0.5"),
    ("1/2", r"\frac{2}{4}"),
    (r"-\frac{3}{4}", "-0.75"),
    ("1/3", "0.333333"),
    (r"3\frac{1}{2}", r"\frac{7}{2}"),
    (r"50\%", "0.5"),
    (r"50\%", "50"),
    (r"50\%", r"50\%"),
    ("(1,2]", "(1,2]"),
    (r"(-\infty, 3)", r"(-\infty,3)"),
    (r"[0,1)\cup(2,3]", r"(2,3]\cup[0,1)"),
    (r"1<x<2", "(1,2)"),
    (r"\{1,2,3\}", r"\{3,1,2\}"),
    ("1,2", "2,1"),
    ("(1,2)", "(1, 2)"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\text{evelyn}"),
    ("no solution", r"\text{No solution}"),
    (r"\text{(B)}", "B"),
    ("72 km/h", "72"),
    (r"72\text{ km/h}", "72 km/h"),
    ("72", r"72\text{ km/h}"),
    (r"5\text{ cm}^2", "5"),
    (r"90^\circ", "90"),
    ("x=5", "5"),
    ("5", "x = 5"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("2i+1", "1+2i"),
    ("xy", "yx"),
    (r"The result is \boxed{7}.", "7"),
]
UNEQUAL = [
    ("42", "43"),
    ("42", "-42"),
    ("42", "4 2"),
    ("1/2", "0.51"),
    ("1/3", "0.33"),
    ("0.0000001", "0.0000002"),
    ("0", "0.0000001"),
    ("1000000", "1000001"),
    (r"50\%", "0.05"),
    ("(1,2]", "[1,2]"),
    ("(1,2)", "(2,1)"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    ("1,2", "1,3"),
    ("listen", "silent"),
    (r"\text{Evelyn}", "Carla"),
    (r"\text{yes}", r"\text{no}"),
    ("no solution", "0"),
    ("72 km/h", "72 mph"),
    ("72 km/h", "70"),
    ("x=5", "y=5"),
    ("x=5", "6"),
    ("(x+1)^2", "x^2+1"),
    (r"\sqrt{2}", "1.41"),
    ("2i+1", "1-2i"),
    ("x+y", "xy"),
    ("10", r"10^{10^{2}}"),
    (r"\infty", r"-\infty"),
]


@pytest.mark.parametrize(("reference", "found"), EQUAL)
def test_equal_answers_get_the_reward(reference, found):
    assert score("math", rf"So it is \boxed{{{found}}}.", {"answer": reference}) == 1


@pytest.mark.parametrize(("reference", "found"), UNEQUAL)
def test_unequal_answers_get_none(reference, found):
    assert score("math", rf"So it is \boxed{{{found}}}.", {"answer": reference}) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} \boxed{\frac{3}{4}}", 1),
        (r"\boxed{\frac{3}{4}} or \boxed{1}", 0),
        (r"\fbox{0.75}", 1),
        (r"\boxed{\boxed{0.75}}", 1),
        ("The answer is 3/4.", 1),
        (r"we get $x = \frac{3}{4}$", 1),
        ("3/4 of it is 9", 0),
        (r"\boxed{\frac{3}{4}", "parse failure"),
        (r"0.75 \boxed{}", "parse failure"),
        (r"\boxed{\frac{3}{}}", "parse failure"),
        ("I cannot say", "parse failure"),
        ("", "parse failure"),
    ],
)
def test_the_last_box_counts_else_the_last_expression(text, expected):
    assert outcome("math", text, {"answer": "3/4"}) == expected


def test_a_box_may_be_required():
    assert outcome("math", "The answer is 3/4.", {"answer": "3/4"}, read="boxed") == "parse failure"
    assert outcome("math", "It is Evelyn", {"answer": "Evelyn"}) == "parse failure"


def test_the_number_of_decimals_is_an_option():
    assert score("math", r"\boxed{3.14}", {"answer": "3.1416"}) == 0
    assert score("math", r"\boxed{3.1416}", {"answer": "3.14159"}, decimals=4) == 1


def test_the_signal_timeouts_of_math_verify_are_off(monkeypatch):
    """They would raise in a thread, and cancel timers of the caller."""
    verifier = make_verifier("math", {})
    monkeypatch.setattr(signal, "alarm", None)
    monkeypatch.setattr(signal, "signal", None)
    assert verifier(Completion(r"\boxed{x+1}", 1), {"answer": "1+x"}) == 1
    assert verifier(Completion(r"the answer is $x+1$", 1), {"answer": "x+2"}) == 0
