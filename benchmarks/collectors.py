"""Frames per second of environments and collectors, compared with a bare loop and with other systems.

All subjects run CartPole and Pendulum with one torch thread, batches of 1000 frames and the same policy: a plain
module of two layers of 64. stable-baselines3 uses its own policy of that size. The bare loop steps one gymnasium
environment and keeps observation, action, reward, flags and next observation in preallocated tensors. Every subject
runs in a separate process and takes turns with the bare loop there. Ratios refer to that bare loop, so a busy machine
slows both. "start" is the time to the first batch, "close" the time of the shutdown, both for the first time in the
process.

TorchRL refuses a plain module if observations have several entries, and in its AsyncBatchedCollector; there it gets
the same policy as a TensorDict module. Its AsyncBatchedCollector is measured with its defaults and with its fastest
options; claims use the better of the two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collection.tasks import TASKS
from harness import Claim, Times, arguments, print_table, report

FOLDER = Path(__file__).parent
TIMEOUT_S = 180
MOST_SHOWN = 2000
"""Characters of the error output of a failed process."""
CARTPOLE, PENDULUM = TASKS
OURS, PEER = "lucidrl", "TorchRL"
PLAIN, TRANSFORMED, MODULE = (
    "Collector",
    "Collector, StepCounter and RewardSum",
    "Collector, TensorDict module as policy",
)
IN_PROCESSES = ", processes"
PARALLEL = "Collector, ParallelEnv x8"
RAY = "RayCollector x2"
TARGETS = {
    PLAIN: 0.9,
    "Collector, SerialEnv x8": 3.0,
    PARALLEL: 1.5,
    "MultiSyncCollector x2": 1.4,
    "MultiAsyncCollector x2": 1.4,
    "AsyncBatchedCollector x2": 0.5,
}
"""Required frames per second of Lucid RL on CartPole, as multiples of the bare loop."""
DOCUMENTED = ((PLAIN, TRANSFORMED, MODULE), *((name,) for name in (*list(TARGETS)[1:], RAY)))
"""Subjects of Lucid RL and TorchRL, one process per tuple. The subjects of a tuple take turns: claims compare them."""
PROCESSES: Mapping[str, tuple[str, Sequence[tuple[str, ...]]]] = {
    "gymnasium": (
        "gymnasium_subjects",
        (("SyncVectorEnv x8",), ("AsyncVectorEnv x8",), ("two bare loops in two processes",)),
    ),
    "stable-baselines3": ("sb3_subjects", (("PPO.collect_rollouts",),)),
    PEER: ("torchrl_subjects", (*DOCUMENTED, (f"AsyncBatchedCollector x2{IN_PROCESSES}",))),
    OURS: ("lucidrl_subjects", DOCUMENTED),
}


@dataclass(frozen=True)
class Row:
    """The result of one subject on one task."""

    times: Times
    """Seconds per frame, in the same rounds as the bare loop and the other subjects of the process."""
    name: str
    start_s: float
    close_s: float

    @property
    def ratio(self) -> float:
        return self.times.speedup(self.name, "bare")

    @property
    def frames_per_s(self) -> float:
        return 1 / self.times.median(self.name)


Rows = dict[tuple[str, str, str], Row]
"""Results by system, subject and task."""


def measured(module: str, names: Sequence[str], rounds: int) -> dict[str, Any] | None:
    """Measure these subjects in a new process; None if it fails or exceeds the timeout."""
    command = [sys.executable, "-m", "collection.measure", f"collection.{module}", str(rounds), *names]
    with subprocess.Popen(
        command,
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            errors = f"no result within {TIMEOUT_S} s"
        finally:
            # Workers of the process share its session. Kill them, so that they do not disturb the next measurement.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        print(f"{module}, {' and '.join(names)} failed: {errors[-MOST_SHOWN:].strip()}")
        return None
    return json.loads(output.splitlines()[-1])


def measure_all(rounds: Mapping[str, int]) -> Rows:
    """Measure all subjects of these systems, each with the given number of rounds."""
    rows: Rows = {}
    for system, num_rounds in rounds.items():
        module, processes = PROCESSES[system]
        for names in processes:
            found = measured(module, names, num_rounds)
            if found is None and system == OURS:
                raise RuntimeError("a subject of Lucid RL failed; the table may lack only subjects of other systems")
            for task, results in (found or {}).items():
                times = Times({name: result["frame_s"] for name, result in results.items()})
                for name in names:
                    row = Row(times, name, results[name]["start_s"], results[name]["close_s"])
                    rows[system, name, task] = row
                    print(f"{system} {name} {task}: {row.frames_per_s:.0f} frames/s, {row.ratio:.2f}", flush=True)
    return rows


def claims(rows: Rows) -> list[Claim]:
    """The claims about Lucid RL that the results cover."""
    ours = {(name, task): row for (system, name, task), row in rows.items() if system == OURS}
    found = [
        Claim(f"{name} vs bare loop, CartPole", target, ours[name, CARTPOLE].ratio)
        for name, target in TARGETS.items()
        if (name, CARTPOLE) in ours
    ]
    if row := ours.get((PARALLEL, CARTPOLE)):
        found.append(Claim("ParallelEnv x8: time to the first batch", 3.0, row.start_s, at_most=True, unit="s"))
        found.append(Claim("ParallelEnv x8: time to close", 1.0, row.close_s, at_most=True, unit="s"))
    if row := ours.get((TRANSFORMED, CARTPOLE)):
        kept = row.times.speedup(TRANSFORMED, PLAIN)
        found.append(Claim("Collector with StepCounter and RewardSum vs without, CartPole", 0.9, kept))
    gains = {
        (name, task): row.ratio / peer
        for (name, task), row in ours.items()
        if name != MODULE and (peer := peer_ratio(rows, name, task))
    }
    without_ray = {row: gain for row, gain in gains.items() if row[0] != RAY}
    if without_ray:
        (name, task), smallest = min(without_ray.items(), key=lambda item: item[1])
        found.append(Claim(f"smallest speedup vs TorchRL, without Ray ({name}, {task})", 4.0, smallest))
    found += [Claim(f"{RAY} vs TorchRL, {task}", 2.0, gain) for (name, task), gain in gains.items() if name == RAY]
    return found


def peer_ratio(rows: Rows, name: str, task: str) -> float | None:
    """TorchRL's ratio in the same row, with the better options if there are two; None if not measured."""
    names = (name, f"{name}{IN_PROCESSES}")
    return max((row.ratio for peer in names if (row := rows.get((PEER, peer, task)))), default=None)


def print_rows(rows: Rows) -> None:
    lines = []
    for system, name in dict.fromkeys((system, name) for system, name, _ in rows):
        cells = [f"{system}: {name}"]
        for task in (CARTPOLE, PENDULUM):
            row = rows[system, name, task]
            cells += [f"{row.frames_per_s:,.0f}", f"{row.ratio:.2f}"]
        first = rows[system, name, CARTPOLE]
        lines.append((*cells, f"{first.start_s:.1f} s", f"{first.close_s:.1f} s"))
    header = ("system: subject", "CartPole frames/s", "x bare", "Pendulum frames/s", "x bare", "start", "close")
    print_table(lines, header)


def main() -> None:
    options = arguments(
        __doc__,
        rounds=(int, 7, "rounds per subject of Lucid RL and task"),
        peer_rounds=(int, 3, "rounds per subject of other systems and task"),
        systems=(str, ",".join(PROCESSES), "systems to measure, separated by commas"),
    )
    rows = measure_all({s: options.rounds if s == OURS else options.peer_rounds for s in options.systems.split(",")})
    print()
    print_rows(rows)
    print()
    report(claims(rows), options.json)


if __name__ == "__main__":
    main()
