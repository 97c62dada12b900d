"""The calculator is exact and bounded; the Python tool prints, or says why not."""

import random

import pytest

from lucidrl.rewards.interfaces import Limits
from lucidrl.tools.builtin import calculator, python_tool


def test_the_calculator_agrees_with_python_on_random_expressions():
    draw = random.Random(0)
    for _ in range(300):
        numbers = [str(draw.randint(1, 9999)) for _ in range(4)]
        operators = [draw.choice(["+", "-", "*", "//", "%"]) for _ in range(3)]
        text = f"({numbers[0]} {operators[0]} {numbers[1]}) {operators[1]} -{numbers[2]} {operators[2]} {numbers[3]}"
        assert calculator(text) == str(eval(text)), text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("6 \u00d7 7", "42"),
        ("10 / 4", "2.5"),
        ("-(3 - 5)", "2"),
        ("2 ** -1", "0.5"),
        ("9 ** 0.5", "3"),
        ("1234567890123.45", "1234567890123.45"),
        ("12345678901234567.5 * 2", "24691357802469135"),
        ("9007199254740993.0", "9007199254740993"),
        ("-1.25 / 10", "-0.125"),
        ("10**400 / 3", "3.33333333333E+399"),
        ("2 ** 0.5", "1.41421356237"),
    ],
)
def test_the_calculator_writes_plain_numbers(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("10**10**10", "too large"),
        ("9999999999**400", "too large"),
        ("__import__('os')", "not allowed"),
        ("True + 1", "not allowed"),
        ("'a' * 3", "not allowed"),
        ("1e999", "finite"),
        ("(-8) ** 0.5", "real"),
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression"),
        ("1+" * 600 + "1", "characters"),
        ("(" * 400 + "1" + ")" * 400, "not an arithmetic expression"),
    ],
)
def test_the_calculator_refuses_all_else(expression, problem):
    with pytest.raises(ValueError, match=problem):
        calculator(expression)


def test_the_python_tool_returns_what_the_code_prints():
    python = python_tool(Limits(20))
    assert python("import math\nprint(math.comb(10, 3))") == "120\n"
    assert python("x = 1") == "(the code printed nothing)"


def test_the_python_tool_raises_the_error_of_the_code():
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        python_tool(Limits(20))("print(1/0)")


def test_the_python_tool_stops_code_that_does_not_end():
    with pytest.raises(TimeoutError, match=r"did not end within 0\.8 s"):
        python_tool(Limits(1.0))("while True: pass")
