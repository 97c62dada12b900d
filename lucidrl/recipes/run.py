"""What the command line does with a run: resolve its settings once, check them, then run and show it.

Nothing heavy is imported before the settings are known to be right and profiling is armed as they ask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table

from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.recipes.configs import BaseRunConfig
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.folder import create_run_folder, driver_log, occupied
from lucidrl.recipes.profile import profiling_as_asked, use_traces_folder
from lucidrl.recipes.settings import new_settings, resumed_settings
from lucidrl.utils.imports import import_object
from lucidrl.utils.logger import configure_rich_logging
from lucidrl.utils.logger.redact import redacted_text
from lucidrl.utils.nsys import check_patterns, profile_request

if TYPE_CHECKING:
    from lucidrl.algorithms.loop import Watcher
    from lucidrl.recipes.training_run import TrainingRun


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
    if resume is None:
        config = new_settings(algorithm, config_file, preset, overrides)
    elif config_file is not None or preset is not None:
        raise ConfigError("--resume takes the settings of the run itself; leave out --config and --preset")
    else:
        config = resumed_settings(algorithm, resume, overrides)
    with _ready(config) as run:
        if resume is None:
            # Before the folder is made: a run that cannot start should leave nothing behind.
            run.preflight()
        folder = resume or create_run_folder(config)
        use_traces_folder(folder)
        with RunDisplay(config, folder, started=started) as display:
            display.announce(f"{algorithm}: {config.title}, in {folder}")
            display.console.print(arithmetic_table(config))
            request = profile_request()
            if request is not None and request.steps.start > config.max_steps:
                after = f"come after the last, {config.max_steps}"
                display.announce(f"nothing will be recorded: the steps {request.steps} {after}")
            with occupied(folder), driver_log(folder):
                last_step = _show_training(run, folder, display, resume is not None)
        display.summary(last_step, run.next_commands(folder))


def _show_training(run: TrainingRun[Any], folder: Path, display: RunDisplay, resume: bool) -> int:
    from lucidrl.algorithms.loop import StopRequest

    with ExitStack() as signals:
        with run.loop(folder, display, resume) as loop:
            # When all parts are made, because Ray sets a handler of its own; until they are shut down, after the loop.
            signals.enter_context(
                StopRequest(display.announce, "all is saved and the run ends; once more stops at once")
            )
            display.on_loaded()
            last_step = loop.run()
            display.on_trained()
        return last_step


def train(config: BaseRunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Run an algorithm in a run folder, without the command line; the last completed step."""
    with closing(_training_run(config)) as run, run.loop(folder, watcher, resume) as loop:
        return loop.run()


def check_run(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> None:
    """Print what a run would be; raise if it could not be."""
    config = new_settings(algorithm, config_file, preset, overrides)
    with _ready(config) as run:
        found = run.preflight()
    console = Console()
    console.print(Syntax(redacted_text(config.to_yaml()), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found)
    console.print("[green]ok[/]: nothing stands in the way of this run")


@contextmanager
def _ready(config: BaseRunConfig) -> Iterator[TrainingRun[Any]]:
    """The run of these settings, with profiling as they ask, until the context ends.

    Raises:
        EnvironmentFailure: if code of the user ends the program instead of raising an error.
    """
    try:
        with profiling_as_asked(config.profile):
            check_patterns(config.worker_names)
            with closing(_training_run(config)) as run:
                yield run
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"{type(error).__name__}({error}) ended the run of {config.title}; it comes from code that the run calls, "
            "such as an environment: raise an Exception there, and never call sys.exit"
        ) from error


def _training_run(config: BaseRunConfig) -> TrainingRun[Any]:
    run: TrainingRun[Any] = import_object(config.run_class, "run_class")(config)
    return run


def arithmetic_table(config: BaseRunConfig) -> Table:
    table = Table("batch arithmetic", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in config.arithmetic():
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table
