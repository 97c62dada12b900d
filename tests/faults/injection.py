"""Fault injection: the command line with workers that kill or stop themselves, their node or the command.

Environment variables select the fault, because they reach ranks on any node. `LUCIDRL_FAULT` is one of `FAULTS`.
`LUCIDRL_FAULT_AT` is a phase of a step and the number of its call, such as `train:3`. The worker that injects the fault
first writes the JSON file `LUCIDRL_FAULT_RECORD`: the time, the processes that get the signal, and the processes of the
run on the same node. Without these variables the workers behave as usual.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.models.generation import generation_worker
from lucidrl.models.policy import dtensor_policy_worker

ROOT = Path(__file__).parents[2]
PHASES = {
    "start": "__init__",
    "generate": "generator.generate",
    "logprobs": "scorer.logprobs",
    "train": "train",
    "refit": "get_weights_ipc_handles",
    "broadcast": "export.try_broadcast",
    "save": "checkpoints.begin",
    "generation": "generate",
    "generator refit": "take_weights",
    "scoring": "step",
}
"""The method that each phase begins with. The last three are methods of a generator and an environment, the others of a
policy worker or one of its components."""
DRIVER_PID = "LUCIDRL_FAULT_DRIVER_PID"
PROTECTED_PID = "LUCIDRL_FAULT_PROTECTED_PID"
"""The raylet of the head node, which the driver is connected to: faults of nodes spare this node."""

_TIMEOUT_S = 180.0
_calls: Counter[str] = Counter()


def kill_process() -> None:
    _send([os.getpid()], signal.SIGKILL)


def stop_process() -> None:
    _send([os.getpid()], signal.SIGSTOP)


def kill_node() -> None:
    """Kill the raylet of the node; the workers there must detect it themselves."""
    _send([_node().pid], signal.SIGKILL)
    time.sleep(60)


def stop_node() -> None:
    """Stop all processes of the node, as if its network failed; this process stops last."""
    _send([_node().pid, *(pid for pid in _run_pids() if pid != os.getpid()), os.getpid()], signal.SIGSTOP)


def interrupt() -> None:
    """Send Ctrl-C to all processes of the command's terminal."""
    _record([])
    os.killpg(int(os.environ[DRIVER_PID]), signal.SIGINT)


FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL of a rank": kill_process,
    "SIGSTOP of a rank": stop_process,
    "SIGKILL of a generator": kill_process,
    "SIGSTOP of a generator": stop_process,
    "SIGKILL of an environment worker": kill_process,
    "SIGSTOP of an environment worker": stop_process,
    "SIGKILL of a node": kill_node,
    "SIGSTOP of a node": stop_node,
    "Ctrl-C": interrupt,
}


def begin(phase: str) -> None:
    """Count a call of a phase, and inject the fault if it is due; a restarted worker does not inject it again."""
    _calls[phase] += 1
    print(f"begins call {_calls[phase]} of {phase}")  # noqa: T201 - in its log
    fault = os.environ.get("LUCIDRL_FAULT", "")
    if f"{phase}:{_calls[phase]}" == os.environ.get("LUCIDRL_FAULT_AT") and _is_selected(fault):
        FAULTS[fault]()


def _is_selected(fault: str) -> bool:
    """Whether this worker injects the fault: one that is not on the head node, or rank 1 of 2."""
    if fault.endswith("node"):
        is_target = _node().pid != int(os.environ[PROTECTED_PID])
    else:
        is_target = os.environ.get("WORLD_SIZE") != "2" or os.environ["RANK"] == "1"
    if not is_target:
        return False
    try:  # if several workers arrive at the same time, only the first injects the fault
        Path(os.environ["LUCIDRL_FAULT_RECORD"]).with_suffix(".lock").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _node() -> psutil.Process:
    """The raylet of this node."""
    return psutil.Process().parents()[1]


def _run_pids() -> list[int]:
    """The node agent of this worker and all workers that it runs; without Ray only this worker."""
    if "LUCIDRL_NODE_ID" not in os.environ:
        return [os.getpid()]
    agent = psutil.Process().parents()[0]
    return [agent.pid, *(child.pid for child in agent.children())]


def _send(pids: list[int], number: signal.Signals) -> None:
    _record(pids)
    for pid in pids:
        os.kill(pid, number)


def _record(pids: list[int]) -> None:
    record = Path(os.environ["LUCIDRL_FAULT_RECORD"])
    unfinished = record.with_suffix(".part")
    unfinished.write_text(json.dumps({"time": time.time(), "pids": pids, "run_pids": _run_pids()}))
    unfinished.rename(record)


class DTensorPolicyWorker(dtensor_policy_worker.DTensorPolicyWorker):
    """Has the name of its base class, so a resume may use either class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        begin("start")
        super().__init__(*args, **kwargs)
        for phase in ("generate", "logprobs", "broadcast", "save"):
            component, _, method = PHASES[phase].partition(".")
            owner = getattr(self, component)
            setattr(owner, method, _counted(phase, getattr(owner, method)))

    def train(self, *args: Any) -> Any:
        begin("train")
        return super().train(*args)

    def get_weights_ipc_handles(self, *args: Any) -> Any:
        begin("refit")
        return super().get_weights_ipc_handles(*args)


def _counted(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin(phase)
        return method(*args, **kwargs)

    return call


class GenerationWorker(generation_worker.GenerationWorker):
    def generate(self, *args: Any) -> Any:
        begin("generation")
        return super().generate(*args)

    def take_weights(self, handles: Any) -> Any:
        begin("generator refit")
        return super().take_weights(handles)


class FaultyEnv(ArithmeticEnv):
    """Arithmetic tasks; a class of this module, so environment workers can import it."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig())

    async def step(self, batch: Any) -> Any:
        begin("scoring")
        return await super().step(batch)


def use_fault_workers() -> None:
    """Let policies and generators of this program use the workers of this module."""
    from lucidrl.models.generation import separate
    from lucidrl.models.policy import policy

    policy.DTensorPolicyWorker = DTensorPolicyWorker  # type: ignore[misc]
    separate.ENGINES["builtin"] = GenerationWorker


def run_with_fault(
    folder: Path, settings: Sequence[str], phase: str, call: int, fault: str, *, protected_pid: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run `lucidrl grpo` in a run folder and a separate session, with a fault in the given call of a phase."""
    no_preset = folder.with_suffix(".yaml")
    no_preset.write_text("seed: 0\n")
    command = [sys.executable, "-c", f"from {__name__} import main; main()", "grpo", "--config", str(no_preset)]
    command += [*settings, f"run.root={folder.parent}", f"run.name={folder.name}"]
    environment = {
        "PYTHONPATH": str(ROOT),
        "LUCIDRL_FAULT": fault,
        "LUCIDRL_FAULT_AT": f"{phase}:{call}",
        "LUCIDRL_FAULT_RECORD": str(record_path(folder)),
        PROTECTED_PID: str(protected_pid),
    }
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        timeout=_TIMEOUT_S,
    )


def record_path(folder: Path) -> Path:
    """The record of the fault in the run of this folder."""
    return folder.with_suffix(".fault.json")


def main() -> None:
    """Run `lucidrl` with the workers of this module."""
    from lucidrl import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    os.environ[DRIVER_PID] = str(os.getpid())
    use_fault_workers()
    cli.main()
