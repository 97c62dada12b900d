"""What every loop keeps of the processes that a run is made of, and what is said when it goes on in others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lucidrl.algorithms.interfaces import SavablePolicy
from lucidrl.utils.random_state import random_state, set_random_state


def processes_state(policy: SavablePolicy) -> dict[str, Any]:
    """State of this process and of the policy's ranks, as plain values."""
    return {
        "driver": {"random": random_state(), "num_threads": torch.get_num_threads()},
        "policy": policy.state_dict(),
    }


def restore_processes(policy: SavablePolicy, state: Mapping[str, Any], announce: Callable[[str], None]) -> None:
    """Go on from what `processes_state` found; what cannot be as it was is announced.

    Call it last: making the parts of a run may draw random numbers.
    """
    now, saved = processes_state(policy), {name: state[name] for name in ("driver", "policy")}
    policy.load_state_dict(saved["policy"])
    set_random_state(saved["driver"]["random"])
    layout, saved_layout = now["policy"]["layout"], saved["policy"]["layout"]
    threads, saved_threads = _num_threads(now), _num_threads(saved)
    if layout != saved_layout:
        announce(
            f"resuming on another layout ({layout}, saved on {saved_layout}): weights, optimizer, schedule, data order "
            "and this process's random state are exact; the ranks' random states are fresh; results agree, but not to "
            "the bit"
        )
    elif threads != saved_threads:
        announce(
            f"resuming with other numbers of CPU threads ({threads}, saved with {saved_threads}): results agree, but "
            "not to the bit"
        )


def _num_threads(state: Mapping[str, Any]) -> list[int]:
    """Of the driver, and of each rank that is a process of its own."""
    processes = [state["driver"], *(rank["process"] for rank in state["policy"]["ranks"] if "process" in rank)]
    return [process["num_threads"] for process in processes]
