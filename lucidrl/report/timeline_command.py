"""The arguments of `lucidrl timeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def timeline_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with recorded steps (profile.steps).")],
) -> None:
    """Merge the traces of a run into one timeline, `traces/timeline.json.gz`.

    Example:

        lucidrl timeline runs/grpo/exp_001

    A run with `profile.steps` writes its timeline when it ends; this command writes it again, for instance after you
    copied the traces of other nodes into the folder. Open the file with ui.perfetto.dev or chrome://tracing. Prints
    what is missing.
    """
    from lucidrl.report.timeline import write_timeline

    timeline = write_timeline(run)
    for sentence in timeline.described():
        typer.echo(sentence)
