"""`lucidrl runs` and `lucidrl compare`: their arguments. What does the work is imported at use."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def runs_command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder of runs, or of folders of runs; default: runs.", show_default=False
        ),
    ] = Path("runs"),
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN",
            help="Sort by name, algorithm, model, steps, state, best, started, duration or size.",
        ),
    ] = "name",
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs: algorithm, model, steps, state, best metric, duration and size on disk.

    Examples:

        lucidrl runs
        lucidrl runs runs/grpo --sort best
        lucidrl runs --sort started --json

    The state is running, finished, stopped (before its last step), crashed, or empty (nothing recorded). `best` is the
    best value of checkpoint.metric in validation. Sorted by steps, best, started, duration or size, the largest, best
    or newest comes first.
    """
    from lucidrl.report.runs_table import list_runs, show_runs

    rows = list_runs(folder, sort, reverse=reverse)
    if as_json:
        return _echo_json([row.to_json() for row in rows])
    from rich.console import Console

    return show_runs(Console(highlight=False), rows)


def compare_command(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Run folders, RUN@best, RUN@newest or checkpoints.", show_default=False),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings that differ, and the last and best values of their metrics.

    Examples:

        lucidrl compare runs/grpo/exp_001 runs/grpo/exp_002
        lucidrl compare runs/grpo/exp_001@best runs/grpo/exp_002@best

    Differences are those to the first run. Of a checkpoint, the metrics up to its step are compared.
    """
    from lucidrl.report.compare import compare_runs, show_comparison

    comparison = compare_runs(sources)
    if as_json:
        return _echo_json(comparison.to_json())
    from rich.console import Console

    return show_comparison(Console(highlight=False), comparison)


def _echo_json(content: Any) -> None:
    """Print JSON; NaN and infinities, which JSON lacks, become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    typer.echo(json.dumps(finite(content), indent=2, default=str))
