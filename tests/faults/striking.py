"""Fault injection: the command line with workers, generators and an environment that kill or stop themselves, their
node or the command in a phase of a step.

The settings are variables that reach ranks on any node. `LUCIDRL_STRIKE` is a phase and a call of it, such as
`train:3`; `LUCIDRL_STRIKE_BY` is what happens then, one of `BLOWS`. At that moment, `LUCIDRL_STRIKE_NOTE` is written:
the time, the processes that are hit, and those of the run on the same node. Unset, nothing happens.
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
    "generating": "generate",
    "receiving weights": "take_weights",
    "scoring": "step",
}
"""Method that each phase begins with: of a policy worker or a part of it, and the last three of a generator and an
environment."""
DRIVER = "LUCIDRL_STRIKE_DRIVER"
SPARED = "LUCIDRL_STRIKE_SPARED"
"""Process of the node that has to stay: the one to which the command is connected."""

_LONGEST_S = 180.0
_calls: Counter[str] = Counter()


def kill_process() -> None:
    _hit([os.getpid()], signal.SIGKILL)


def stop_process() -> None:
    _hit([os.getpid()], signal.SIGSTOP)


def kill_node() -> None:
    """Kill the node's own process; the workers there have to notice it by themselves."""
    _hit([_node().pid], signal.SIGKILL)
    time.sleep(60)


def stop_node() -> None:
    """Stop all processes of the node, as if its network failed; this process comes last."""
    _hit([_node().pid, *(pid for pid in _near() if pid != os.getpid()), os.getpid()], signal.SIGSTOP)


def interrupt() -> None:
    """Ctrl-C reaches all processes of the command's terminal."""
    _note([])
    os.killpg(int(os.environ[DRIVER]), signal.SIGINT)


BLOWS: dict[str, Callable[[], None]] = {
    "SIGKILL of a rank": kill_process,
    "SIGSTOP of a rank": stop_process,
    "SIGKILL of a generator": kill_process,
    "SIGSTOP of a generator": stop_process,
    "SIGKILL of an environment": kill_process,
    "SIGSTOP of an environment": stop_process,
    "SIGKILL of a node": kill_node,
    "SIGSTOP of a node": stop_node,
    "Ctrl-C": interrupt,
}


def begin(phase: str) -> None:
    """Call it when a phase begins; a restarted worker is not hit again."""
    _calls[phase] += 1
    print(f"begins call {_calls[phase]} of {phase}")  # noqa: T201 - in its log
    blow = os.environ.get("LUCIDRL_STRIKE_BY", "")
    if f"{phase}:{_calls[phase]}" == os.environ.get("LUCIDRL_STRIKE") and _is_chosen(blow):
        BLOWS[blow]()


def _is_chosen(blow: str) -> bool:
    if blow.endswith("node"):
        is_meant = _node().pid != int(os.environ[SPARED])
    else:
        is_meant = os.environ.get("WORLD_SIZE") != "2" or os.environ["RANK"] == "1"
    if not is_meant:
        return False
    try:  # of several at the same moment, the first
        Path(os.environ["LUCIDRL_STRIKE_NOTE"]).with_suffix(".turn").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _node() -> psutil.Process:
    return psutil.Process().parents()[1]


def _near() -> list[int]:
    """The agent of this worker, and all workers that it runs; without Ray the worker alone."""
    if "LUCIDRL_NODE_ID" not in os.environ:
        return [os.getpid()]
    agent = psutil.Process().parents()[0]
    return [agent.pid, *(child.pid for child in agent.children())]


def _hit(pids: list[int], number: signal.Signals) -> None:
    _note(pids)
    for pid in pids:
        os.kill(pid, number)


def _note(pids: list[int]) -> None:
    note = Path(os.environ["LUCIDRL_STRIKE_NOTE"])
    part = note.with_suffix(".part")
    part.write_text(json.dumps({"time": time.time(), "pids": pids, "near": _near()}))
    part.rename(note)


class DTensorPolicyWorker(dtensor_policy_worker.DTensorPolicyWorker):
    """Of the same name as its base: a run goes on with either of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        begin("start")
        super().__init__(*args, **kwargs)
        for phase in ("generate", "logprobs", "broadcast", "save"):
            part, _, method = PHASES[phase].partition(".")
            owner = getattr(self, part)
            setattr(owner, method, _beginning(phase, getattr(owner, method)))

    def train(self, *args: Any) -> Any:
        begin("train")
        return super().train(*args)

    def get_weights_ipc_handles(self, *args: Any) -> Any:
        begin("refit")
        return super().get_weights_ipc_handles(*args)


def _beginning(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin(phase)
        return method(*args, **kwargs)

    return call


class GenerationWorker(generation_worker.GenerationWorker):
    def generate(self, *args: Any) -> Any:
        begin("generating")
        return super().generate(*args)

    def take_weights(self, handles: Any) -> Any:
        begin("receiving weights")
        return super().take_weights(handles)


class StruckEnv(ArithmeticEnv):
    """Can be in actors."""

    def __init__(self) -> None:
        super().__init__(ArithmeticConfig())

    async def step(self, batch: Any) -> Any:
        begin("scoring")
        return await super().step(batch)


def use_striking_workers() -> None:
    """Policies and generators of this program have them from now on."""
    from lucidrl.models.generation import separate
    from lucidrl.models.policy import policy

    policy.DTensorPolicyWorker = DTensorPolicyWorker  # type: ignore[misc]
    separate.GenerationWorker = GenerationWorker  # type: ignore[misc]


def run_struck(
    folder: Path, settings: Sequence[str], phase: str, call: int, blow: str, *, spared_pid: int = 0
) -> subprocess.CompletedProcess[str]:
    """`lucidrl grpo` in a run folder, in a separate session."""
    no_preset = folder.with_suffix(".yaml")
    no_preset.write_text("seed: 0\n")
    command = [sys.executable, "-c", f"from {__name__} import main; main()", "grpo", "--config", str(no_preset)]
    command += [*settings, f"run.root={folder.parent}", f"run.name={folder.name}"]
    environment = {
        "PYTHONPATH": str(ROOT),
        "LUCIDRL_STRIKE": f"{phase}:{call}",
        "LUCIDRL_STRIKE_BY": blow,
        "LUCIDRL_STRIKE_NOTE": str(note_of(folder)),
        SPARED: str(spared_pid),
    }
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        timeout=_LONGEST_S,
    )


def note_of(folder: Path) -> Path:
    return folder.with_suffix(".note")


def main() -> None:
    """`lucidrl` with these workers."""
    from lucidrl import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore it
    os.environ[DRIVER] = str(os.getpid())
    use_striking_workers()
    cli.main()
