"""What the command line does with a run: settings together, folder claimed, display on, parts wired, summary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table

from lucidrl.errors import ConfigError
from lucidrl.recipes.configs import BaseRunConfig, preset_path
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.driver_log import driver_log
from lucidrl.recipes.profile import profiling_as_asked, use_traces_folder
from lucidrl.recipes.recipe import C, Recipe
from lucidrl.recipes.run_folder import create_run_folder, occupied, read_run_config, run_config_path
from lucidrl.utils.config import dump_yaml, load_config, merged_settings
from lucidrl.utils.imports import import_object
from lucidrl.utils.logger import configure_rich_logging
from lucidrl.utils.nsys import check_patterns, profile_request

RECIPES = {
    "grpo": "lucidrl.recipes.text.GRPO_RECIPE",
    "sft": "lucidrl.recipes.text.SFT_RECIPE",
    "ppo": "lucidrl.recipes.control.PPO_RECIPE",
}
"""Where the recipe of each command is; imported at use, because what language models need takes seconds to import."""


def launch(
    algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str], resume: Path | None
) -> None:
    """Start or continue a run and show it."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, as by torchrun, but this command starts its ranks itself; "
            "run it without torchrun, with cluster.num_workers=..."
        )
    configure_rich_logging(level="WARNING", show_path=False)
    if resume is not None and (config_file is not None or preset is not None):
        raise ConfigError("--resume takes the settings of the run itself; leave out --config and --preset")
    layers = _layers(config_file, preset) if resume is None else [run_config_path(resume)]
    with profiling_as_asked(merged_settings(*layers, overrides=overrides, resolve=False)):
        _launch(algorithm, config_file, preset, overrides, resume)


def _launch(
    algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str], resume: Path | None
) -> None:
    recipe = _recipe(algorithm)
    config: BaseRunConfig
    if resume is not None:
        config, folder = read_run_config(recipe.schema, resume, overrides), resume
        check_patterns(config.worker_names)
    else:
        config = resolve(recipe, config_file, preset, overrides)
        # Before the folder is made: a run that cannot start should leave nothing behind.
        check_patterns(config.worker_names)
        recipe.preflight(config)
        folder = create_run_folder(config, algorithm)
    use_traces_folder(folder)
    display = RunDisplay(
        algorithm,
        config.max_steps,
        folder,
        validated_on=recipe.validated_on,
        next_commands=recipe.next_commands(config, folder),
    )
    display.announce(f"{algorithm}: {config.title}, in {folder}")
    display.console.print(arithmetic_table(config))
    request = profile_request()
    if request is not None and request.steps.start > config.max_steps:
        display.announce(f"nothing will be recorded: the steps {request.steps} come after the last, {config.max_steps}")
    with display, occupied(folder), driver_log(folder):
        last_step = recipe.run(config, folder, display, resume is not None)
    display.summary(last_step)


def resolve(recipe: Recipe[C], config_file: Path | None, preset: str | None, overrides: list[str]) -> C:
    """Preset, then file, then overrides."""
    if preset is None and config_file is None:
        preset = recipe.default_preset(overrides)
    return load_config(recipe.schema, *_layers(config_file, preset), overrides=overrides)


def _layers(config_file: Path | None, preset: str | None) -> list[Path]:
    named = [preset_path(preset)] if preset is not None else []
    return named if config_file is None else [*named, config_file]


def check_run(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> None:
    """Print what a run would be; raise if it could not be."""
    if algorithm not in RECIPES:
        raise ConfigError(f"--algorithm={algorithm} is not known; choose one of {', '.join(RECIPES)}")
    settings = merged_settings(*_layers(config_file, preset), overrides=overrides, resolve=False)
    with profiling_as_asked(settings):
        recipe = _recipe(algorithm)
        config: BaseRunConfig = resolve(recipe, config_file, preset, overrides)
        check_patterns(config.worker_names)
        found = recipe.preflight(config)
    console = Console()
    console.print(Syntax(dump_yaml(config), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found.table())
    console.print("[green]ok[/]: nothing stands in the way of this run")


def arithmetic_table(config: BaseRunConfig) -> Table:
    table = Table("batch arithmetic", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in config.arithmetic():
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table


def _recipe(algorithm: str) -> Recipe[Any]:
    return import_object(RECIPES[algorithm], "--algorithm")
