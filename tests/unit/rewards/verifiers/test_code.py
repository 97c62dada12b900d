"""Code earns its reward only by passing tests."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest

from lucidrl.errors import ConfigError, DataError
from lucidrl.rewards.interfaces import Completion, Limits
from lucidrl.rewards.pool import VerifierPool
from lucidrl.rewards.sandbox import Isolation
from lucidrl.rewards.verifiers import code as code_module
from lucidrl.rewards.verifiers import make_verifier
from tests.unit.rewards.verifiers.scoring import outcome, score

RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = ["assert double(1) == 2", "assert double('a') == 'aa'", "assert double(-3) == -6"]


def fenced(code: str, language: str = "python") -> str:
    return f"My solution:\n```{language}\n{code}\n```\nThat is it."


def test_code_that_passes_all_tests_gets_the_reward():
    assert score("code", fenced(RIGHT), {"tests": TESTS}) == 1
    assert score("code", fenced(RIGHT), {"tests": "\n".join(TESTS)}) == 1
    assert score("code", fenced(RIGHT), {"unit_tests": json.dumps(TESTS)}, tests_column="unit_tests") == 1


@pytest.mark.parametrize("code", ["def double(x): return x", "import os; os._exit(0)", "def double(:"])
def test_wrong_code_gets_none(code):
    assert score("code", fenced(code), {"tests": TESTS}) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    ["raise SystemExit(0)", "", "\0", "x='\ud800'", "while True: pass", "import os\nwhile True: os.fork()",
     "import os\nfor i in range(99): os.write(3, f' {i}\\n'.encode())", "import sys; sys.exit = lambda *a: 0; 1/0",
     "def double(x):\n  import os; os._exit(0)", "def double(x):\n  raise SystemExit",
     "def double(x): return double(x)",
     "import builtins; builtins.compile = None", "print('passed ' * 10**6)", "(" * 5000, "x = 10**10**7"],
)  # fmt: skip
def test_wrong_and_hostile_code_gets_none(code):
    assert score("code", fenced(code), {"tests": TESTS}, limits=Limits(0.4)) == 0


def test_the_fraction_of_passed_tests():
    numbers_only = "def double(x):\n    return 2 * int(x)"
    assert score("code", fenced(numbers_only), {"tests": TESTS}, reward="fraction") == pytest.approx(2 / 3)
    assert score("code", fenced(numbers_only), {"tests": TESTS}) == 0


@pytest.mark.slow
def test_code_that_takes_too_long_fails_its_tests_before_the_pool_times_out():
    limits = Limits(timeout_s=5.0)  # the code gets 4 s of it, and a busy machine the rest
    loops_at_3 = fenced("def double(x):\n    while x == -3: pass\n    return 2 * x")
    make = partial(make_verifier, "code", {"reward": "fraction"}, limits)
    with VerifierPool("code", make, limits=limits, num_workers=1) as pool:
        found = pool.submit(Completion(loops_at_3, 1), {"tests": TESTS}).result(30)
    assert (found.outcome, found.score) == ("scored", pytest.approx(2 / 3))


def test_all_runs_of_a_completion_share_the_timeout():
    pairs = [{"input": "", "output": ""}] * 20
    start = time.monotonic()
    assert score("code", fenced("while True: pass"), {"tests": pairs}, limits=Limits(0.4), reward="fraction") == 0
    assert time.monotonic() - start < 1.4


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "2\n3\n", "output": "5"}, {"input": "1\n1\n", "output": "2\n\n"}],
        pytest.param({"inputs": ["2\n3\n", "1\n1\n"], "outputs": ["5\n", "2  \n"]}, marks=pytest.mark.slow),
        pytest.param('[{"input": "2\\n3", "output": "5"}, {"input": "1\\n1", "output": "2"}]', marks=pytest.mark.slow),
    ],
)
def test_programs_are_compared_by_their_output(tests):
    program = "if __name__ == '__main__':\n    print(int(input()) + int(input()))"
    assert score("code", fenced(program), {"tests": tests}) == 1
    assert score("code", fenced("print(5)"), {"tests": tests}) == 0
    assert score("code", fenced("print(5)"), {"tests": tests}, reward="fraction") == 0.5
    assert score("code", fenced("print(5); raise SystemExit(1)"), {"tests": tests}, reward="fraction") == 0


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (fenced("x = 0") + "\n" + fenced(RIGHT), {}, 1),
        (fenced("x = 0") + "\n" + fenced(RIGHT), {"block": "first"}, 0),
        (fenced(RIGHT, "") + "\n" + fenced("pip install x", "bash"), {}, 1),
        (RIGHT, {"block": "whole"}, 1),
        (RIGHT, {}, "parse failure"),
        (fenced("echo", "bash"), {}, "parse failure"),
        ("```python\n" + RIGHT, {}, "parse failure"),
        ("", {"block": "whole"}, "parse failure"),
        (fenced("def double(x): return sqrt(x * x * 4)"), {"setup": "from math import *"}, 0),
    ],
)
def test_which_block_is_the_code(text, options, expected):
    assert outcome("code", text, {"tests": TESTS}, **options) == expected


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([], "holds no tests"),
        (3, "tests must be assert statements"),
        (["assert (", "x"], "is not valid Python"),
        ([{"input": 1, "output": "2"}], "pairs of strings"),
        (["assert 1", {"input": "", "output": ""}], "tests must be"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ("[1,", "which is not JSON"),
        ([{"input": "", "output": "x" * 70_000}], "the sandbox keeps"),
        (None, "column 'tests' is empty"),
    ],
)
def test_unusable_tests_are_errors(tests, expected):
    with pytest.raises(DataError, match=expected):
        score("code", fenced(RIGHT), {"tests": tests})


def test_weak_isolation_is_refused_or_warned_about(monkeypatch, caplog):
    code_module._check_isolation.cache_clear()
    monkeypatch.setattr(code_module, "_isolation", lambda: Isolation((), {"network": "not permitted"}))
    try:
        with pytest.raises(ConfigError, match=r"network \(not permitted\)"):
            score("code", fenced(RIGHT), {"tests": TESTS}, isolation="required")
        assert score("code", fenced(RIGHT), {"tests": TESTS}) == 1
        assert "runs with limits, but without this isolation" in caplog.text
    finally:
        code_module._check_isolation.cache_clear()
