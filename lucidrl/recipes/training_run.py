"""A run of any algorithm: what its preflight and its training loop have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from rich.table import Table

from lucidrl.algorithms.interfaces import Algorithm, TrainedPolicy
from lucidrl.algorithms.loop import TrainingLoop, Watcher
from lucidrl.algorithms.saver import Saver, checkpoint_size_bytes
from lucidrl.algorithms.validation import Validator
from lucidrl.checkpoint.manager import Checkpoint, CheckpointManager
from lucidrl.errors import CheckpointError
from lucidrl.models.policy.config import OptimizationConfig
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.folder import CHECKPOINTS_NAME, check_can_create, update_run_config
from lucidrl.utils.logger import Logger
from lucidrl.utils.logger.backends import check_trackers
from lucidrl.utils.nsys import ProfilablePolicy, profile_request
from lucidrl.utils.random_state import seed_everything

C = TypeVar("C", bound=BaseRunConfig)


@dataclass(frozen=True)
class RunParts:
    """What every algorithm is built from."""

    config: BaseRunConfig
    folder: Path
    watcher: Watcher
    manager: CheckpointManager
    logger: Logger
    stack: ExitStack
    """Ends the parts of the run."""

    def loop(
        self,
        policy: TrainedPolicy,
        validator: Validator | None,
        profiled: Sequence[ProfilablePolicy] = (),
        print_samples_every: int = 0,
    ) -> TrainingLoop:
        """The training loop of the run; see its fields."""
        return TrainingLoop(
            max_steps=self.config.max_steps,
            policy=policy,
            saver=Saver(self.manager, self.config.checkpoint, policy, self.watcher.announce),
            logger=self.logger,
            watcher=self.watcher,
            validation=self.config.validation,
            validator=validator,
            profiled=profiled,
            print_samples_every=print_samples_every,
        )


class TrainingRun(ABC, Generic[C]):
    """A run of valid settings. Preflight and loop use the same inputs, which `close` ends."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def preflight(self) -> Table:
        """Describe the run; raise LucidError for the first thing that would stop it."""

    @abstractmethod
    def _prepare(self, stack: ExitStack) -> None:
        """Read the inputs of the run, before it is seeded: what they draw changes nothing of what follows."""

    @abstractmethod
    def _build(self, parts: RunParts) -> Algorithm:
        """Make policy, collector and validator, and connect them."""

    def next_commands(self, folder: Path) -> list[list[str]]:
        """Commands worth a try when the run is over."""
        return []

    @abstractmethod
    def close(self) -> None:
        """End the inputs; may be called twice."""

    @contextmanager
    def loop(self, folder: Path, watcher: Watcher, resume: bool = False) -> Iterator[Algorithm]:
        """The algorithm, ready to run, where the newest checkpoint left it if that is asked for; ends its parts."""
        config = self.config
        with ExitStack() as stack:
            self._prepare(stack)
            if config.num_threads is not None:
                torch.set_num_threads(config.num_threads)
            seed_everything(config.seed)
            checkpoint = config.checkpoint
            manager = CheckpointManager(
                folder / CHECKPOINTS_NAME, checkpoint.keep_last, metric=checkpoint.metric, mode=checkpoint.mode
            )
            newest = manager.to_resume() if resume else None
            run_id = newest.state.get("run_id") if newest is not None else None
            logger = stack.enter_context(Logger(config.tracking.logger_config(folder, run_id)))
            if newest is None:
                logger.log_hyperparams(config.model_dump(mode="json"))
            algorithm = self._build(RunParts(config, folder, watcher, manager, logger, stack))
            if newest is not None:
                self._restore(algorithm, newest, watcher)
                # Only now: a resume that is refused has changed nothing.
                update_run_config(folder, config)
                logger.log_hyperparams(config.model_dump(mode="json"))
            yield algorithm

    def _restore(self, algorithm: Algorithm, newest: Checkpoint, watcher: Watcher) -> None:
        algorithm.policy.load(newest.path)
        try:
            algorithm.load_state_dict(newest.state)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{newest.path} holds no state of such a run ({type(error).__name__}: {error}); "
                "resume with the command and the version that saved it"
            ) from error
        request = profile_request()
        if request is not None and request.steps.stop <= newest.step + 1:
            watcher.announce(f"nothing will be recorded: the steps {request.steps} were done before")


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
