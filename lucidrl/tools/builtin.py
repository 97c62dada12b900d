"""The built-in tools: a calculator, and Python code in a sandbox. This module does not import torch."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from lucidrl.rewards.interfaces import Limits
from lucidrl.rewards.sandbox import SandboxLimits, run_python

_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_OTHER_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
"""Mathematical signs of multiplication, division and subtraction."""
_LONGEST_EXPRESSION = 1000
_MOST_BITS = 4096
"""Largest number that the calculator computes with, in bits."""
_LARGEST_EXPONENT = 1000
_SIGNIFICANT_DIGITS = 12
_MOST_DECIMALS = 20
"""Decimal places of an exact result; a number with more is rounded."""
_FRACTION_FOR_CODE = 0.8
"""Fraction of the timeout of a call; the rest is for the start and the end of the sandbox."""


def calculator(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as 17 * (23 - 4).
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_LONGEST_EXPRESSION} are allowed")
    text = expression.translate(_OTHER_SIGNS).replace("^", "**")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from error
    try:
        return _written(_value(tree, text))
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def _value(node: ast.AST, text: str) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        if not math.isfinite(node.value):
            raise ValueError(f"{node.value} is not a finite number")
        is_integer = isinstance(node.value, int)
        return _checked(Fraction(node.value if is_integer else ast.get_source_segment(text, node) or node.value))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand, text))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if isinstance(node.op, ast.Pow):
            return _checked(_power(left, right))
        if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; use numbers, + - * / // % ** and parentheses")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if abs(exponent) > _LARGEST_EXPONENT or base.numerator.bit_length() * abs(exponent) > _MOST_BITS:
        raise ValueError("the power is too large")
    try:
        result = base**exponent
    except OverflowError as error:
        raise ValueError("the power is too large") from error
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result if isinstance(result, Fraction) else Fraction(f"{result:.{_SIGNIFICANT_DIGITS}g}")


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ValueError("the number is too large")
    return value


def _written(value: Fraction) -> str:
    """An integer, an exact decimal number, or a decimal number rounded to 12 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    for num_decimals in range(1, _MOST_DECIMALS + 1):
        if 10**num_decimals % value.denominator == 0:
            digits = str(abs(value.numerator) * 10**num_decimals // value.denominator).zfill(num_decimals + 1)
            return f"{'-' if value < 0 else ''}{digits[:-num_decimals]}.{digits[-num_decimals:]}"
    with localcontext(prec=_SIGNIFICANT_DIGITS):
        return str(Decimal(value.numerator) / Decimal(value.denominator))


def python_tool(limits: Limits) -> Callable[[str], str]:
    """Make the tool `python`, whose code runs with these limits."""
    timeout_s = _FRACTION_FOR_CODE * limits.timeout_s
    sandbox = SandboxLimits(timeout_s=timeout_s, cpu_s=math.ceil(timeout_s), memory_bytes=limits.memory_bytes)

    def python(code: str) -> str:
        """Run Python code and return what it prints.

        Args:
            code: A complete program that prints its result. It has the standard library and no network.
        """
        result = run_python(code, limits=sandbox)
        if result.outcome == "ok":
            return result.stdout or "(the code printed nothing)"
        if result.outcome == "timeout":
            raise TimeoutError(f"the code did not end within {timeout_s:g} s")
        last_lines = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise RuntimeError(last_lines or f"the code exited with code {result.exit_code}")

    return python
