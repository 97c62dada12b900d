"""Traces read back, and programs that make them, for tests of several parts."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARMED = {"LUCIDRL_PROFILING": "1"}


@dataclass
class Range:
    """A named range of a trace, with those directly in it."""

    name: str
    begin: float
    end: float
    thread: int
    inner: list[Range] = field(default_factory=list)


def read_trace(path: Path) -> dict[str, Any]:
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)


def ranges_of(path: Path) -> list[Range]:
    """All named ranges of a trace in the order in which they began; each knows what is directly in it."""
    events = [event for event in read_trace(path)["traceEvents"] if event.get("cat") == "user_annotation"]
    found = [Range(e["name"], e["ts"], e["ts"] + e["dur"], e["tid"]) for e in events]
    found = [each for each in found if not each.name.startswith("PyTorch Profiler")]
    found.sort(key=lambda each: (each.begin, -each.end))
    open_ones: dict[int, list[Range]] = {}
    for each in found:
        around = open_ones.setdefault(each.thread, [])
        while around and around[-1].end < each.end:
            around.pop()
        if around:
            around[-1].inner.append(each)
        around.append(each)
    return found


def counts_of(path: Path) -> Counter[str]:
    return Counter(each.name for each in ranges_of(path))


def nesting_of(path: Path) -> set[tuple[str, str]]:
    """Pairs of names of which the second is directly in the first."""
    return {(outer.name, inner.name) for outer in ranges_of(path) for inner in outer.inner}


def run_program(code: str, folder: Path, variables: dict[str, str] | None = None, timeout_s: float = 120) -> str:
    """The output of a separate program, run in that folder without the variables that arm."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("RL_PROFILING")}
    root = str(Path(__file__).parents[3])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
