"""`lucidrl report`: its arguments. The work is in `lucidrl.report.page`, which is imported at use."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write; default: report.html in the first run folder.", show_default=False),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page again every few seconds, until all runs have ended.")
    ] = False,
    every: Annotated[float, typer.Option(min=1.0, help="With --watch: seconds between two pages.")] = 10.0,
) -> None:
    """Write a page that shows a run, or compares several: curves, time, samples, settings, warnings.

    Examples:

        lucidrl report runs/grpo/exp_001
        lucidrl report runs/grpo/exp_001 runs/grpo/exp_002 --output comparison.html
        lucidrl report runs/grpo/exp_001 --watch

    The page is one HTML file: open it in a browser, from disk, without a network. Every run writes its own page at
    its end (`report.enabled`).
    """
    from lucidrl.report.page import write_report
    from lucidrl.report.run_data import RunState, read_run
    from lucidrl.utils.run_folder import REPORT_NAME

    path = output or runs[0] / REPORT_NAME
    is_first = True
    with suppress(KeyboardInterrupt):
        while True:
            found = [read_run(run) for run in runs]
            size_bytes = write_report(found, path)
            is_going = watch and any(run.state is RunState.RUNNING for run in found)
            if is_first:
                follows = f"; it is written again every {every:g} s until the run ends" if is_going else ""
                typer.echo(f"report: {path} ({size_bytes / 1e6:.1f} MB){follows}")
            if not is_going:
                return
            is_first = False
            time.sleep(every)
