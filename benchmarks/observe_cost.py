"""The cost of observing: runs of the demo with everything that observes on and off take turns in one process.

On: metrics.jsonl, TensorBoard, samples, monitor, spans and the breakdown of every step. Off: none of these. Both runs
of a pair do the same work, with the same seed, so each step is compared with the same step of the other run. The result
is the median of these ratios: a pause of the machine changes one of them. The interval resamples whole pairs. Rare
costs, such as writing samples, hardly move a median; the accounted share includes them.

Known limit: on two quiet cores the median of 12 pairs was 1.017 and the upper end of its interval 1.032, above the
target of 1.03; on another machine 20 pairs gave 1.015 and 1.038. Whole runs instead of steps gave 1.016 and 1.070.
The accounted share was 0.7 %; the rest of the interval is noise of the machine, which more pairs reduce.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

from harness import BOOTSTRAPS, Claim, arguments, read_metrics, report, without_spans

NOT_MEASURED = ["validation.num_prompts=0", "checkpoint.every=0", "checkpoint.final=false"]
ON = ["tracking.tensorboard=true", "tracking.monitor=true", "tracking.monitor_interval_s=1"]
OFF = ["tracking.tensorboard=false", "tracking.monitor=false"]
LOGGED = ("log_metrics", "log_samples", "log_warning", "log_plot_token_mult_prob_error")


class StepTimes:
    """A watcher that notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, step: int, metrics: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_validation(self, step: int, metrics: Any) -> None: ...

    def on_samples(self, step: int, message_logs: Any, rewards: Any) -> None: ...

    def announce(self, message: str) -> None: ...


@contextmanager
def without_observing() -> Iterator[None]:
    from lucidrl.algorithms.step_clock import StepClock
    from lucidrl.utils.logger.fanout import Logger

    with ExitStack() as stack:
        for name in LOGGED:
            stack.enter_context(mock.patch.object(Logger, name, return_value=None))
        stack.enter_context(mock.patch.object(StepClock, "lap", return_value={"step_s": 1.0}))
        stack.enter_context(mock.patch.object(StepClock, "end", return_value={}))
        stack.enter_context(without_spans())
        yield


def seconds_of_steps(folder: Path, steps: int, threads: int, is_observed: bool) -> list[float]:
    """Seconds of each step of a run, without its first step."""
    from lucidrl.recipes.configs import GRPORunConfig
    from lucidrl.recipes.run import train
    from lucidrl.recipes.settings import preset_path
    from lucidrl.utils.config import load_config

    samples = f"tracking.dump_samples_every={max(1, steps // 2)}"
    overrides = [f"grpo.max_steps={steps}", f"num_threads={threads}", samples, *NOT_MEASURED]
    config = load_config(GRPORunConfig, preset_path("demo"), overrides=[*overrides, *(ON if is_observed else OFF)])
    folder.mkdir(parents=True)
    watcher = StepTimes()
    with nullcontext() if is_observed else without_observing():
        train(config, folder, watcher)
    return [end - start for start, end in pairwise(watcher.ends)]


def interval_over_pairs(ratios: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95% bootstrap interval of the median of all steps' ratios, for ratios by pair."""
    draw = random.Random(0)
    medians = sorted(median(chain(*draw.choices(ratios, k=len(ratios)))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS)]


def claims_of(ratios: Sequence[Sequence[float]], observed: Sequence[Path]) -> list[Claim]:
    low, high = interval_over_pairs(ratios)
    print(
        f"demo step with everything observed vs nothing, {len(ratios)} pairs of {len(ratios[0])} steps: "
        f"{median(chain(*ratios)):.4f}, 95% interval [{low:.4f}, {high:.4f}]"
    )
    overhead_pct = fmean(value for folder in observed for value in read_metrics(folder, "observe/overhead_pct"))
    whole_s = sum(value for folder in observed for value in read_metrics(folder, "time/whole_step_s"))
    other_s = sum(value for folder in observed for value in read_metrics(folder, "time/exclusive/other_s"))
    return [
        Claim("demo step, everything observed vs nothing: upper end of the 95% interval", 1.03, high, at_most=True),
        Claim("demo: accounted cost of observing, share of a step", 1, overhead_pct, at_most=True, unit="%"),
        Claim("demo: time in no phase, share of a step", 5, 100 * other_s / whole_s, at_most=True, unit="%"),
    ]


def main() -> None:
    options = arguments(
        __doc__, pairs=(int, 12, "pairs of runs"), steps=(int, 40, "steps per run, the first is not counted")
    )
    ratios, observed = [], []
    with tempfile.TemporaryDirectory() as name:
        seconds_of_steps(Path(name, "warmup"), 2, options.threads, is_observed=True)
        for number in range(options.pairs):
            seconds = {}
            # The order alternates, so a machine that slows down favours neither.
            for is_observed in (True, False) if number % 2 else (False, True):
                folder = Path(name, f"{number}-{is_observed}")
                seconds[is_observed] = seconds_of_steps(folder, options.steps, options.threads, is_observed)
            ratios.append([on / off for on, off in zip(seconds[True], seconds[False], strict=True)])
            observed.append(Path(name, f"{number}-True"))
        claims = claims_of(ratios, observed)
    report(claims, options.json)


if __name__ == "__main__":
    main()
