"""What every run is made of, and what can be wrong with that before it starts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from lucidrl.algorithms.interfaces import SavablePolicy, Stateful
from lucidrl.algorithms.loop import Watcher
from lucidrl.algorithms.saver import Saver
from lucidrl.checkpoint.manager import Checkpoint, CheckpointManager
from lucidrl.errors import CheckpointError
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.run_folder import CHECKPOINTS_NAME, check_can_create, update_run_config
from lucidrl.utils.logger import Logger
from lucidrl.utils.logger.backends import check_trackers
from lucidrl.utils.nsys import profile_request
from lucidrl.utils.random_state import seed_everything


def check_run_can_start(config: BaseRunConfig) -> None:
    """Refuse a run folder that cannot be made, and trackers that are not installed."""
    check_can_create(config.run)
    check_trackers(config.tracking.logger_config(config.run.root))


class RunParts:
    """Random state, logger and checkpoints; made before anything that draws. `stack` ends what has to be ended."""

    def __init__(self, config: BaseRunConfig, folder: Path, stack: ExitStack, watcher: Watcher, resume: bool) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        seed_everything(config.seed)
        self._config, self._folder, self._stack, self._watcher = config, folder, stack, watcher
        checkpoint = config.checkpoint
        self._manager = CheckpointManager(
            folder / CHECKPOINTS_NAME, checkpoint.keep_last, metric=checkpoint.metric, mode=checkpoint.mode
        )
        self._newest = _newest_checkpoint(self._manager) if resume else None
        run_id = self._newest.state.get("run_id") if self._newest is not None else None
        self.logger = stack.enter_context(Logger(config.tracking.logger_config(folder, run_id)))
        if self._newest is None:
            self._log_settings()

    def saver(self, policy: SavablePolicy) -> Saver:
        checkpoint = self._config.checkpoint
        return self._stack.enter_context(
            Saver(self._manager, checkpoint.every, policy, self._watcher.announce, background=checkpoint.background)
        )

    def restore(self, policy: SavablePolicy, loop: Stateful) -> None:
        """Put the policy and the loop where the newest checkpoint left them, if the run is a resumed one."""
        if self._newest is None:
            return
        policy.load(self._newest.path)
        try:
            loop.load_state_dict(self._newest.state)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._newest.path} holds no state of such a run ({type(error).__name__}: {error}); "
                "resume with the command and the version that saved it"
            ) from error
        # Only now: a resume that is refused has changed nothing.
        update_run_config(self._folder, self._config)
        self._log_settings()
        request = profile_request()
        if request is not None and request.steps.stop <= self._newest.step + 1:
            self._watcher.announce(f"nothing will be recorded: the steps {request.steps} were done before")

    def _log_settings(self) -> None:
        self.logger.log_hyperparams(self._config.model_dump(mode="json"))


def _newest_checkpoint(manager: CheckpointManager) -> Checkpoint:
    checkpoint = manager.latest()
    if checkpoint is None:
        raise CheckpointError(f"{manager.root} holds no valid checkpoint to resume from; start a new run")
    return checkpoint
