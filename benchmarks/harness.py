"""Shared by all benchmarks: timing of candidates in turn, peak memory, and claims.

Claims of speed are ratios of candidates that took turns on the same machine, because absolute times depend on it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROUNDS = 5
BOOTSTRAPS = 2_000
NOISE = 0.97
"""Two equal candidates differ by a few percent on a quiet machine: "not slower" means at least this ratio."""


@dataclass(frozen=True)
class Claim:
    """A target and the measured value."""

    text: str
    target: float
    measured: float
    at_most: bool = False
    """Whether the target is an upper bound instead of a lower bound."""
    unit: str = "x"

    @property
    def is_met(self) -> bool:
        return self.measured <= self.target if self.at_most else self.measured >= self.target

    def row(self) -> tuple[str, str, str, str]:
        sign = "<=" if self.at_most else ">="
        target, measured = (f"{value:.3g} {self.unit}".strip() for value in (self.target, self.measured))
        return self.text, f"{sign} {target}", measured, "pass" if self.is_met else "miss"


class Times:
    """Seconds of each candidate in each round."""

    def __init__(self, seconds: Mapping[str, Sequence[float]]):
        self.seconds = seconds

    def median(self, name: str) -> float:
        return median(self.seconds[name])

    def speedup(self, ours: str, theirs: str) -> float:
        """How many times faster `ours` is: the median of the ratios of all rounds."""
        return median(b / a for a, b in zip(self.seconds[ours], self.seconds[theirs], strict=True))


def take_turns(candidates: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, warmups: int = 1) -> Times:
    """Time the candidates in turn: A B A B …, after `warmups` untimed rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(warmups + rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number >= warmups:
                seconds[name].append(time.perf_counter() - start)
    return Times(seconds)


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """The 95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS)]


@contextmanager
def without_spans() -> Iterator[None]:
    """Inside the context, spans do nothing."""
    from lucidrl.profiling import spans

    def do_nothing(*args: object) -> None: ...

    with (
        mock.patch.object(spans._OpenSpan, "__enter__", do_nothing),
        mock.patch.object(spans._OpenSpan, "__exit__", do_nothing),
    ):
        yield


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """The peak of tensor memory in `run`, without the memory that was allocated before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    recorded: Any = profiler.profiler
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def run_grpo(root: Path, overrides: Sequence[str], algorithm: str = "grpo") -> Path:
    """Run the command `lucidrl grpo`, or another one, below `root`; returns the run folder."""
    code, name = "from lucidrl.cli import main; main()", "run" if algorithm == "grpo" else algorithm
    command = [sys.executable, "-c", code, algorithm, *overrides, f"run.root={root}", f"run.name={name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return root / name


def read_metrics(folder: Path, name: str) -> list[float]:
    """The values of a metric of a run, by step."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if name in record]


def arguments(description: str | None, **options: tuple[type, object, str]) -> argparse.Namespace:
    """Parse a benchmark's command line: the common options and its own, each (type, default, help)."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the claims to this file")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    for name, (kind, default, text) in options.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser.parse_args()


def report(claims: Sequence[Claim], json_file: Path | None) -> None:
    """Print the claims, and write them to `json_file` if given."""
    print_table([claim.row() for claim in claims])
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(claim) | {"is_met": claim.is_met} for claim in claims], indent=2))


def print_table(
    rows: Sequence[Sequence[str]], header: Sequence[str] = ("claim", "target", "measured", "result")
) -> None:
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
