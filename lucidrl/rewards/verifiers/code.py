"""`code`: run Python code of the completion against tests, in a sandbox."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import Completion, Limits, ParseFailure
from lucidrl.rewards.sandbox import Isolation, SandboxLimits, SandboxResult, run_python
from lucidrl.rewards.verifiers.reading import TextConfig, column_of, fenced_blocks, shortened, text_of

_log = logging.getLogger(__name__)

_FRACTION_FOR_CODE = 0.8
"""Fraction of the timeout of a verification; the rest is for the start and the end of the sandbox."""
_LANGUAGES = ("", "python", "py", "python3")

_RUN_TESTS = """
def run(write, loads, request):
    code, tests, secret = loads(request)
    space = {"__name__": "completion"}
    exec(compile(code, "<completion>", "exec"), space)
    for number, test in enumerate(tests):
        try:
            exec(compile(test, f"<test {number}>", "exec"), dict(space))
        except BaseException:
            continue
        write(3, f"{secret} {number}\\n".encode())

import json, os
run(os.write, json.loads, %r)
"""
"""Program that writes the index of each passed test to file descriptor 3."""


class CodeConfig(TextConfig):
    """The tests, the reward and the isolation."""

    tests_column: str = "tests"
    """Column of the tests: a string or a list of strings with `assert` statements; or pairs of standard input and
    expected output, as a list of `{input, output}` or as `{inputs: [...], outputs: [...]}`. Both forms may be JSON
    text."""
    setup: str = ""
    """Python code that runs before the code of the completion, such as imports."""
    block: Literal["last", "first", "whole"] = "last"
    """Which fenced Python block of the completion is the code; `whole`: all text of a completion without fences."""
    reward: Literal["all", "fraction"] = "all"
    """`all`: 1 if all tests pass, otherwise 0; `fraction`: the fraction of passed tests."""
    isolation: Literal["required", "best_effort"] = "best_effort"
    """What to do if the kernel refuses the namespaces that separate the code from outside files, network and processes:
    `required` raises an error, `best_effort` warns."""


@dataclass(frozen=True)
class _Pair:
    stdin: str
    stdout: str


class CodeVerifier:
    """Reward 1 for code that passes all tests, else 0; with `reward=fraction`, the fraction of passed tests.

    All runs of a completion share `_FRACTION_FOR_CODE` of the timeout; tests not passed by then count as failed.
    """

    def __init__(self, config: CodeConfig, limits: Limits) -> None:
        self._config = config
        self._code_timeout_s = _FRACTION_FOR_CODE * limits.timeout_s
        self._limits = SandboxLimits(cpu_s=math.ceil(self._code_timeout_s), memory_bytes=limits.memory_bytes)
        _check_isolation(config.isolation)

    def __call__(self, completion: Completion, row: Mapping[str, Any]) -> float:
        tests = self._tests(column_of(row, self._config.tests_column, "tests_column"))
        code = f"{self._config.setup}\n{self._code(text_of(completion, self._config))}"
        until = time.monotonic() + self._code_timeout_s
        num_passed = self._num_passed_asserts(code, tests, until) if isinstance(tests[0], str) else 0
        for test in tests:
            if isinstance(test, _Pair):
                passed = _is_output(self._run(code, until, test.stdin), test.stdout)
                num_passed += passed
                if not passed and self._config.reward == "all":
                    break
        return num_passed / len(tests) if self._config.reward == "fraction" else float(num_passed == len(tests))

    def _code(self, text: str) -> str:
        if self._config.block == "whole":
            if not text.strip():
                raise ParseFailure("the completion is empty")
            return text
        blocks = [content for language, content in fenced_blocks(text) if language in _LANGUAGES]
        if not blocks:
            raise ParseFailure("the completion has no fenced Python block")
        return blocks[-1 if self._config.block == "last" else 0]

    def _tests(self, value: Any) -> Sequence[str | _Pair]:
        """Read the tests: all are strings with `assert` statements, or all are pairs of input and output.

        Raises:
            DataError: the column holds something else; the message shows the value.
        """
        column = self._config.tests_column
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"column {column!r} holds {shortened(value)}, which is not JSON: {error}; fix the row"
                ) from error
        tests: list[Any] = [value] if isinstance(value, str) else _pairs(value)
        if not tests:
            raise DataError(f"column {column!r} holds no tests; give at least one")
        if all(isinstance(test, str) for test in tests):
            for test in tests:
                _check_compiles(test, column)
        elif not all(isinstance(test, _Pair) for test in tests):
            forms = "assert statements, or {input, output} pairs of strings"
            raise DataError(f"column {column!r} holds {shortened(value)}; tests must be {forms}")
        too_long = [test for test in tests if isinstance(test, _Pair) and len(test.stdout) > self._limits.output_chars]
        if too_long:
            problem = f"an expected output in column {column!r} has {len(too_long[0].stdout):,} characters"
            raise DataError(f"{problem}, but the sandbox keeps {self._limits.output_chars:,}; shorten the test")
        return tests

    def _run(self, code: str, until: float, stdin: str = "") -> SandboxResult | None:
        """Run code until the time `until` at most; None if that has passed."""
        left_s = until - time.monotonic()
        return run_python(code, stdin=stdin, limits=replace(self._limits, timeout_s=left_s)) if left_s > 0 else None

    def _num_passed_asserts(self, code: str, tests: Sequence[Any], until: float) -> int:
        secret = secrets.token_hex(16)
        result = self._run(_RUN_TESTS % json.dumps([code, tests, secret]), until)
        if result is None:
            return 0
        passed = {line.removeprefix(f"{secret} ") for line in result.report.splitlines() if line.startswith(secret)}
        return len(passed & {str(number) for number in range(len(tests))})


def _pairs(value: Any) -> list[Any]:
    """Convert mappings to pairs; return other values unchanged."""
    if isinstance(value, Mapping) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        if len(value["inputs"]) != len(value["outputs"]):
            count = f"{len(value['inputs'])} inputs and {len(value['outputs'])} outputs"
            raise DataError(f"the tests have {count}; give one output per input")
        value = [{"input": one, "output": other} for one, other in zip(value["inputs"], value["outputs"], strict=True)]
    elements = list(value) if isinstance(value, list | tuple) else [value]
    return [_pair(element) if isinstance(element, Mapping) else element for element in elements]


def _pair(element: Mapping[str, Any]) -> Any:
    stdin, stdout = element.get("input"), element.get("output")
    return _Pair(stdin, stdout) if isinstance(stdin, str) and isinstance(stdout, str) else element


def _check_compiles(test: str, column: str) -> None:
    try:
        compile(test, "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(
            f"the test {shortened(test)} in column {column!r} is not valid Python: {error}; fix the row"
        ) from error


def _is_output(result: SandboxResult | None, expected: str) -> bool:
    """Whether the code exited with 0 and printed the expected lines; white space at line ends is ignored."""
    return (
        result is not None
        and result.outcome == "ok"
        and not result.stdout_is_cut
        and _lines(result.stdout) == _lines(expected)
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@lru_cache(maxsize=1)
def _isolation() -> Isolation:
    return run_python("pass").isolation


@lru_cache(maxsize=2)
def _check_isolation(required: Literal["required", "best_effort"]) -> None:
    isolation = _isolation()
    if isolation.is_boundary:
        return
    reasons = ", ".join(f"{kind} ({reason})" for kind, reason in isolation.missing.items())
    problem = f"the kernel refuses some isolation of code that the model writes: {reasons}"
    if required == "required":
        raise ConfigError(f"{problem}; allow user namespaces, or set reward.kwargs.isolation=best_effort")
    _log.warning("%s; the code runs with limits, but without this isolation (see docs/verifiers.md)", problem)
