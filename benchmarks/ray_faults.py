"""Inject faults into runs on Ray, several times each, and print a Markdown table of the results.

Each run is a separate command on a cluster of two simulated nodes. One of its workers injects the fault in the third
step: it kills or stops itself, its node or the command. The benchmark measures how soon the driver reports the fault,
whether the report is complete, what remains in the cluster, and whether the run ends bit-identical to an uninterrupted
run. docs/cluster.md explains the columns.

Each result is appended to a file. A later call measures only the missing runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from harness import arguments
from simulated_nodes import Machine, shared_memory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lucidrl.checkpoint.manager import CheckpointManager  # noqa: E402
from lucidrl.recipes.configs import GRPORunConfig  # noqa: E402
from lucidrl.recipes.run import train  # noqa: E402
from lucidrl.utils.config import load_config  # noqa: E402
from lucidrl.utils.run_folder import DRIVER_LOG_NAME, LOGS_NAME  # noqa: E402
from tests.faults import injection  # noqa: E402
from tests.faults.records import digests  # noqa: E402
from tests.faults.test_resume_after_kill import SETTINGS, Unwatched  # noqa: E402

STEPS, FAULT_STEP = 4, 3
CALL_TIMEOUT_S = 5.0
"""The timeout of calls in runs with a process that hangs."""
COMMON = (
    *SETTINGS,
    "collector.prompts_per_step=4",
    "collector.samples_per_prompt=2",
    "policy.train_global_batch_size=4",  # two optimizer steps per training step: the loss needs prev_logprobs
    "cluster.num_workers=2",
    f"grpo.max_steps={STEPS}",
)
GENERATOR = ("cluster.num_nodes=1", "policy.generation.placement=separate")
LAYOUTS = {
    "one node": ("cluster.num_nodes=1", "policy.generation.placement=policy"),
    "a generator": (*GENERATOR, "policy.generation.nodes=policy"),
    "a generator on another node": (*GENERATOR, "policy.generation.nodes=other"),
    "two nodes": ("cluster.num_nodes=2", "policy.generation.placement=policy"),
    "environment": (
        "cluster.num_nodes=1",
        "env.name=tests.faults.injection:FaultyEnv",
        "env.num_workers=2",
        "env.max_concurrency=2",
    ),
}


@dataclass(frozen=True)
class Row:
    """A fault in a phase of a step: one row of the table."""

    fault: str
    phase: str
    layout: str = "one node"

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.phase.removeprefix('generator ')}"

    @property
    def hangs(self) -> bool:
        return self.fault.startswith("SIGSTOP")

    @property
    def is_survived(self) -> bool:
        """Whether the run continues, with a restarted worker."""
        return self.fault.endswith(("generator", "environment worker"))

    def expected_report(self) -> list[str]:
        """Parts of a complete report: process, node, phase and the last lines of the worker's log."""
        method = injection.PHASES[self.phase]
        if self.fault == "Ctrl-C":
            return ["interrupted: "] if self.phase == "start" else ["finishing this step", f"saved step {FAULT_STEP}"]
        if self.fault == "SIGKILL of a node":
            return ["node ", " of 2 was lost in ", method, "its agent exited"]
        if self.fault == "SIGSTOP of a node":
            return ["node ", " of 2 was lost in ", method, "its agent did not reply"]
        if self.fault.endswith("generator"):
            how = (
                f"did not finish {method}"
                if self.hangs
                else f"was killed by SIGKILL, perhaps out of memory, in {method}"
            )
            return ["generator 0 of 1 on node ", how, f"of {self.phase}", "restarting generator 0"]
        if self.fault.endswith("environment worker"):
            how = "did not finish score" if self.hangs else "was killed by SIGKILL"
            return ["environment worker ", "on node ", how, "restarting environment worker"]
        if self.hangs:
            return ["ranks 0, 1 of 2", f"did not finish {method}", "on node ", f"of {self.phase}"]
        return ["rank 1 of 2 on node ", "was killed by SIGKILL", f"in {method}", f"begins call {FAULT_STEP} of"]


SIGNALS = ("SIGKILL", "SIGSTOP")
GENERATOR_PHASES = ("generation", "generator refit")
POLICY_PHASES = {"logprobs": "one node", "train": "one node", "refit": "a generator", "save": "one node"}
ROWS = [
    *(Row(f"{signal} of a rank", *phase) for signal in SIGNALS for phase in POLICY_PHASES.items()),
    Row("SIGKILL of a node", "train", "two nodes"),
    Row("SIGSTOP of a node", "train", "two nodes"),
    *(Row(f"{signal} of a rank", "broadcast", "a generator on another node") for signal in SIGNALS),
    *(Row(f"{signal} of a generator", phase, "a generator") for signal in SIGNALS for phase in GENERATOR_PHASES),
    *(Row(f"{signal} of an environment worker", "scoring", "environment") for signal in SIGNALS),
    Row("Ctrl-C", "start"),
    Row("Ctrl-C", "generate"),
    *(Row("Ctrl-C", *phase) for phase in POLICY_PHASES.items()),
    Row("Ctrl-C", "scoring", "environment"),
]


@dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    row: str
    seconds: float
    """From the fault to the driver's first warning or error. For hangs, without the timeout of the call; for Ctrl-C, to
    the exit of the command."""
    exit_code: int
    missing: list[str]
    """The parts that the report lacks."""
    left: list[str]
    """What remains in the cluster and on this machine."""
    saved_step: int | None
    """The step of the newest complete checkpoint."""
    lost_steps: int
    """Steps that were reported as saved and are not on disk."""
    is_bit_identical: bool | None
    """Whether the run, resumed if it ended, equals an uninterrupted run; None if nothing was saved yet or the run was
    not resumed."""


def run_to_end(folder: Path, settings: tuple[str, ...], resume: bool) -> dict[str, str]:
    """Run in this process, and return the digests of the run folder."""
    folder.mkdir(exist_ok=True)
    place = (f"run.root={folder.parent}", f"run.name={folder.name}")
    train(load_config(GRPORunConfig, overrides=[*settings, *place]), folder, Unwatched(), resume)
    return digests(folder)


def measured(
    row: Row, machine: Machine, folder: Path, settings: tuple[str, ...], expected: dict[str, str], resume: bool
) -> Outcome:
    """Inject the fault into one run and measure what follows.

    Args:
        expected: digests of an uninterrupted run.
        resume: also resume the run if the fault ended it, and compare its digests.
    """
    memory = shared_memory()
    timeouts = (f"cluster.call_timeout_s={CALL_TIMEOUT_S}", f"env.timeout_s={CALL_TIMEOUT_S}") if row.hangs else ()
    call = 1 if row.phase == "start" else FAULT_STEP
    done = injection.run_with_fault(
        folder, [*settings, *timeouts], row.phase, call, row.fault, protected_pid=machine.head_pid
    )
    exited = time.time()
    record = json.loads(injection.record_path(folder).read_text())
    if row.fault == "SIGSTOP of a node":  # a stopped process exits only after it continues
        for pid in record["pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    left = machine.left(record["run_pids"], memory)
    if row.fault.endswith("node"):
        machine.replace_node()
    log = (folder / LOGS_NAME / DRIVER_LOG_NAME).read_text()
    reported = exited if row.fault == "Ctrl-C" else time_of_first_report(log)
    output = done.stdout if row.fault == "Ctrl-C" else log
    announced = max([step for step in range(1, STEPS + 1) if f"saved step {step}" in done.stdout], default=0)
    checkpoint = CheckpointManager(folder / "checkpoints").latest() if (folder / "checkpoints").exists() else None
    saved = checkpoint.step if checkpoint is not None else 0
    return Outcome(
        row=row.name,
        seconds=reported - record["time"] - (CALL_TIMEOUT_S if row.hangs else 0.0),
        exit_code=done.returncode,
        missing=[text for text in row.expected_report() if text not in output],
        left=left,
        saved_step=saved or None,
        lost_steps=max(0, announced - saved),
        is_bit_identical=ends_as(expected, row, folder, settings) if saved and (resume or row.is_survived) else None,
    )


def ends_as(expected: dict[str, str], row: Row, folder: Path, settings: tuple[str, ...]) -> bool:
    found = digests(folder) if row.is_survived else run_to_end(folder, settings, resume=True)
    # The metrics of a run that continued count its restarts.
    return all(found[name] == expected[name] for name in expected if not (row.is_survived and name == "metrics"))


def time_of_first_report(log: str) -> float:
    """When the driver logged its first warning or error."""
    for line in log.splitlines():
        date, clock, level, *_ = [*line.split(" ", 3), "", "", ""]
        if level in ("WARNING", "ERROR"):
            return datetime.fromisoformat(f"{date} {clock.replace(',', '.')}").timestamp()
    return float("nan")


def measure(rows: list[Row], runs: int, resumes: int, results: Path) -> None:
    """Measure the runs that the results lack."""
    injection.use_fault_workers()
    machine = Machine()
    uninterrupted: dict[str, dict[str, str]] = {}
    try:
        for row in rows:
            settings = (*COMMON, *LAYOUTS[row.layout], f"cluster.address={machine.address}")
            with tempfile.TemporaryDirectory() as root:
                if row.layout not in uninterrupted:
                    uninterrupted[row.layout] = run_to_end(Path(root) / "uninterrupted", settings, resume=False)
                for number in range(sum(outcome.row == row.name for outcome in read(results)), runs):
                    folder, expected = Path(root) / f"run_{number}", uninterrupted[row.layout]
                    outcome = measured(row, machine, folder, settings, expected, resume=number < resumes)
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
                    print(f"{row.name}, {number + 1} of {runs}: {outcome}", flush=True)
    finally:
        machine.close()


def read(results: Path) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []


def table(outcomes: list[Outcome]) -> str:
    """The table of docs/cluster.md, in Markdown."""
    lines = ["| fault | runs | median s | most s | complete report | lost | left | bit-identical |"]
    lines.append("| --- " * 8 + "|")
    for row in ROWS:
        found = [outcome for outcome in outcomes if outcome.row == row.name]
        if not found:
            continue

        def count(holds: Callable[[Outcome], Any], among: list[Outcome] = found) -> str:
            return f"{sum(bool(holds(outcome)) for outcome in among)} of {len(among)}"

        compared = [outcome for outcome in found if outcome.is_bit_identical is not None]
        left = sum(bool(outcome.left) for outcome in found)
        seconds = [outcome.seconds for outcome in found]
        cells = [
            f"{row.name}{', after the timeout' if row.hangs else ''}",
            str(len(found)),
            f"{median(seconds):.1f}",
            f"{max(seconds):.1f}",
            count(lambda outcome: not outcome.missing),
            str(sum(outcome.lost_steps for outcome in found) or "nothing"),
            f"{left} times" if left else "nothing",
            count(lambda outcome: outcome.is_bit_identical, compared) if compared else "nothing saved yet",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments(
        __doc__,
        rows=(str, "", "only faults whose name contains this, such as 'Ctrl-C' or 'in train'"),
        runs=(int, 10, "runs per fault"),
        resumes=(int, 10, "runs per fault that are resumed if the fault ended them; a resume doubles the duration"),
        results=(Path, Path(__file__).parent / "ray_faults.jsonl", "file of the results, one JSON line per run"),
    )
    rows = [row for row in ROWS if options.rows in row.name]
    measure(rows, options.runs, options.resumes, options.results)
    print(table(read(options.results)))


if __name__ == "__main__":
    main()
