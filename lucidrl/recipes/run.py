"""Start, resume and check runs.

Settings are validated and profiling is configured before any heavy import.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table

from lucidrl.checkpoint.config import CHECKPOINTS_NAME
from lucidrl.errors import ConfigError, EnvironmentFailure
from lucidrl.recipes.advice import CANNOT_LEARN, advice
from lucidrl.recipes.callbacks import Callbacks, TrainingResult
from lucidrl.recipes.configs import BaseRunConfig, TextRunConfig
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.environment import record_environment
from lucidrl.recipes.explain import explanation
from lucidrl.recipes.folder import create_run_folder, driver_log
from lucidrl.recipes.inputs import PythonInputs
from lucidrl.recipes.profile import profiling_as_configured, timeline_at_end, use_traces_folder
from lucidrl.recipes.settings import new_settings, preset_of, resumed_settings
from lucidrl.utils.imports import import_object
from lucidrl.utils.logger import configure_rich_logging
from lucidrl.utils.logger.redact import redacted_text
from lucidrl.utils.nsys import check_patterns, profile_request
from lucidrl.utils.run_folder import REPORT_NAME, is_occupied, occupied

if TYPE_CHECKING:
    from lucidrl.algorithms.loop import Watcher
    from lucidrl.recipes.training_run import TrainingRun

log = logging.getLogger(__name__)


def launch(
    algorithm: str,
    config_file: Path | None,
    preset: str | None,
    overrides: list[str],
    resume: Path | None,
    explain: bool = False,
) -> None:
    """Start or resume a run and show it on the terminal; with `explain`, first print the source of every setting."""
    started = time.perf_counter()
    configure_rich_logging(level="WARNING", show_path=False)
    if resume is None:
        config = new_settings(algorithm, config_file, preset, overrides)
    elif config_file is not None or preset is not None:
        raise ConfigError("--resume uses the settings of the run; remove --config and --preset")
    else:
        config = resumed_settings(algorithm, resume, overrides)
    start(config, resume=resume, started=started, explain=explain)


def start(
    config: BaseRunConfig,
    *,
    resume: Path | None = None,
    python: PythonInputs | None = None,
    callbacks: Callbacks | None = None,
    display: bool = True,
    started: float | None = None,
    explain: bool = False,
) -> TrainingResult:
    """Start or resume a run in its folder; the commands and the trainers call this function.

    Args:
        resume: folder of the run to continue; None creates a new one.
        python: data and reward functions that a program passed as objects.
        callbacks: called during the run; also record its metrics.
        display: show the run on the terminal or in the notebook; else it is only logged.
        started: see `RunDisplay`.
        explain: first print the source of every setting.
    """
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, as by torchrun, but a run starts its own ranks; "
            "run it without torchrun and set cluster.num_workers=..."
        )
    callbacks = callbacks or Callbacks()
    with _ready(config, python, resume) as run:
        if resume is None:
            # Before the folder is created: a run that cannot start leaves no files.
            run.preflight()
        config = run.resolve()
        callbacks.run_folder = folder = resume or create_run_folder(config)
        use_traces_folder(folder)
        console = None if display else Console(quiet=True)
        with RunDisplay(config, folder, console, started=started) as shown:
            shown.announce(f"{config.algorithm}: {_title(config)} ({preset_of(config)}), in {folder}")
            if explain:
                shown.console.print(explanation(config), soft_wrap=True)
            shown.console.print(arithmetic_table(config))
            for warning in advice(config):
                shown.announce(f"warning: {warning.message}")
            request = profile_request()
            if request is not None and request.steps.start > config.max_steps:
                last = f"the last step, {config.max_steps}"
                shown.announce(f"no profile will be written: steps {request.steps} come after {last}")
            with (
                _reported(config, folder),
                occupied(folder),
                driver_log(folder),
                timeline_at_end(folder, shown.announce),
            ):
                record_environment(folder)
                last_step = _show_training(run, folder, shown, resume is not None, callbacks)
        shown.summary(last_step, run.next_commands(folder))
    return callbacks.end(last_step, config.max_steps, lambda: _newest_checkpoint(folder))


@contextmanager
def _reported(config: BaseRunConfig, folder: Path) -> Iterator[None]:
    """At the end, write the page of the run, after an error too; a failure to do so is logged and nothing else."""
    try:
        yield
    finally:
        if config.report.enabled and not is_occupied(folder):  # the folder of another process stays as it is
            from lucidrl.report.page import write_report
            from lucidrl.report.run_data import read_run

            try:
                write_report([read_run(folder)], folder / REPORT_NAME)
            except Exception as error:  # the page must not change what became of the run
                log.warning("no %s is written: %s", REPORT_NAME, error)


def _show_training(
    run: TrainingRun[Any], folder: Path, display: RunDisplay, resume: bool, callbacks: Callbacks | None = None
) -> int:
    from lucidrl.algorithms.loop import StopRequest

    with ExitStack() as signals:
        with run.loop(folder, display, resume, callbacks) as loop:
            # Entered after the parts are built, because Ray sets signal handlers, and left after they are shut down.
            signals.enter_context(
                StopRequest(display.announce, "shutting down, the run is saved; press again to stop at once")
            )
            display.on_loaded()
            last_step = loop.run()
            display.on_trained()
        return last_step


def _title(config: BaseRunConfig) -> str:
    if not isinstance(config, TextRunConfig) or not config.python_inputs:
        return config.title
    objects = ", ".join(f"{name} ({what})" for name, what in config.python_inputs.items())
    return f"{config.policy.model_name} with {objects} from Python"


def _newest_checkpoint(folder: Path) -> Path | None:
    from lucidrl.checkpoint.manager import CheckpointManager

    newest = CheckpointManager(folder / CHECKPOINTS_NAME).latest()
    return newest.path if newest is not None else None


def train(config: BaseRunConfig, folder: Path, watcher: Watcher, resume: bool = False) -> int:
    """Train in an existing folder, without terminal output; return the last completed step."""
    with closing(_training_run(config)) as run, run.loop(folder, watcher, resume) as loop:
        return loop.run()


def check_run(
    algorithm: str,
    config_file: Path | None,
    preset: str | None,
    overrides: list[str],
    explain: bool = False,
    generate: bool = False,
) -> bool:
    """Print settings, batch sizes and findings of the preflight; raise LucidError if the run cannot start.

    Args:
        explain: print the settings as a table with their sources.
        generate: also compare generation with the policy.

    Returns:
        Whether generation and policy agree; True without `generate`.
    """
    config = new_settings(algorithm, config_file, preset, overrides)
    with _ready(config) as run:
        found = run.preflight()
        findings = run.check_generation() if generate else None
        config = run.resolve()
    console = Console()
    console.print(f"{algorithm}: {config.title} ({preset_of(config)})", markup=False, highlight=False, soft_wrap=True)
    if explain:
        console.print(explanation(config), soft_wrap=True)
    else:
        console.print(Syntax(redacted_text(config.to_yaml()), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found)
    warnings = advice(config)
    for warning in warnings:
        console.print(f"warning: {warning.message}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if any(warning.name == CANNOT_LEARN for warning in warnings):
        console.print("this run can start, but it will not learn with these settings; see the warning", style="yellow")
    else:
        console.print("[green]ok[/]: this run can start")
    if findings is None:
        return True
    console.print(findings.table())
    for reason in findings.reasons:
        console.print(reason, style="red", markup=False, highlight=False, soft_wrap=True)
    agrees = "[green]ok[/]: generation and policy agree"
    console.print(agrees if findings.is_ok else "[red]failed[/]: generation and policy do not agree; do not train yet")
    return findings.is_ok


@contextmanager
def _ready(
    config: BaseRunConfig, python: PythonInputs | None = None, resume: Path | None = None
) -> Iterator[TrainingRun[Any]]:
    """Yield the run of these settings, with profiling configured; release its inputs at the end.

    Raises:
        ConfigError: the settings need objects of a Python program that are not in `python`.
        EnvironmentFailure: user code raised SystemExit or another BaseException.
    """
    if isinstance(config, TextRunConfig):
        (python or PythonInputs()).check(config.python_inputs, config.trainer, resume)
    try:
        with profiling_as_configured(config.profile):
            check_patterns(config.worker_names)
            with closing(_training_run(config, python)) as run:
                yield run
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise EnvironmentFailure(
            f"{type(error).__name__}({error}) stopped the run of {config.title}; user code raised it, such as an "
            "environment: raise an Exception there instead, and do not call sys.exit"
        ) from error


def _training_run(config: BaseRunConfig, python: PythonInputs | None = None) -> TrainingRun[Any]:
    inputs = (python,) if isinstance(config, TextRunConfig) else ()
    run: TrainingRun[Any] = import_object(config.run_class, "run_class")(config, *inputs)
    return run


def arithmetic_table(config: BaseRunConfig) -> Table:
    table = Table("batch sizes", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in config.arithmetic():
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table
