"""Templates of settings, such as `data.template`: jinja in a sandbox that limits the length of the output."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from lucidrl.errors import DataError

LONGEST_TEXT = 1_000_000
"""Most characters of a rendered prompt."""
BROKEN = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Exceptions that the code of a template can raise, in addition to those of jinja."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that also refuses products and powers whose result would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            is_repeated = operator == "*" and isinstance(one, str | list | tuple) and isinstance(other, int)
            if is_repeated and len(one) * other > LONGEST_TEXT:
                raise SecurityError(
                    f"`*` would make {len(one) * other} characters or items; at most {LONGEST_TEXT} are allowed"
                )
        if operator == "**" and (abs(left) > 10**6 or abs(right) > 100):
            raise SecurityError(f"the power {left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Compile a template.

    Raises:
        ValueError: the template is not valid jinja.
    """
    try:
        return _Sandbox(undefined=StrictUndefined, keep_trailing_newline=True).from_string(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno} is not valid jinja ({error.message}); fix the template") from error
    except RecursionError as error:
        raise ValueError("the template is nested too deeply; write a flatter one") from error


def rendered(template: str, row: Mapping[str, Any], place: str, setting: str = "data.template") -> str:
    """Render the template with the columns of a row.

    Args:
        place: names the row in errors.
        setting: names the template in errors.

    Raises:
        DataError: the template fails for this row; the message names the row and the reason.
    """
    pieces, length = [], 0
    try:
        for piece in compiled(template).generate(dict(row)):
            length += len(piece)
            if length > LONGEST_TEXT:
                raise DataError(
                    f"{place}: {setting} writes more than {LONGEST_TEXT:,} characters; shorten the template, or "
                    "remove the row"
                )
            pieces.append(piece)
    except UndefinedError as error:
        columns = ", ".join(map(str, row)) or "(none)"
        raise DataError(f"{place}: {setting} fails: {error}; the columns are {columns}") from error
    except (TemplateError, *BROKEN) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{place}: {setting} fails: {type(error).__name__}: {error}; fix the template") from error
    return "".join(pieces)
