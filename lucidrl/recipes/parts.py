"""What every run is made of, and what can be wrong with that before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from lucidrl.algorithms.config import ValidationSchedule
from lucidrl.algorithms.interfaces import SavablePolicy, Stateful, TrainedPolicy
from lucidrl.algorithms.loop import TrainingLoop, Watcher
from lucidrl.algorithms.saver import Saver, checkpoint_size_bytes
from lucidrl.algorithms.validation import Validator
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.errors import CheckpointError
from lucidrl.models.policy.config import OptimizationConfig
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.folder import CHECKPOINTS_NAME, check_can_create, update_run_config
from lucidrl.utils.logger import Logger
from lucidrl.utils.logger.backends import check_trackers
from lucidrl.utils.nsys import ProfilablePolicy, profile_request
from lucidrl.utils.random_state import seed_everything


def check_run_can_start(config: BaseRunConfig) -> None:
    """Refuse a run folder that cannot be made, and trackers that are not installed."""
    check_can_create(config.run)
    check_trackers(config.tracking.logger_config(config.run.root))


def checkpoint_on_disk(config: BaseRunConfig, *networks: tuple[int, OptimizationConfig]) -> str:
    """What the checkpoints of a run take, in words.

    Args:
        networks: number of parameters and settings of each network that is trained.
    """
    checkpoint = config.checkpoint
    size_bytes = sum(checkpoint_size_bytes(*network, weights_only=checkpoint.weights_only) for network in networks)
    scale, unit = (2**30, "GiB") if size_bytes >= 2**30 else (2**20, "MiB")
    content = "weights only" if checkpoint.weights_only else "weights and optimizer"
    most = checkpoint.keep_last + (checkpoint.metric is not None)
    return f"{size_bytes / scale:.2f} {unit} ({content}), at most {most} of them"


class RunParts:
    """Random state, logger and checkpoints; made before anything that draws. `stack` ends what has to be ended."""

    def __init__(self, config: BaseRunConfig, folder: Path, stack: ExitStack, watcher: Watcher, resume: bool) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        seed_everything(config.seed)
        self._config, self._folder, self._watcher = config, folder, watcher
        checkpoint = config.checkpoint
        self._manager = CheckpointManager(
            folder / CHECKPOINTS_NAME, checkpoint.keep_last, metric=checkpoint.metric, mode=checkpoint.mode
        )
        self._newest = self._manager.to_resume() if resume else None
        run_id = self._newest.state.get("run_id") if self._newest is not None else None
        self.logger = stack.enter_context(Logger(config.tracking.logger_config(folder, run_id)))
        if self._newest is None:
            self._log_settings()

    def loop(
        self,
        policy: TrainedPolicy,
        validation: ValidationSchedule,
        validator: Validator | None,
        profiled: Sequence[ProfilablePolicy] = (),
        print_samples_every: int = 0,
    ) -> TrainingLoop:
        """The training loop of the run; see its fields."""
        return TrainingLoop(
            max_steps=self._config.max_steps,
            policy=policy,
            saver=Saver(self._manager, self._config.checkpoint, policy, self._watcher.announce),
            logger=self.logger,
            watcher=self._watcher,
            validation=validation,
            validator=validator,
            profiled=profiled,
            print_samples_every=print_samples_every,
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
