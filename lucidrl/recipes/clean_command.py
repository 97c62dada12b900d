"""`lucidrl clean`: its arguments. The work is in `lucidrl.recipes.clean`, which is imported at use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def clean_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Run folders, or folders of runs; default: runs.", show_default=False),
    ] = None,
    optimizer: Annotated[
        bool,
        typer.Option(
            "--optimizer", help="Also free the optimizer state of finished runs, which then cannot be resumed."
        ),
    ] = False,
    runs: Annotated[bool, typer.Option("--runs", help="Remove the named runs completely.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Free without asking.")] = False,
) -> None:
    """Show the disk space of runs, and free it.

    Examples:

        lucidrl clean
        lucidrl clean runs/grpo --optimizer
        lucidrl clean runs/grpo/exp_001 runs/grpo/exp_002 --runs --yes

    Frees the checkpoints that are neither the newest nor the best of their run, after asking you. Without a terminal it
    only lists them, unless you write --yes. Runs that a process is working on, and files that no run wrote, are left
    alone. Links are not followed.
    """
    from lucidrl.recipes.clean import Free, clean

    def confirm(question: str) -> bool:
        if not yes and not sys.stdin.isatty():
            typer.echo("nothing is freed: standard input is not a terminal; write --yes to free without asking")
            return False
        return yes or typer.confirm(question)

    clean(paths or [Path("runs")], Free(optimizer=optimizer, runs=runs), confirm=confirm)
