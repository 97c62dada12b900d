"""TrainingRun: the base class of all runs, with preflight, loop and resume."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from rich.table import Table

from lucidrl.algorithms.health import HealthMonitor
from lucidrl.algorithms.interfaces import Algorithm, TrainedPolicy
from lucidrl.algorithms.loop import TrainingLoop, Watcher
from lucidrl.algorithms.saver import Saver, checkpoint_size_bytes
from lucidrl.algorithms.validation import Validator
from lucidrl.checkpoint.config import CHECKPOINTS_NAME
from lucidrl.checkpoint.manager import Checkpoint, CheckpointManager
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.policy.config import OptimizationConfig
from lucidrl.recipes.advice import advice
from lucidrl.recipes.callbacks import Callbacks, WatcherWithCallbacks
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.folder import check_can_create, update_run_config
from lucidrl.report.breakdown import write_breakdown
from lucidrl.utils.allocator import keep_freed_memory
from lucidrl.utils.logger import Logger
from lucidrl.utils.logger.backends import check_trackers
from lucidrl.utils.nsys import ProfilablePolicy, profile_request
from lucidrl.utils.random_state import seed_everything

if TYPE_CHECKING:
    from lucidrl.recipes.generation_check import GenerationFindings

C = TypeVar("C", bound=BaseRunConfig)


@dataclass(frozen=True)
class RunParts:
    """The components of a run that do not depend on the algorithm."""

    config: BaseRunConfig
    folder: Path
    watcher: Watcher
    callbacks: Callbacks
    manager: CheckpointManager
    logger: Logger
    stack: ExitStack
    """Shuts the components down when the run ends."""

    def loop(
        self,
        policy: TrainedPolicy,
        validator: Validator | None,
        profiled: Sequence[ProfilablePolicy] = (),
        print_samples_every: int = 0,
        health: HealthMonitor | None = None,
    ) -> TrainingLoop:
        """Return the training loop; the arguments are its fields."""
        return TrainingLoop(
            max_steps=self.config.max_steps,
            policy=policy,
            saver=Saver(
                self.manager, self.config.checkpoint, policy, self.watcher.announce, on_save=self.callbacks.on_save
            ),
            logger=self.logger,
            watcher=WatcherWithCallbacks(self.watcher, self.callbacks),
            validation=self.config.validation,
            validator=validator,
            profiled=profiled,
            print_samples_every=print_samples_every,
            health=health,
            should_stop=lambda: self.callbacks.is_stop_requested,
        )


class TrainingRun(ABC, Generic[C]):
    """A run with valid settings. Preflight and loop use the same inputs, which `close` releases."""

    def __init__(self, config: C) -> None:
        self.config = config

    @abstractmethod
    def preflight(self) -> Table:
        """Describe the run; raise LucidError for the first problem that would stop it."""

    def check_generation(self) -> GenerationFindings:
        """Compare generation with the policy; raise ConfigError if the run does not generate with a language model."""
        raise ConfigError(
            f"--generate compares samples of a language model with its policy, but {self.config.algorithm} does not "
            "train on such samples; remove it, or check --algorithm grpo"
        )

    def resolve(self) -> C:
        """Fill in the settings that depend on the data, such as steps from epochs; may read the data."""
        return self.config

    @abstractmethod
    def _prepare(self, stack: ExitStack) -> None:
        """Read the inputs. Called before seeding, so that random numbers drawn here do not change the run."""

    @abstractmethod
    def _build(self, parts: RunParts) -> Algorithm:
        """Create policy, collector and validator, and connect them."""

    def next_commands(self, folder: Path) -> list[list[str]]:
        """Return commands to try after the run."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release the inputs; may be called twice."""

    @contextmanager
    def loop(
        self, folder: Path, watcher: Watcher, resume: bool = False, callbacks: Callbacks | None = None
    ) -> Iterator[Algorithm]:
        """Yield the algorithm, restored from the newest checkpoint if `resume`; shut its parts down at the end."""
        with ExitStack() as stack:
            self._prepare(stack)
            config = self.resolve()
            keep_freed_memory()
            if config.num_threads is not None:
                stack.callback(
                    torch.set_num_threads, torch.get_num_threads()
                )  # at the end, restore the number for the rest of a Python program
                torch.set_num_threads(config.num_threads)
            seed_everything(config.seed)
            checkpoint = config.checkpoint
            manager = CheckpointManager(
                folder / CHECKPOINTS_NAME, checkpoint.keep_last, metric=checkpoint.metric, mode=checkpoint.mode
            )
            newest = manager.to_resume() if resume else None
            run_id = newest.state.get("run_id") if newest is not None else None
            stack.callback(write_breakdown, folder)  # after the logger has written all metrics
            logger = stack.enter_context(Logger(config.tracking.logger_config(folder, run_id)))
            if newest is None:
                logger.log_hyperparams(config.model_dump(mode="json"))
                for warning in advice(config):
                    logger.log_warning(warning.name, warning.message, step=0)
            algorithm = self._build(RunParts(config, folder, watcher, callbacks or Callbacks(), manager, logger, stack))
            if newest is not None:
                self._restore(algorithm, newest, watcher)
                # Written only now, so that a refused resume changes nothing.
                update_run_config(folder, config)
                logger.log_hyperparams(config.model_dump(mode="json"))
            yield algorithm

    def _restore(self, algorithm: Algorithm, newest: Checkpoint, watcher: Watcher) -> None:
        algorithm.policy.load(newest.path)
        try:
            algorithm.load_state_dict(newest.state)
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{newest.path} holds the state of another kind of run ({type(error).__name__}: {error}); "
                "resume with the command and the version that saved it"
            ) from error
        request = profile_request()
        if request is not None and request.steps.stop <= newest.step + 1:
            watcher.announce(f"no profile will be written: steps {request.steps} are already done")


def check_run_can_start(config: BaseRunConfig) -> None:
    """Raise ConfigError if the run folder cannot be created or a tracker is not installed."""
    check_can_create(config.run)
    check_trackers(config.tracking.logger_config(config.run.root))


def checkpoint_on_disk(config: BaseRunConfig, *networks: tuple[int, OptimizationConfig]) -> str:
    """Describe the size of checkpoints; `networks` are (number of parameters, settings) of the trained networks."""
    checkpoint = config.checkpoint
    size_bytes = sum(checkpoint_size_bytes(*network, weights_only=checkpoint.weights_only) for network in networks)
    scale, unit = (2**30, "GiB") if size_bytes >= 2**30 else (2**20, "MiB")
    content = "weights only" if checkpoint.weights_only else "weights and optimizer"
    most = checkpoint.keep_last + (checkpoint.metric is not None)
    return f"{size_bytes / scale:.2f} {unit} ({content}), at most {most} kept"
