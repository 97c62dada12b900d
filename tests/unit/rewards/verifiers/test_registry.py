"""Verifiers by name: mistakes are one sentence, and none needs torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import ParseFailure
from lucidrl.rewards.verifiers import VERIFIERS, make_verifier
from tests.unit.rewards.verifiers.scoring import outcome, score


def test_an_unknown_verifier_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"^unknown verifier 'numerc'; did you mean numeric\?$"):
        make_verifier("numerc", {})


def test_an_unknown_option_is_refused_with_a_suggestion():
    expected = r"^unknown key reward\.kwargs\.absolute_tolerence; did you mean reward\.kwargs\.absolute_tolerance\?$"
    with pytest.raises(ConfigError, match=expected):
        make_verifier("numeric", {"absolute_tolerence": 0.1})


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("numeric", {"relative_tolerance": -1}, "relative_tolerance"),
        ("regex", {}, r"reward\.kwargs\.pattern is required"),
        ("regex", {"pattern": "("}, "not a valid regular expression"),
        ("regex", {"pattern": "(a)", "group": 2}, "group=2 is not a group"),
        ("json_schema", {}, "either json_schema or schema_column"),
        ("overlong", {"max_tokens": 10, "buffer_tokens": 11}, "buffer_tokens=11"),
        ("length", {"max_tokens": 10, "free_tokens": 10}, "free_tokens=10"),
        ("choice", {"letters": "AAB"}, "must be letters, each different"),
    ],
)
def test_invalid_options_are_refused(name, kwargs, expected):
    with pytest.raises(ConfigError, match=expected):
        make_verifier(name, kwargs)


@pytest.mark.slow
def test_no_verifier_imports_torch_or_numpy():
    code = """
import sys
from lucidrl.rewards.interfaces import Completion
from lucidrl.rewards.verifiers import VERIFIERS, make_verifier
options = {"regex": {"pattern": "x"}, "json_schema": {"json_schema": {}}, "length": {"max_tokens": 9},
           "overlong": {"max_tokens": 9, "buffer_tokens": 3}}
for name in VERIFIERS:
    make_verifier(name, options.get(name, {}))
print([name for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math"])
def test_a_missing_column_lists_the_columns(name):
    expected = "column 'answer' does not exist; the row has the columns question, solution; .*answer_column"
    with pytest.raises(DataError, match=expected):
        score(name, "1", {"question": "?", "solution": "1"})


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math"])
@pytest.mark.parametrize("value", [None, [], {"a": 1}, b"A"])
def test_an_unusable_answer_is_an_error(name, value):
    with pytest.raises(DataError, match="column 'answer'"):
        score(name, "A", {"answer": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("numeric", "many"), ("numeric", "1e999999"), ("numeric", "1/0"), ("choice", "F"), ("math", r"\frac{1}{0}"),
     ("math", r"\frac{1}{"), ("math", ""), ("math", "x" * 3000)],
)  # fmt: skip
def test_an_answer_that_cannot_be_parsed_is_named(name, value):
    with pytest.raises(DataError, match=r"the reference answer '") as caught:
        score(name, r"\boxed{A}", {"answer": value})
    assert value.replace("\\", "\\\\")[:20] in str(caught.value)


@pytest.mark.parametrize("name", ["exact", "numeric", "choice", "math"])
def test_column_marker_and_several_answers(name):
    wrong, right = ("B", "A") if name == "choice" else ("7", "5")
    row = {"solution": [f"because ... #### {right}", f"or #### {right}"]}
    options = {"answer_column": "solution", "answer_after": "####", "completion_after": "</think>"}
    assert score(name, f"<think>{wrong}</think>{right}", row, **options) == 1
    assert score(name, f"<think>{right}</think>{wrong}", row, **options) == 0
    assert outcome(name, right, row, **options) == "parse failure"
    with pytest.raises(DataError, match="does not contain '####'"):
        score(name, f"</think>{right}", {"solution": right}, **options)


@pytest.mark.parametrize("name", [name for name in VERIFIERS if name not in ("length", "overlong")])
def test_ten_megabytes_are_a_parse_failure(name):
    options = {"regex": {"pattern": "x", "group": 0}, "json_schema": {"json_schema": {}}}.get(name, {})
    row = {"answer": "A" if name == "choice" else "1", "tests": ["assert True"]}
    with pytest.raises(ParseFailure, match="10,000,000 characters"):
        score(name, "x" * 10_000_000, row, **options)


def test_the_page_lists_every_verifier_and_option():
    page = Path(__file__).parents[4].joinpath("docs/verifiers.md").read_text()
    for name, entry in VERIFIERS.items():
        assert f"`{name}`" in page
        for option, field in entry.config.model_fields.items():
            assert field.description, f"{name}.{option} is not explained"
            assert f"`{option}`" in page, f"{name}.{option}"
