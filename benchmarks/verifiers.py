"""Verifiers in killable processes: hostile completions, math verifications per second, and the start of a pool.

1,000 completions try to hang, crash or flood the math, code and regex verifiers. Every one must have an outcome within
its timeout plus a second, and leave neither processes nor memory behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import psutil
from harness import Claim, arguments, print_table, report

from lucidrl.rewards.interfaces import Completion, Limits
from lucidrl.rewards.outcome import Verified
from lucidrl.rewards.pool import VerifierPool
from lucidrl.rewards.verifiers import make_verifier

TIMEOUT_S = 0.5
LIMITS = Limits(TIMEOUT_S)
NUM_HOSTILE = 1000
NUM_MATH = 3000
GROWTH_MB = 16.0
"""Of the pools' memory over all hostile completions; a runner's heap varies by a few MB."""
PR_SET_CHILD_SUBREAPER = 36

INVALID = "\udcff\udcfe invalid \ud800"
HUGE = "x" * 10_000_000

Items = Sequence[tuple[Completion, Mapping[str, Any]]]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def boxed(latex: str) -> str:
    return rf"\boxed{{{latex}}}"


MATH = [
    boxed("10**10**10"),
    boxed("10^{10^{10}}"),
    boxed("9!!!!!!!!"),
    boxed("((((9!)!)!)!)!"),
    boxed(r"\frac{1}{" * 150 + "2" + "}" * 150),
    boxed(r"\sqrt{" * 300 + "2" + "}" * 300),
    boxed("(" * 900 + "x" + ")" * 900),
    boxed("{" * 900 + "1" + "}" * 900),
    boxed(r"\sum_{n=1}^{10^{100}} n^{n}"),
    boxed(r"\int_0^1 \sin(x^{x^{x}}) dx"),
    boxed("(x+y+z+1)^{400}"),
    boxed("1e999999999"),
    boxed("2^{2^{2^{2^{2^{2}}}}}"),
    r"\boxed{" * 3000,
    boxed(HUGE),
    boxed(INVALID),
    INVALID + boxed("0.5"),
    "",
]
CODE = [
    "while True: pass",
    "import os\nwhile True: os.fork()",
    "import os\nfor _ in range(200):\n    os.fork()",
    "import os\nos._exit(0)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(999)\n    os._exit(0)",
    "import subprocess\nsubprocess.Popen(['sleep', '999'], start_new_session=True)",
    "import threading\nwhile True: threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()",
    "print('x' * 10_000_000)",
    "import sys\nsys.stderr.write('x' * 10_000_000)",
    "str(10**10**10)",
    "x = [0] * 10**9",
    "x = '1'\nwhile True: x += x",
    "(" * 5000 + ")" * 5000,
    "def f(): return f()\nf()",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "import time\ntime.sleep(999)",
    "open('full', 'w').write('x' * 10**9)",
    f"x = {INVALID!r}",
    INVALID,
    "import ctypes\nctypes.string_at(0)",
]
REGEX = [
    "a" * 40 + "b",
    "a" * 2000 + "b",
    "a" * 10_000_000 + "b",
    "b" * 10_000_000,
    "a" * 30 + INVALID,
    ("a" * 35 + "b\n") * 1000,
    HUGE,
    INVALID,
    "",
]
HOSTILE: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "math": ({}, MATH, {"answer": r"\frac{1}{2}+x"}),
    # A fork bomb of root needs a process namespace.
    "code": ({"isolation": "required"}, [fenced(code) for code in CODE], {"tests": ["assert 1 == 1"]}),
    "regex": ({"pattern": "^(a+)+$"}, REGEX, {}),
}


def items_of(texts: Sequence[str], row: Mapping[str, Any], count: int) -> Items:
    return [(Completion(texts[number % len(texts)], 1), row) for number in range(count)]


def verify(pool: VerifierPool, items: Items) -> list[Verified]:
    return asyncio.run(pool.verify(items))


def used_mb(pool: VerifierPool) -> float:
    """Private memory of the pool's processes."""
    verify(pool, [(Completion("", 1), {"answer": "1", "tests": ["assert 1"]})] * 8)  # all runners are there
    worker = psutil.Process(pool.pid)
    return sum(process.memory_full_info().uss for process in [worker, *worker.children(recursive=True)]) / 2**20


def hostile(num_workers: int, total: int) -> list[Claim]:
    found: list[Verified] = []
    growth_mb = 0.0
    for number, (name, (kwargs, texts, row)) in enumerate(HOSTILE.items()):
        count = total // len(HOSTILE) + (number < total % len(HOSTILE))
        make = partial(make_verifier, name, kwargs, LIMITS)
        with VerifierPool(name, make, limits=LIMITS, num_workers=num_workers) as pool:
            verify(pool, items_of(texts, row, len(texts)))
            before_mb = used_mb(pool)
            start = time.perf_counter()
            outcomes = verify(pool, items_of(texts, row, count))
            seconds = time.perf_counter() - start
            growth_mb = max(growth_mb, used_mb(pool) - before_mb)
        counts = Counter(outcome.outcome for outcome in outcomes)
        slowest = max(outcomes, key=lambda outcome: outcome.seconds)
        print(f"{name}: {dict(counts)}, slowest {slowest.seconds:.2f} s, all in {seconds:.0f} s", flush=True)
        found += outcomes
    left = [child for child in psutil.Process().children(recursive=True) if "resource_tracker" not in cmdline(child)]
    slowest_s = max(outcome.seconds for outcome in found)
    return [
        Claim("hostile completions with an outcome", total, len(found), unit=""),
        Claim("slowest outcome of a hostile completion", TIMEOUT_S + 1, slowest_s, at_most=True, unit="s"),
        Claim("processes left by hostile completions", 0, len(left), at_most=True, unit=""),
        Claim("memory growth of a pool over them", GROWTH_MB, growth_mb, at_most=True, unit="MB"),
    ]


def cmdline(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def pairs(kind: str) -> tuple[list[str], list[str]]:
    """Completions and reference answers, all different."""
    numbers = range(NUM_MATH)
    match kind:
        case "integers and fractions":
            latex = [str(7 * n) if n % 2 else rf"\frac{{{n + 1}}}{{{n + 2}}}" for n in numbers]
            return [f"So the result is {boxed(text)}." for text in latex], latex
        case "wrong integers and fractions":
            latex = [str(7 * n) if n % 2 else rf"\frac{{{n + 1}}}{{{n + 2}}}" for n in numbers]
            return [f"So the result is {boxed(text)}." for text in latex], [*latex[2:], *latex[:2]]
        case "symbolic":
            return [boxed(rf"{n + 1}x+\sqrt{{2}}") for n in numbers], [rf"\sqrt{{2}}+{n + 1}x" for n in numbers]
        case _:
            return [boxed(rf"{n + 1}x+\sqrt{{2}}") for n in numbers], [rf"\sqrt{{3}}+{n + 1}x" for n in numbers]


def speed(num_workers: int) -> list[Claim]:
    start = time.perf_counter()
    ready_s = []
    for _ in range(3):
        start = time.perf_counter()
        VerifierPool("math", partial(make_verifier, "math", {}), num_workers=num_workers).shutdown()
        ready_s.append(time.perf_counter() - start)
    per_second: dict[str, float] = {}
    with VerifierPool("math", partial(make_verifier, "math", {}), num_workers=num_workers) as pool:
        kinds = ("integers and fractions", "wrong integers and fractions", "symbolic", "wrong symbolic")
        for kind in kinds:
            completions, answers = pairs(kind)
            count = NUM_MATH if "integers" in kind else NUM_MATH // 10
            items = [
                (Completion(text, 1), {"answer": answer})
                for text, answer in zip(completions[:count], answers[:count], strict=True)
            ]
            verify(pool, items[:50])
            start = time.perf_counter()
            outcomes = verify(pool, items)
            per_second[kind] = count / (time.perf_counter() - start)
            expected = 0.0 if "wrong" in kind else 1.0
            wrong = [outcome for outcome in outcomes if outcome.score != expected]
            assert not wrong, f"{len(wrong)} of {count} {kind} were not scored {expected}: {wrong[0]}"
    print_table([(kind, f"{rate:.0f}") for kind, rate in per_second.items()], ("math answers", "verified per second"))
    return [
        Claim("math verifications per second (integers, fractions)", 500, per_second[kinds[0]], unit="/s"),
        Claim("math verifier ready", 1.0, median(ready_s), at_most=True, unit="s"),
    ]


def main() -> None:
    options = arguments(__doc__, hostile=(int, NUM_HOSTILE, "number of hostile completions"))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # every orphan becomes a child of this process, and is counted
    report([*speed(options.threads), *hostile(options.threads, options.hostile)], options.json)


if __name__ == "__main__":
    main()
