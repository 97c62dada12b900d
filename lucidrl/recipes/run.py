"""What the command line does with a run: resolve its settings once, check them, then run and show it.

Nothing heavy is imported before the settings are known to be right and profiling is armed as they ask.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table

from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.recipes.configs import BaseRunConfig, GRPORunConfig, SFTRunConfig, preset_path
from lucidrl.recipes.control_configs import PPORunConfig
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.folder import create_run_folder, driver_log, occupied, run_config_path
from lucidrl.recipes.profile import profiling_as_asked, use_traces_folder
from lucidrl.recipes.settings import resolve_settings
from lucidrl.utils.imports import import_object
from lucidrl.utils.logger import configure_rich_logging
from lucidrl.utils.logger.redact import redacted_text
from lucidrl.utils.nsys import check_patterns, profile_request

if TYPE_CHECKING:
    from lucidrl.algorithms.loop import Watcher


class Findings(Protocol):
    """What a preflight found, for a person to read."""

    def table(self) -> Table: ...


class Loop(Protocol):
    """A training loop, ready to run."""

    def run(self) -> int:
        """Train; returns the last completed step, which is saved."""
        ...


class Run(Protocol):
    """A run of settings that are valid. Its environment and data are read once, for the preflight and the loop."""

    def preflight(self) -> Findings:
        """Raise for the first thing that would stop the run."""
        ...

    def loop(self, folder: Path, watcher: Watcher, resume: bool = False) -> AbstractContextManager[Loop]: ...

    def next_commands(self, folder: Path) -> list[list[str]]:
        """Commands worth a try when the run is over."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Recipe:
    """What the command line has to know of an algorithm; its name is that of the command and of its settings."""

    schema: type[BaseRunConfig]
    run: str
    """Class of its `Run`; imported at use, because what language models need takes seconds to import."""
    validated_on: str
    """What validation results are of."""
    default_preset: Callable[[Sequence[str]], str | None] = lambda overrides: None
    """The preset of a run that names neither preset nor file, from its overrides."""


def _grpo_preset(overrides: Sequence[str]) -> str:
    """The embedded model trains with `demo`, any other with `chat`: sizes apart, they differ in learning rate."""
    return "demo" if _last_value("policy.model_name", overrides, "embedded") in EMBEDDED_MODELS else "chat"


def _ppo_preset(overrides: Sequence[str]) -> str | None:
    """`cartpole` is for CartPole; another env stands on the defaults."""
    return "cartpole" if _last_value("env.name", overrides, "CartPole-v1") == "CartPole-v1" else None


def _last_value(key: str, overrides: Sequence[str], default: str) -> str:
    values = [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")]
    return values[-1] if values else default


RECIPES = {
    "grpo": Recipe(GRPORunConfig, "lucidrl.recipes.language.GRPORun", "held-out", _grpo_preset),
    "sft": Recipe(SFTRunConfig, "lucidrl.recipes.language.SFTRun", "held-out"),
    "ppo": Recipe(PPORunConfig, "lucidrl.recipes.control.PPORun", "greedy", _ppo_preset),
}
"""All algorithms."""


def launch(
    algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str], resume: Path | None
) -> None:
    """Start or continue a run and show it."""
    started = time.perf_counter()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, as by torchrun, but this command starts its ranks itself; "
            "run it without torchrun, with cluster.num_workers=..."
        )
    configure_rich_logging(level="WARNING", show_path=False)
    if resume is not None and (config_file is not None or preset is not None):
        raise ConfigError("--resume takes the settings of the run itself; leave out --config and --preset")
    if resume is None:
        config = resolve(algorithm, config_file, preset, overrides)
    else:
        config = resolve_resumed(algorithm, resume, overrides)
    with _ready(algorithm, config) as run:
        if resume is None:
            # Before the folder is made: a run that cannot start should leave nothing behind.
            run.preflight()
        folder = resume or create_run_folder(config, algorithm)
        use_traces_folder(folder)
        with RunDisplay(
            algorithm, config.max_steps, folder, validated_on=RECIPES[algorithm].validated_on, started=started
        ) as display:
            display.announce(f"{algorithm}: {config.title}, in {folder}")
            display.console.print(arithmetic_table(config))
            request = profile_request()
            if request is not None and request.steps.start > config.max_steps:
                after = f"come after the last, {config.max_steps}"
                display.announce(f"nothing will be recorded: the steps {request.steps} {after}")
            with occupied(folder), driver_log(folder):
                last_step = _train(run, folder, display, resume is not None)
        display.summary(last_step, run.next_commands(folder))


def _train(run: Run, folder: Path, display: RunDisplay, resume: bool) -> int:
    with ExitStack() as signals:
        with run.loop(folder, display, resume) as loop:
            _finish_on_signals(signals, display.announce)
            display.on_loaded()
            last_step = loop.run()
            display.on_trained()
        return last_step


def _finish_on_signals(stack: ExitStack, announce: Callable[[str], None]) -> None:
    """Until `stack` is closed, the first Ctrl-C, SIGTERM or SIGHUP does not interrupt.

    The loop catches signals while it trains; this is for the time after that, when all is saved and workers shut down.
    To be called when all parts are made, because Ray sets a handler of its own.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        with suppress(RuntimeError):  # the signal came in the middle of a write to the same stream
            announce(f"{signal.Signals(number).name}: all is saved and the run ends; once more stops at once")

    with suppress(ValueError):  # not in the main thread, where signals cannot be caught
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                stack.callback(signal.signal, number, signal.signal(number, on_signal))


def check_run(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> None:
    """Print what a run would be; raise if it could not be."""
    if algorithm not in RECIPES:
        raise ConfigError(f"--algorithm={algorithm} is not known; choose one of {', '.join(RECIPES)}")
    config = resolve(algorithm, config_file, preset, overrides)
    with _ready(algorithm, config) as run:
        found = run.preflight()
    console = Console()
    console.print(Syntax(redacted_text(config.to_yaml()), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found.table())
    console.print("[green]ok[/]: nothing stands in the way of this run")


@contextmanager
def _ready(algorithm: str, config: BaseRunConfig) -> Iterator[Run]:
    """The run of these settings, with profiling as they ask, until the context ends.

    Raises:
        EnvironmentFailure: if code of the user ends the program instead of raising an error.
    """
    try:
        with profiling_as_asked(config.profile):
            check_patterns(config.worker_names)
            run: Run = import_object(RECIPES[algorithm].run, "--algorithm")(config)
            with closing(run):
                yield run
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"{type(error).__name__}({error}) ended the run of {config.title}; it comes from code that the run calls, "
            "such as an environment: raise an Exception there, and never call sys.exit"
        ) from error


def resolve(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> Any:
    """The settings of a new run: of preset, then file, then overrides."""
    recipe = RECIPES[algorithm]
    if preset is None and config_file is None:
        preset = recipe.default_preset(overrides)
    named = [preset_path(preset)] if preset is not None else []
    return resolve_settings(recipe.schema, *named, *([config_file] if config_file else []), overrides=overrides)


def resolve_resumed(algorithm: str, folder: Path, overrides: list[str]) -> Any:
    """The settings a run goes on with: its own, changed by overrides.

    Raises:
        ConfigError: for a folder that holds no run, or one of another algorithm.
    """
    path = run_config_path(folder)

    def check_algorithm(settings: dict[str, Any]) -> None:
        found = [name for name in RECIPES if name in settings]
        if algorithm not in found and found:
            raise ConfigError(
                f"{folder} holds a run of {found[0]}, not of {algorithm}; continue it with "
                f"lucidrl {found[0]} --resume {folder}"
            )

    return resolve_settings(RECIPES[algorithm].schema, path, overrides=overrides, check=check_algorithm)


def arithmetic_table(config: BaseRunConfig) -> Table:
    table = Table("batch arithmetic", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in config.arithmetic():
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table
