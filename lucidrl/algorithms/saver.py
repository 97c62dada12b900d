"""Writes checkpoints during a run, with the random states of driver and ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from lucidrl.algorithms.interfaces import TrainedPolicy
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.checkpoint.manager import CheckpointManager, PendingCheckpoint
from lucidrl.errors import ConfigError
from lucidrl.models.loading import DTYPES
from lucidrl.models.optim import PolicyOptimizer
from lucidrl.models.policy.config import OptimizationConfig
from lucidrl.profiling.spans import span
from lucidrl.utils.random_state import random_state, set_random_state

log = logging.getLogger(__name__)


class Saver:
    """Saves weights, optimizer and the state of the run.

    The policy's workers write in the background. The first `settle` after the write commits the checkpoint, in the
    thread of the loop, because only this thread may call the workers.

    Args:
        announce: called with a line of text for every committed checkpoint.
        on_save: called with the step and the folder of every committed checkpoint.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        config: CheckpointConfig,
        policy: TrainedPolicy,
        announce: Callable[[str], None],
        on_save: Callable[[int, Path], None] = lambda step, folder: None,
    ) -> None:
        self.manager = manager
        self._config, self._policy, self._announce, self._on_save = config, policy, announce, on_save
        self._pending: PendingCheckpoint | None = None
        self._has_memory = not config.background
        """Whether memory for background saves is allocated, or not needed."""

    def check_metric(self, metrics: Mapping[str, float]) -> None:
        """Raise ConfigError if the validation metrics lack the metric that selects the best checkpoint."""
        if self.manager.metric is not None and self.manager.metric not in metrics:
            raise ConfigError(
                f"checkpoint.metric={self.manager.metric!r} is not a validation metric; "
                f"choose one of {', '.join(sorted(metrics))}"
            )

    def end_step(
        self,
        step: int,
        state_dict: Callable[[], Mapping[str, Any]],
        metrics: Mapping[str, float],
        *,
        last_step: int,
        is_stopped: bool,
    ) -> None:
        """Commit the pending checkpoint if it is written; begin a new one if due; after the last step, wait for it.

        Args:
            state_dict: returns the state of the run, except the policy's; called only if a checkpoint is due.
            metrics: metrics of the validation after this step, if any.
            last_step: the last step of a complete run.
            is_stopped: the run stops early and must be resumable.
        """
        self.settle()
        every, is_last = self._config.every, step == last_step
        if is_stopped or (is_last and self._config.final) or (every > 0 and step % every == 0):
            with span("save"):
                self.save(step, state_dict(), metrics)
        elif not self._has_memory and 0 < every <= last_step - step + step % every:
            # The next save would stall for this allocation.
            weights_only = self._config.weights_only
            self._has_memory = self._policy.reserve_save(self.manager.root, weights_only=weights_only)
        if is_last or is_stopped:
            self.finish()

    def save(self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Wait for the pending checkpoint and commit it; begin a new one."""
        self.finish()
        self._has_memory = True
        with span("save"):
            weights_only = self._config.weights_only
            pending = self.manager.begin(step, state, metrics, weights_only=weights_only)
            try:
                self._policy.begin_save(pending.folder, weights_only=weights_only)
            except BaseException:
                pending.discard()
                raise
        self._pending = pending
        if not self._config.background:
            self.finish()

    def settle(self) -> None:
        """Commit the pending checkpoint if it is written; never wait."""
        if self._pending is not None:
            with span("save"):
                if self._policy.is_save_written():
                    self.finish()

    def finish(self) -> None:
        """Wait for the pending checkpoint and commit it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with span("save"):
            try:
                pending.commit(self._policy.finish_save())
            except BaseException:
                pending.discard()
                raise
        self._announce(f"saved step {pending.step}")
        self._on_save(pending.step, pending.target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit the pending checkpoint, even after an Exception; discard it after KeyboardInterrupt or SystemExit."""
        if self._pending is None:
            return
        if kind is None or issubclass(kind, Exception):
            try:
                self.finish()
            except Exception:
                if kind is None:
                    raise
                log.warning("the pending checkpoint could not be written", exc_info=True)
        else:
            self._pending.discard()
            self._pending = None


def checkpoint_size_bytes(num_parameters: int, config: OptimizationConfig, *, weights_only: bool = False) -> int:
    """Estimate the size of a checkpoint on disk.

    The bytes of optimizer state per parameter are measured on a small matrix after one update, for any optimizer class.

    Args:
        config: config of the policy of a text task, or of one network of a control task.
    """
    weight = nn.Parameter(torch.zeros(64, 64, dtype=DTYPES[config.precision]))
    bytes_per_parameter = float(weight.element_size())
    if not weights_only:
        optimizer = PolicyOptimizer([weight], config.with_total_steps(1))
        weight.sum().backward()
        optimizer.step()
        bytes_per_parameter += sum(tensor.nbytes for tensor in optimizer.own_tensors()) / weight.numel()
    return round(num_parameters * bytes_per_parameter)


def processes_state(policy: TrainedPolicy) -> dict[str, Any]:
    """Return the state of this process and of the policy's ranks, as plain values."""
    return {
        "driver": {"random": random_state(), "num_threads": torch.get_num_threads()},
        "policy": policy.state_dict(),
    }


def restore_processes(policy: TrainedPolicy, state: Mapping[str, Any], announce: Callable[[str], None]) -> None:
    """Restore the result of `processes_state`; announce what cannot be restored.

    Call this last: creating the components of a run may draw random numbers.
    """
    now, saved = processes_state(policy), {name: state[name] for name in ("driver", "policy")}
    policy.load_state_dict(saved["policy"])
    set_random_state(saved["driver"]["random"])
    layout, saved_layout = now["policy"]["layout"], saved["policy"]["layout"]
    threads, saved_threads = _num_threads(now), _num_threads(saved)
    if layout != saved_layout:
        announce(
            f"resuming on another layout ({layout}, saved on {saved_layout}): weights, optimizer, schedule, data order "
            "and the driver's random state are restored, but the ranks' random states are new; results will not be "
            "bit-exact"
        )
    elif threads != saved_threads:
        announce(
            f"resuming with other numbers of CPU threads ({threads}, saved with {saved_threads}): results will not be "
            "bit-exact"
        )


def _num_threads(state: Mapping[str, Any]) -> list[int]:
    """Return the thread counts of the driver and of each rank that runs in a worker process."""
    processes = [state["driver"], *(rank["process"] for rank in state["policy"]["ranks"] if "process" in rank)]
    return [process["num_threads"] for process in processes]
