"""What happens to a run on Ray when something dies, hangs or is interrupted: each fault many times, as a table.

Every run is a command of its own on a cluster of two simulated nodes. It is hit in its third step, by one of its
workers at a moment that this knows exactly. Measured are the seconds until the driver tells of it in its log (for
what hangs, after the deadline of the call; of Ctrl-C, until the command has ended), what it says, what is left in the
cluster, and whether the run, resumed if it ended, ends to the bit where an unbroken one ends.

Results are written after each run; what is there already is not measured again.
"""

from __future__ import annotations

import json
import logging
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

import psutil
import ray
from harness import arguments
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lucidrl.checkpoint.manager import CheckpointManager  # noqa: E402
from lucidrl.recipes.configs import GRPORunConfig  # noqa: E402
from lucidrl.recipes.folder import DRIVER_LOG_NAME, LOGS_NAME  # noqa: E402
from lucidrl.recipes.run import train  # noqa: E402
from lucidrl.utils.config import load_config  # noqa: E402
from tests.faults import striking  # noqa: E402
from tests.faults.records import digests  # noqa: E402
from tests.faults.test_resume_after_kill import SETTINGS, Unwatched  # noqa: E402

STEPS, STRUCK_STEP = 4, 3
DEADLINE_S = 5.0
"""Of a call, where something hangs."""
CLEANUP_S = 15.0
"""After its end; what is there then is left."""
COMMON = (
    *SETTINGS,
    "collector.prompts_per_step=4",
    "collector.samples_per_prompt=2",
    "policy.train_global_batch_size=4",  # two optimizer steps a step, which need log-probabilities of before
    "cluster.num_workers=2",
    f"grpo.max_steps={STEPS}",
)
GENERATOR = ("cluster.num_nodes=1", "policy.generation.placement=separate")
LAYOUTS = {
    "one node": ("cluster.num_nodes=1", "policy.generation.placement=policy"),
    "a generator": (*GENERATOR, "policy.generation.nodes=policy"),
    "a generator elsewhere": (*GENERATOR, "policy.generation.nodes=other"),
    "two nodes": ("cluster.num_nodes=2", "policy.generation.placement=policy"),
    "environment": (
        "cluster.num_nodes=1",
        "env.name=tests.faults.striking:StruckEnv",
        "env.num_workers=2",
        "env.max_concurrency=2",
    ),
}


@dataclass(frozen=True)
class Row:
    """A fault."""

    blow: str
    phase: str
    layout: str = "one node"

    @property
    def name(self) -> str:
        return f"{self.blow} in {self.phase}"

    @property
    def hangs(self) -> bool:
        return self.blow.startswith("SIGSTOP")

    @property
    def is_survived(self) -> bool:
        """Whether the run goes on, with a replacement."""
        return self.blow.endswith("generator") or self.blow == "SIGKILL of an environment"

    def expected(self) -> list[str]:
        """What the command has to say: who, where, in which phase, and the last it wrote."""
        method = striking.PHASES[self.phase]
        if self.blow == "Ctrl-C":
            return ["interrupted: "] if self.phase == "start" else ["finishing this step", f"saved step {STRUCK_STEP}"]
        if self.blow == "SIGKILL of a node":
            return ["node ", " of 2 was lost in ", method, "its agent exited"]
        if self.blow == "SIGSTOP of a node":
            return ["node ", " of 2 was lost in ", method, "its agent did not reply"]
        if self.blow.endswith("generator"):
            how = (
                f"did not finish {method}"
                if self.hangs
                else f"was killed by SIGKILL, perhaps out of memory, in {method}"
            )
            return ["generator 0 of 1 on node ", how, f"of {self.phase}", "restarting generator 0"]
        if self.blow.endswith("environment"):
            how = "did not finish score" if self.hangs else "restarting environment worker"
            return ["tests.faults.striking:StruckEnv", "environment worker ", "on node ", how]
        if self.hangs:
            return ["ranks 0, 1 of 2", f"did not finish {method}", "on node ", f"of {self.phase}"]
        return ["rank 1 of 2 on node ", "was killed by SIGKILL", f"in {method}", f"begins call {STRUCK_STEP} of"]


SIGNALS = ("SIGKILL", "SIGSTOP")
GENERATOR_PHASES = ("generating", "receiving weights")
POLICY_PHASES = {"logprobs": "one node", "train": "one node", "refit": "a generator", "save": "one node"}
ROWS = [
    *(Row(f"{signal} of a rank", *phase) for signal in SIGNALS for phase in POLICY_PHASES.items()),
    Row("SIGKILL of a node", "train", "two nodes"),
    Row("SIGSTOP of a node", "train", "two nodes"),
    *(Row(f"{signal} of a rank", "broadcast", "a generator elsewhere") for signal in SIGNALS),
    *(Row(f"{signal} of a generator", phase, "a generator") for signal in SIGNALS for phase in GENERATOR_PHASES),
    *(Row(f"{signal} of an environment", "scoring", "environment") for signal in SIGNALS),
    Row("Ctrl-C", "start"),
    Row("Ctrl-C", "generate"),
    *(Row("Ctrl-C", *phase) for phase in POLICY_PHASES.items()),
    Row("Ctrl-C", "scoring", "environment"),
]


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    row: str
    seconds: float
    """From the fault to what the driver's log says of it, without the deadline of a call that hung; of Ctrl-C, to the
    end of the command."""
    exit_code: int
    unsaid: list[str]
    """Of what the command has to say."""
    left: list[str]
    """In the cluster and on this machine."""
    saved_step: int | None
    """The newest whole checkpoint."""
    lost_steps: int
    """That were reported as saved, and are not there."""
    ends_to_the_bit: bool | None
    """As an unbroken run, after a resume if it ended; None where nothing was saved yet, or it was not resumed."""


class Machine:
    """The simulated nodes, and what there is on them."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        self._other = self._cluster.add_node(num_cpus=4)
        self.address = self._cluster.address
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)

    @property
    def head_pid(self) -> int:
        return self._cluster.head_node.all_processes["raylet"][0].process.pid

    def renew(self) -> None:
        """Another second node, in place of one that was hit."""
        with suppress(Exception):  # it may be gone
            self._cluster.remove_node(self._other, allow_graceful=False)
        self._other = self._cluster.add_node(num_cpus=4)

    def left(self, pids: list[int], memory: set[str]) -> list[str]:
        """What is there that was not before the run, and does not go away: of processes, `pids` and those below us."""
        until = time.monotonic() + CLEANUP_S
        while (found := self._found(pids, memory)) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _found(self, pids: list[int], memory: set[str]) -> list[str]:
        actors = [
            f"actor {actor['ActorClassName']}"
            for actor in ray._private.state.actors().values()
            if actor["State"] == "ALIVE"
        ]
        groups = [
            group["name"] or "placement group"
            for group in placement_group_table().values()
            if group["state"] != "REMOVED"
        ]
        running = [f"process {process}" for process in map(_command_of, _below_us() | set(pids)) if process]
        return [*actors, *groups, *running, *left_memory(memory)]

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def _below_us() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _command_of(pid: int) -> str | None:
    """Of a process of a run; None of one that has ended, or belongs to Ray."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        if process.status() == psutil.STATUS_ZOMBIE or "resource_tracker" in command:
            return None
        return command[:80] if "spawn_main" in command or "striking" in command or "NodeAgent" in command else None
    except psutil.NoSuchProcess:
        return None


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def left_memory(before: set[str]) -> list[str]:
    """What was not there before and nobody uses: what a living process has is that of another program."""
    new = [f"/dev/shm/{name}" for name in shared_memory() - before]
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with suppress(OSError):  # ended meanwhile
            used += maps.read_text()
    return [path for path in new if path not in used]


def resumed(folder: Path, settings: tuple[str, ...], resume: bool = True) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    place = (f"run.root={folder.parent}", f"run.name={folder.name}")
    train(load_config(GRPORunConfig, overrides=[*settings, *place]), folder, Unwatched(), resume)
    return digests(folder)


def measured(
    row: Row, machine: Machine, folder: Path, settings: tuple[str, ...], whole: dict[str, str], is_to_end: bool
) -> Outcome:
    """Of one run, which is resumed if it is to end and has not."""
    memory = shared_memory()
    deadline = (f"cluster.call_timeout_s={DEADLINE_S}", f"env.timeout_s={DEADLINE_S}") if row.hangs else ()
    call = 1 if row.phase == "start" else STRUCK_STEP
    told = [*settings, *deadline]
    struck = striking.run_struck(folder, told, row.phase, call, row.blow, spared_pid=machine.head_pid)
    ended = time.time()
    note = json.loads(striking.note_of(folder).read_text())
    if row.blow == "SIGSTOP of a node":  # nobody can end what is frozen; it has to end when it wakes
        for pid in note["pids"]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    left = machine.left(note["near"], memory)
    if row.blow.endswith("node"):
        machine.renew()
    log = (folder / LOGS_NAME / DRIVER_LOG_NAME).read_text()
    noticed = ended if row.blow == "Ctrl-C" else time_of_first_trouble(log)
    announced = max([step for step in range(1, STEPS + 1) if f"saved step {step}" in struck.stdout], default=0)
    checkpoint = CheckpointManager(folder / "checkpoints").latest() if (folder / "checkpoints").exists() else None
    saved = checkpoint.step if checkpoint is not None else 0
    return Outcome(
        row=row.name,
        seconds=noticed - note["time"] - (DEADLINE_S if row.hangs else 0.0),
        exit_code=struck.returncode,
        unsaid=[text for text in row.expected() if text not in (struck.stdout if row.blow == "Ctrl-C" else log)],
        left=left,
        saved_step=saved or None,
        lost_steps=max(0, announced - saved),
        ends_to_the_bit=ends_as(whole, row, folder, settings) if saved and (is_to_end or row.is_survived) else None,
    )


def ends_as(whole: dict[str, str], row: Row, folder: Path, settings: tuple[str, ...]) -> bool:
    found = digests(folder) if row.is_survived else resumed(folder, settings)
    # Metrics of a run that went on tell how many were replaced.
    return all(found[what] == whole[what] for what in whole if not (row.is_survived and what == "metrics"))


def time_of_first_trouble(log: str) -> float:
    """When the driver first wrote a warning or an error."""
    for line in log.splitlines():
        date, clock, level, *_ = [*line.split(" ", 3), "", "", ""]
        if level in ("WARNING", "ERROR"):
            return datetime.fromisoformat(f"{date} {clock.replace(',', '.')}").timestamp()
    return float("nan")


def measure(rows: list[Row], runs: int, resumes: int, results: Path) -> None:
    """Do what is missing."""
    striking.use_striking_workers()
    machine = Machine()
    wholes: dict[str, dict[str, str]] = {}
    try:
        for row in rows:
            settings = (*COMMON, *LAYOUTS[row.layout], f"cluster.address={machine.address}")
            with tempfile.TemporaryDirectory() as root:
                if row.layout not in wholes:
                    wholes[row.layout] = resumed(Path(root) / "whole", settings, resume=False)
                for number in range(sum(outcome.row == row.name for outcome in read(results)), runs):
                    folder, whole = Path(root) / f"run_{number}", wholes[row.layout]
                    outcome = measured(row, machine, folder, settings, whole, is_to_end=number < resumes)
                    with results.open("a") as file:
                        file.write(json.dumps(asdict(outcome)) + "\n")
                    print(f"{row.name}, {number + 1} of {runs}: {outcome}", flush=True)
    finally:
        machine.close()


def read(results: Path) -> list[Outcome]:
    return [Outcome(**json.loads(line)) for line in results.read_text().splitlines()] if results.exists() else []


def table(outcomes: list[Outcome]) -> str:
    """In Markdown."""
    lines = ["| fault | runs | seconds, median | most | all is said | lost | left | ends to the bit |"]
    lines.append("| --- " * 8 + "|")
    for row in ROWS:
        found = [outcome for outcome in outcomes if outcome.row == row.name]
        if not found:
            continue

        def count(holds: Callable[[Outcome], Any], among: list[Outcome] = found) -> str:
            return f"{sum(bool(holds(outcome)) for outcome in among)} of {len(among)}"

        resumable = [outcome for outcome in found if outcome.ends_to_the_bit is not None]
        left = sum(bool(outcome.left) for outcome in found)
        seconds = [outcome.seconds for outcome in found]
        cells = [
            f"{row.name}{', after the deadline' if row.hangs else ''}",
            str(len(found)),
            f"{median(seconds):.1f}",
            f"{max(seconds):.1f}",
            count(lambda outcome: not outcome.unsaid),
            str(sum(outcome.lost_steps for outcome in found) or "nothing"),
            f"{left} times" if left else "nothing",
            count(lambda outcome: outcome.ends_to_the_bit, resumable) if resumable else "nothing was saved yet",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments(
        __doc__,
        rows=(str, "", "only faults whose name contains this, such as 'Ctrl-C' or 'in train'"),
        runs=(int, 10, "of each fault"),
        resumes=(int, 10, "of these, that are resumed if they end, which takes as long again"),
        results=(Path, Path(__file__).parent / "ray_faults.jsonl", "file with what was measured"),
    )
    rows = [row for row in ROWS if options.rows in row.name]
    measure(rows, options.runs, options.resumes, options.results)
    print(table(read(options.results)))


if __name__ == "__main__":
    main()
