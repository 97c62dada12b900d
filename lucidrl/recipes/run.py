"""Start, resume and check runs.

Settings are validated and profiling is configured before any heavy import.
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
from lucidrl.recipes.profile import profiling_as_configured, use_traces_folder
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
    """Start or resume a run and show it on the terminal."""
    started = time.perf_counter()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, as by torchrun, but this command starts its own ranks; "
            "run it without torchrun and set cluster.num_workers=..."
        )
    configure_rich_logging(level="WARNING", show_path=False)
    if resume is None:
        config = new_settings(algorithm, config_file, preset, overrides)
    elif config_file is not None or preset is not None:
        raise ConfigError("--resume uses the settings of the run; remove --config and --preset")
    else:
        config = resumed_settings(algorithm, resume, overrides)
    with _ready(config) as run:
        config = run.config  # with the names of checkpoints and commits
        if resume is None:
            # Before the folder is created: a run that cannot start leaves no files.
            run.preflight()
        folder = resume or create_run_folder(config)
        use_traces_folder(folder)
        with RunDisplay(config, folder, started=started) as display:
            display.announce(f"{algorithm}: {config.title}, in {folder}")
            display.console.print(arithmetic_table(config))
            request = profile_request()
            if request is not None and request.steps.start > config.max_steps:
                last = f"the last step, {config.max_steps}"
                display.announce(f"no profile will be written: steps {request.steps} come after {last}")
            with occupied(folder), driver_log(folder):
                last_step = _show_training(run, folder, display, resume is not None)
        display.summary(last_step, run.next_commands(folder))


def _show_training(run: TrainingRun[Any], folder: Path, display: RunDisplay, resume: bool) -> int:
    from lucidrl.algorithms.loop import StopRequest

    with ExitStack() as signals:
        with run.loop(folder, display, resume) as loop:
            # After the parts are built, because Ray sets its own handlers, and until they are shut down.
            signals.enter_context(
                StopRequest(display.announce, "shutting down, the run is saved; press again to stop at once")
            )
            display.on_loaded()
            last_step = loop.run()
            display.on_trained()
        return last_step


def train(config: BaseRunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Train in an existing folder, without terminal output; return the last completed step."""
    with closing(_training_run(config)) as run, run.loop(folder, watcher, resume) as loop:
        return loop.run()


def check_run(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> None:
    """Print settings, batch sizes and findings of the preflight; raise LucidError if the run cannot start."""
    config = new_settings(algorithm, config_file, preset, overrides)
    with _ready(config) as run:
        config, found = run.config, run.preflight()
    console = Console()
    console.print(Syntax(redacted_text(config.to_yaml()), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found)
    console.print("[green]ok[/]: this run can start")


@contextmanager
def _ready(config: BaseRunConfig) -> Iterator[TrainingRun[Any]]:
    """Yield the run of these settings, with profiling configured; release its inputs at the end.

    Raises:
        EnvironmentFailure: user code raised SystemExit or another BaseException.
    """
    try:
        with profiling_as_configured(config.profile):
            check_patterns(config.worker_names)
            with closing(_training_run(config)) as run:
                yield run
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"{type(error).__name__}({error}) stopped the run of {config.title}; user code raised it, such as an "
            "environment: raise an Exception there instead, and do not call sys.exit"
        ) from error


def _training_run(config: BaseRunConfig) -> TrainingRun[Any]:
    run: TrainingRun[Any] = import_object(config.run_class, "run_class")(config)
    return run


def arithmetic_table(config: BaseRunConfig) -> Table:
    table = Table("batch sizes", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in config.arithmetic():
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table
