"""Hostile completions: every verifier returns, raises a parse failure, or can be killed; none gets a reward."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from lucidrl.rewards.interfaces import Completion, Limits, ParseFailure
from lucidrl.rewards.verifiers import VERIFIERS, make_verifier

TEXTS = {
    "tower": "10**10**10",
    "tower in LaTeX": r"\boxed{10^{10^{10}}}",
    "tower of nines": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{(((9!)!)!)!}",
    "backtracking": "a" * 5_000 + "!",
    "braces": r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "boxes": r"\boxed{" * 20_000 + "1" + "}" * 20_000,
    "open boxes": r"\boxed{" * 100_000,
    "fractions": r"\boxed{" + r"\frac{1}{" * 150 + "x" + "}" * 150 + "}",
    "parentheses": r"\boxed{" + "(" * 900 + "x" + ")" * 900 + "}",
    "dollars": "$" * 100_000,
    "brackets": r"\[ " * 100_000,
    "tags": "<answer>" * 100_000,
    "fences": "```\n" * 99_999,
    "digits": "9" * 900_000,
    "digits in a box": r"\boxed{" + "9" * 1_900 + "}",
    "commas": "1," * 400_000,
    "minus signs": "-" * 900_000,
    "surrogates": "\ud800\udfff" * 1_000 + r" \boxed{\udc80}",
    "NUL": "\0" * 10_000 + "\\boxed{\0}",
    "right to left": "\u202e\u0661\u0662 \\boxed{\u202e24}",
    "combining": "a" + "\u0301" * 100_000,
    "integral": r"\boxed{\int_0^1 x^{x^{x^{x}}} \sin(\tan(x)) dx}",
    "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^{n}}}",
    "white space": " " * 900_000,
    "lines": "\n" * 900_000,
}
OPTIONS = {
    "regex": {"pattern": r"(a+)+$", "group": 1},
    "json_schema": {"json_schema": {"type": "object", "patternProperties": {"^(a+)+$": {}}}},
    "length": {"max_tokens": 10},
    "overlong": {"max_tokens": 10, "buffer_tokens": 5},
    "code": {"block": "whole"},
}
ROW = {"answer": "24", "tests": ["assert f(1) == 2"]}
CHOICE = {"answer": "A"}
MAX_S = 3.0


def outcome_of(name: str, text: str) -> str:
    try:
        row = CHOICE if name == "choice" else ROW
        reward = make_verifier(name, OPTIONS.get(name, {}), Limits(0.6))(Completion(text, 5), row)
    except ParseFailure:
        return "parse failure"
    return "no reward" if reward <= 0 else f"reward {reward}"


@pytest.mark.parametrize("name", [name for name, entry in VERIFIERS.items() if not entry.runs_in_pool])
def test_verifiers_in_the_driver_take_linear_time(name):
    for text in TEXTS.values():
        started = time.monotonic()
        assert outcome_of(name, text) in ("parse failure", "no reward")
        assert time.monotonic() - started < MAX_S


@pytest.mark.slow
@pytest.mark.parametrize("what", TEXTS)
@pytest.mark.parametrize("name", [name for name, entry in VERIFIERS.items() if entry.runs_in_pool])
def test_verifiers_in_the_pool_return_or_can_be_killed(name, what):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(outcome_of(name, TEXTS[what])))
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(MAX_S) else "still running"
    except EOFError:
        found = "crashed"
    process.kill()
    process.join(MAX_S)
    assert process.exitcode is not None
    assert found in ("parse failure", "no reward", "still running")
