"""What the command line does with a run: settings together, folder claimed, display on, parts wired, summary."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Column, Table

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.recipes.configs import (
    GRPORunConfig,
    SFTRunConfig,
    arithmetic_of,
    default_grpo_preset,
    preset_path,
)
from lucidrl.recipes.display import RunDisplay
from lucidrl.recipes.preflight import preflight
from lucidrl.recipes.run_folder import create_run_folder, occupied, read_run_config
from lucidrl.utils.config import dump_yaml, load_config
from lucidrl.utils.logger import configure_rich_logging

SCHEMAS: dict[str, type[GRPORunConfig] | type[SFTRunConfig]] = {"grpo": GRPORunConfig, "sft": SFTRunConfig}

C = TypeVar("C", GRPORunConfig, SFTRunConfig)
Runner = Callable[[C, Path, RunDisplay, bool], int]


def launch(
    algorithm: str,
    schema: type[C],
    run: Runner[C],
    config_file: Path | None,
    preset: str | None,
    overrides: list[str],
    resume: Path | None,
) -> None:
    """Start or continue a run and show it."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1"):
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, as by torchrun, but this command starts its ranks itself; "
            "run it without torchrun, with cluster.num_workers=..."
        )
    configure_rich_logging(level="WARNING", show_path=False)
    silence_progress_bars()
    console = Console()
    if resume is not None:
        if config_file is not None or preset is not None:
            raise ConfigError("--resume takes the settings of the run itself; leave out --config and --preset")
        config, folder = read_run_config(schema, resume, overrides), resume
    else:
        config = resolve(algorithm, schema, config_file, preset, overrides)
        # Before the folder is made: a run that cannot start should leave nothing behind.
        preflight(config)
        folder = create_run_folder(config, algorithm)
    max_steps = config.grpo.max_steps if isinstance(config, GRPORunConfig) else config.sft.max_steps
    question = "12+30=" if config.policy.model_name in EMBEDDED_MODELS else "your question"
    display = RunDisplay(algorithm, max_steps, folder, console, question)
    display.announce(f"{algorithm}: {config.policy.model_name} on {config.env.name}, in {folder}")
    console.print(arithmetic_table(config))
    with display, occupied(folder):
        last_step = run(config, folder, display, resume is not None)
    display.summary(last_step)


def resolve(algorithm: str, schema: type[C], config_file: Path | None, preset: str | None, overrides: list[str]) -> C:
    """Preset, then file, then overrides."""
    if preset is None and config_file is None and algorithm == "grpo":
        preset = default_grpo_preset(overrides)
    layers = [preset_path(preset)] if preset is not None else []
    if config_file is not None:
        layers.append(config_file)
    return load_config(schema, *layers, overrides=overrides)


def check_run(algorithm: str, config_file: Path | None, preset: str | None, overrides: list[str]) -> None:
    """Print what a run would be; raise if it could not be."""
    if algorithm not in SCHEMAS:
        raise ConfigError(f"--algorithm={algorithm} is not known; choose one of {', '.join(SCHEMAS)}")
    config: GRPORunConfig | SFTRunConfig
    if algorithm == "grpo":
        config = resolve(algorithm, GRPORunConfig, config_file, preset, overrides)
    else:
        config = resolve(algorithm, SFTRunConfig, config_file, preset, overrides)
    silence_progress_bars()
    found = preflight(config)
    console = Console()
    console.print(Syntax(dump_yaml(config), "yaml", background_color="default"))
    console.print(arithmetic_table(config))
    console.print(found.table())
    console.print("[green]ok[/]: nothing stands in the way of this run")


def arithmetic_table(config: GRPORunConfig | SFTRunConfig) -> Table:
    table = Table("batch arithmetic", "", Column("set by", overflow="fold"), box=None, pad_edge=False)
    for quantity, value, source in arithmetic_of(config):
        table.add_row(quantity, str(value), f"[dim]{source}[/]")
    return table


def silence_progress_bars() -> None:
    """Loading and saving a model is not worth a bar among our own lines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
