"""The command line with losses and an environment that kill it: no exit handler runs and nothing is flushed.

The settings are environment variables, so that the ranks of a run have them too. `KILL_AT` is a place and a call, such
as `loss:6` (the sixth training call of the loss in one rank; of several, in the last) or `env:2`. At that moment
`KILL_NOTE` is written, and the command gets SIGKILL. Unset, nothing happens.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lucidrl.losses.nll import NLLLoss
from lucidrl.losses.policy_gradient import ClippedPGLoss
from tests.faults.drawing import DrawingEnv

_calls: Counter[str] = Counter()


def note_call(place: str, command_pid: int) -> None:
    """Count a call in this process, and kill the command if it is the one to do it at."""
    _calls[place] += 1
    if f"{place}:{_calls[place]}" == os.environ.get("KILL_AT"):
        Path(os.environ["KILL_NOTE"]).write_text(os.environ["KILL_AT"])
        os.kill(command_pid, signal.SIGKILL)
        time.sleep(60)  # a rank does no more than this before it ends with the command


class _KillingLoss:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._command_pid = os.getpid()

    def __call__(self, outputs: Any, data: Any, *counts: Any) -> Any:
        result = super().__call__(outputs, data, *counts)  # type: ignore[misc]
        is_last_rank = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
        if torch.is_grad_enabled() and is_last_rank:
            note_call("loss", self._command_pid)
        return result


class KillingPGLoss(_KillingLoss, ClippedPGLoss):
    """Of GRPO."""


class KillingNLLLoss(_KillingLoss, NLLLoss):
    """Of supervised fine-tuning."""


class KillingEnv(DrawingEnv):
    """Kills while the completions of a step are scored."""

    async def step(self, batch: Any) -> Any:
        note_call("env", os.getpid())
        return await super().step(batch)


def main() -> None:
    """`lucidrl` with these losses."""
    from lucidrl import cli
    from lucidrl.algorithms import grpo
    from lucidrl.recipes import language

    grpo.ClippedPGLoss = KillingPGLoss  # type: ignore[misc]
    language.NLLLoss = KillingNLLLoss  # type: ignore[misc]
    cli.main()
